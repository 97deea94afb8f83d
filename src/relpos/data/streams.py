"""Images that are read while training: more than fit into memory, or without an end.

    shards, in a drawn order   ->  block of `buffer` training pictures  ->  permuted, cut into batches  ->  next block

The order depends on the seed, the batch size and the data alone, so every mechanism sees the same batches. A block that
holds a whole epoch is permuted as pictures in memory are: both give the same batches, bit for bit. The library
`datasets` and webdataset have shuffle buffers of their own; after an interruption they fill them with other samples.
Here the blocks before the first batch are only counted: read, without decoding.

Samples for validation and test are kept in memory. They are among the first of every shard, which are read before
training (the survey).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from relpos.core.checks import fail
from relpos.data.sampled_images import PictureOptions, SampledImages
from relpos.data.sources.source import LabelledImage, SampleSource, Unreadable, digest_of
from relpos.data.sources.splitting import split_of
from relpos.data.task import Split

if TYPE_CHECKING:
    from relpos.data.decode import Pixels
    from relpos.data.survey import Survey

BUFFER = 2048
"""Pictures that are shuffled together, by default."""
SURVEY = 20_000
"""Training samples that are read before training, by default."""


class StreamedImages(SampledImages):
    """Images of a source, read while training.

    Args:
        source, how: see `SampledImages`.
        buffer: pictures that are shuffled together. survey: training samples that are read before training.

    Raises:
        ValueError: see `SampledImages`; in training, a class that the survey has not met.
    """

    name: ClassVar[str] = "stream"
    summary: ClassVar[str] = "The same, read while training."
    streamed: ClassVar[bool] = True

    def __init__(self, source: SampleSource, how: PictureOptions, buffer: int = BUFFER, survey: int = SURVEY) -> None:
        self._source, self.buffer = source, buffer
        super().__init__(source, how, survey)
        digest = hashlib.sha256(source.identity.encode() + self._survey.digest.encode()).hexdigest()[:12]
        read = sum(self.sizes.values())
        contents = f"{'' if self._survey.complete else 'a stream, of which '}{read} images, sha256 {digest}"
        self.options |= {"streaming": True, "buffer": buffer, "survey": survey, "contents": contents}
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    @classmethod
    def _made(cls, source: SampleSource, how: PictureOptions, options: dict[str, Any]) -> Self:
        return cls(source, how, options.get("buffer", BUFFER), options.get("survey", SURVEY))

    def _counted(self, found: Survey) -> str:
        counted = super()._counted(found)
        read = (
            " These are the first of every shard, and training goes on to the others; leakage is counted among these."
        )
        how = f"Training images are read while training, {self.buffer} shuffled together."
        return f"{counted}{'' if found.complete else read} {how}"

    def pictures(self, split: Split) -> Num[Tensor, "n C height width"]:
        """The pictures of a held-out split, before standardisation."""
        if split == "train":
            raise NotImplementedError("a stream's training pictures are not in memory; see batches")
        return super().pictures(split)

    def batches(
        self, batch_size: int, seed: int, *, start: int = 0
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        known = self.sizes["train"] if self._survey.complete else None
        if not 1 <= batch_size <= (known or batch_size):  # there is no full batch
            fail(f"a batch size from 1 to {known}", str(batch_size), "There are no more training images.")
        with closing(_LeftOut()) as left_out:
            yield from self._endless(batch_size, seed, start, known, left_out)

    def _endless(
        self, batch_size: int, seed: int, start: int, known: int | None, left_out: _LeftOut
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        cell = torch.tensor(self._cell())
        generator = torch.Generator().manual_seed(seed)
        size = max(1, self.buffer // batch_size) * batch_size  # a block ends with a batch
        number = 0
        for epoch in itertools.count():
            before = number
            shards = self._shards(seed, epoch, known is not None and known <= size)
            with closing(self._samples(shards, left_out)) as samples:
                while held := self._block(
                    itertools.islice(samples, size), number + size // batch_size > start, left_out
                ):
                    order = torch.randperm(held.count, generator=generator)
                    for chosen in order.split(batch_size)[: held.count // batch_size]:
                        corners = cell[torch.randint(len(cell), (batch_size,), generator=generator)]
                        if number >= start:
                            assert held.pictures is not None
                            assert held.labels is not None
                            yield self._paste(held.pictures[chosen], corners, self.image_size), held.labels[chosen]
                        number += 1
            if number == before:
                fail("an epoch of at least one batch", f"none of {batch_size} images", "Pass a smaller batch size.")
            if number > start:
                left_out.close()  # the other epochs leave out the same
            else:  # nothing was decoded
                left_out.clear()

    def _shards(self, seed: int, epoch: int, in_one_block: bool) -> list[int]:
        """The order in which an epoch reads the shards: drawn, unless all samples are permuted together."""
        count = self._source.shards["train"]
        if in_one_block:
            return list(range(count))
        drawn = int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")
        return torch.randperm(count, generator=torch.Generator().manual_seed(drawn)).tolist()

    def _samples(self, shards: list[int], left_out: _LeftOut) -> Generator[LabelledImage]:
        """The training samples of an epoch, without those that the survey could not decode.

        Raises:
            ValueError: a shard that the survey has opened cannot be opened: every run must see the same samples.
        """
        taken, unreadable = self._survey.taken, self._survey.unreadable
        for shard in shards:
            with closing(self._source.read("train", shard)) as items:
                for number, item in enumerate(items):
                    if isinstance(item, Unreadable):
                        if item.is_shard and ("train", shard) not in self._survey.closed:
                            came = f"{item.name} ({item.reason})"
                            fail("the shards that were there before training", came, "Restore it.")
                        self._reading.refuse(item.name, item.reason)
                        if number >= self._survey.each:  # the survey has counted those before
                            left_out.add(item.name, item.reason)
                    elif ("train", shard, item.place) not in unreadable and (
                        not taken or split_of(digest_of(item.image), taken) == "train"
                    ):
                        yield item

    def _block(self, samples: Iterator[LabelledImage], decode: bool, left_out: _LeftOut) -> _ShuffledBlock | None:
        """The next block; only its number of samples unless it is decoded; None at the end of the epoch.

        A sample that cannot be decoded, and that the survey has not met, gives way to the next one of the block: the
        number of batches must be known without decoding.
        """
        from relpos.data.survey import stacked, together  # needs Pillow

        count, labels = 0, list[int]()
        pictures: list[Pixels | str] = []
        for some in together(samples):
            count += len(some)
            if decode:
                labels += [self._number(one) for one in some]
                pictures += self._decoded(some, left_out)
        if not count or not decode:
            return _ShuffledBlock(count) if count else None
        good = [at for at, one in enumerate(pictures) if not isinstance(one, str)]
        if not good:
            fail("images that can be decoded", f"none in a block of {count}", "Repair the shards.")
        at = [good[bisect.bisect_left(good, here) % len(good)] for here in range(count)]
        whole = stacked([one for one in pictures if not isinstance(one, str)], self.channels)
        rows = {here: row for row, here in enumerate(good)}
        if len(good) < count:
            whole = whole[torch.tensor([rows[here] for here in at])]
        return _ShuffledBlock(count, whole, torch.tensor([labels[here] for here in at]))

    def _number(self, sample: LabelledImage) -> int:
        number = self._numbers.get(sample.label)
        if number is None:
            remedy = "Write the shards in a random order, or pass a larger --survey."
            fail(f"one of the {len(self.classes)} classes of the survey", f"{sample.label!r} of {sample.name}", remedy)
        return number

    def _decoded(self, samples: list[LabelledImage], left_out: _LeftOut) -> list[Pixels | str]:
        decoded = self._reading.decoded(samples)
        for sample, one in zip(samples, decoded, strict=True):
            if isinstance(one, str):
                self._reading.refuse(sample.name, one)
                left_out.add(sample.name, one)
        return decoded


class _LeftOut:
    """Counts samples that training leaves out beyond the survey's, and says so in one line at the end of a run, or of
    its first epoch."""

    def __init__(self) -> None:
        self._count, self._first, self._is_said = 0, "", False

    def add(self, name: str, reason: str) -> None:
        self._first = self._first or f"{name} ({reason})"
        self._count += 1

    def clear(self) -> None:
        self._count = 0

    def close(self) -> None:
        """Say how many, once."""
        if self._count and not self._is_said:
            such = "sample" if self._count == 1 else "samples, such as"
            warnings.warn(f"training left out {self._count} {such} {self._first}", RuntimeWarning, stacklevel=2)
            self._is_said = True


@dataclass(frozen=True)
class _ShuffledBlock:
    """Samples that are shuffled together: their number, and the pictures and labels if they are needed."""

    count: int
    pictures: Num[Tensor, "n C height width"] | None = None
    labels: Int[Tensor, " n"] | None = None
