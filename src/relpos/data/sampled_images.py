"""Images of a source as a task, all in memory.

Pictures and probes are those of a folder of images (`relpos.data.pictures`). Samples keep the order of their source:
the same samples in the same order give the same figures, whatever they come from. Splits that the source lacks are
taken from the training samples by `relpos.data.sources.splitting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from relpos.core.checks import fail, require_choice, require_int, shape_of
from relpos.data.folder import SHARES
from relpos.data.pictures import IMAGE_SIZE, PATCH, Pictures
from relpos.data.sources.source import SampleSource
from relpos.data.sources.splitting import SPLIT_ORDER, Leakage
from relpos.data.task import Watch


@dataclass(frozen=True)
class PictureOptions:
    """How the images of a source become pictures.

    Attributes:
        image_size, patch, rotate, max_pixels: see `relpos.data.ImageFolder`.
        bad_data: "skip" leaves out and counts samples that cannot be used, "fail" names the first.
        watch: receives how many samples are read, of how many.
    """

    image_size: tuple[int, int]
    patch: tuple[int, int]
    rotate: bool
    max_pixels: int
    bad_data: str
    watch: Watch | None

    @classmethod
    def of(
        cls,
        image_size: int | Sequence[int] | None,
        patch: int | Sequence[int] | None,
        rotate: bool,
        max_pixels: int | None,
        bad_data: str,
        watch: Watch | None,
    ) -> PictureOptions:
        """The same, with defaults for None."""
        from relpos.data.decode import MAX_PIXELS

        max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
        require_int(max_pixels, "max_pixels", at_least=1)
        require_choice(bad_data, "bad_data", ("skip", "fail"))
        sizes = IMAGE_SIZE if image_size is None else pair_of(image_size, "image_size")
        return cls(sizes, PATCH if patch is None else pair_of(patch, "patch"), rotate, max_pixels, bad_data, watch)


class SampledImages(Pictures):
    """Images of a source, all in memory.

    Args:
        source: the samples. how: how they become pictures.
        survey: of a stream, how many training samples are read before training.

    Raises:
        ValueError: sizes that do not fit; samples that lack, cannot be used, or do not fit into memory.
    """

    name: ClassVar[str] = "samples"
    summary: ClassVar[str] = "Images of a dataset of Hugging Face or of WebDataset's shards."
    streamed: ClassVar[bool] = False

    def __init__(self, source: SampleSource, how: PictureOptions, survey: int | None = None) -> None:
        from relpos.data.survey import Decoding, Survey, stacked  # needs Pillow

        super().__init__(how.image_size, how.patch, how.rotate)
        self._reading = Decoding(self.picture_size, how.max_pixels, how.bad_data)
        found = Survey.of(source, self._reading, survey, how.watch)
        self.classes, self.channels = found.classes(source), 1 if found.grey else 3
        self.skipped, self.left_out = tuple(found.bad), found.left_out
        among = "" if found.complete else f", among the first {sum(map(len, found.labels.values()))}"
        self.leakage = tuple(found.leakage.lines("images", among))
        numbers = {name: number for number, name in enumerate(self.classes)}
        for split in SPLIT_ORDER:
            self._labels[split] = torch.tensor([numbers[label] for label in found.labels[split]])
            if found.pictures[split]:
                self._pixels[split] = stacked(found.pictures[split], self.channels)
        if not self.streamed:
            found.moments.add(self._pixels["train"])
        self._level = found.moments.level(self.channels)
        self._survey = found
        self.title = source.title
        self.description = f"{self._counted(found)} {self._how_shown()}" + "".join(f" {one}" for one in self.leakage)
        self.options = {
            **({"handed_over": True} if source.shown is None else {"source": source.shown}),
            **source.columns,
            "image_size": list(how.image_size),
            "patch": list(how.patch),
            "rotate": how.rotate,
            "max_pixels": how.max_pixels,
            "bad_data": how.bad_data,
            "contents": f"{sum(self.sizes.values())} images, sha256 {found.digest[:12]}",
        }
        found.pictures.clear()  # held as tensors, and not sent twice to other processes
        found.leakage = Leakage()

    def _counted(self, found: Any) -> str:
        sizes, rule = self.sizes, ""
        if found.taken:
            shares = " and ".join(f"{SHARES[split]:.0%} for {split}" for split in found.taken)
            rule = f" (about {shares}, by a hash of each image's bytes)"
        return (
            f"{sum(sizes.values())} images of {len(self.classes)} classes in {self.title}: {sizes['train']} for "
            f"training, {sizes['validation']} for validation, {sizes['test']} for test{rule}."
        )

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        """The task of `options`; if they include `contents`, the samples must be unchanged."""
        if "source" not in options:
            fail("options with source", str(options), "A dataset that Python handed over has to be handed over again.")
        how = PictureOptions.of(
            options.get("image_size"),
            options.get("patch"),
            options.get("rotate", False),
            options.get("max_pixels"),
            options.get("bad_data", "skip"),
            watch,
        )
        task = cls._made(_source(options, how, cls.streamed), how, options)
        if options.get("contents", task.options["contents"]) != task.options["contents"]:
            came = f"{task.options['contents']} in {options['source']}"
            fail(f"{options['contents']}", came, "The data have changed; restore them, or start again.")
        return task

    @classmethod
    def _made(cls, source: SampleSource, how: PictureOptions, options: dict[str, Any]) -> Self:
        return cls(source, how)


def _source(options: dict[str, Any], how: PictureOptions, streaming: bool) -> SampleSource:
    """The source that a task's options name, without a cache."""
    from relpos.data.decode import bytes_at_most

    kind, _, rest = options["source"].partition(":")
    image, label = options.get("image_column"), options.get("label_column")
    most = bytes_at_most(how.max_pixels)
    if kind == "hf":
        from relpos.data.sources.hugging_face import HuggingFace

        return HuggingFace(rest, image, label, streaming=streaming, image_at_most=most)
    from relpos.data.sources.shards import ShardFiles

    return ShardFiles(rest, image, label, image_at_most=most)


def pair_of(size: object, name: str) -> tuple[int, int]:
    """(rows, columns) of a size that is one number or both.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(size, int):
        return size, size
    if not isinstance(size, tuple | list) or len(size) != 2:
        fail(f"{name} as one number, or rows and columns", shape_of(size), "Pass one or both.")
    rows, columns = size
    return rows, columns
