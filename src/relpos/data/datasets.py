"""The user's own datasets as a task: (train, validation, test), each a PyTorch dataset or a tuple of tensors.

Images [C, height, width] with one class each are an `ImageTask`, for which relpos has models. Anything else needs the
user's own model, and also a step unless its targets are classes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset, default_collate

from relpos.core.checks import fail, shape_of
from relpos.data.task import FIRST, STANDARD, ImageProbe, ImageTask, Probe, Split, Task, TaskKind
from relpos.data.text import FIRST_ON_TEXT, STANDARD_ON_TEXT

_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_ALONG = 8
"""Minimum number of patches along height and width if the user gives no patch size."""
_LOOKED_AT = 8
"""Items per split in the fingerprint of a dataset that is not made of tensors."""


def of_datasets(given: Sequence[Any], patch: tuple[int, int] | None = None) -> Task:
    """The task of three datasets.

    Raises:
        ValueError: there are not three, one is no dataset or empty, or patches do not divide the images.
    """
    splits = {}
    for name, data in zip(_SPLITS, given, strict=True):
        is_tensors = isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data)
        dataset = TensorDataset(*data) if is_tensors else data
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str):
            remedy = "Pass one with __len__ and __getitem__, or a tuple of tensors."
            fail(f"a dataset for {name}", shape_of(data), remedy)
        if len(dataset) == 0:
            fail(f"a dataset for {name} with items", "an empty one", "Add some.")
        splits[name] = dataset
    first = splits["train"][0]
    if _is_image_with_class(first):
        return ImageDatasets(splits, _patch(tuple(first[0].shape[1:]), patch))
    if patch is not None:
        fail("images [C, height, width] with a class each for patch", _shapes(first), "Leave patch out.")
    return Datasets(splits)


def _is_image_with_class(item: Any) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        return False
    is_class = isinstance(item[1], int) or (
        isinstance(item[1], Tensor) and item[1].dim() == 0 and not item[1].is_floating_point()
    )
    return is_class and item[0].dim() == 3 and item[0].is_floating_point()


def _patch(image: tuple[int, ...], asked: tuple[int, int] | None) -> tuple[int, int]:
    """The requested patch, else the largest that leaves at least `_ALONG` along height and width."""
    if asked is None:
        rows, columns = (
            max(one for one in range(1, edge + 1) if edge % one == 0 and (edge // one >= _ALONG or one == 1))
            for edge in image
        )
        return rows, columns
    if any(edge % one for edge, one in zip(image, asked, strict=True)):
        came = f"images of {image[0]} x {image[1]}"
        fail(f"images divisible by the patch size {asked[0]} x {asked[1]}", came, "Choose another patch.")
    return asked


def _shapes(item: Any) -> str:
    """The shapes of an item's tensors, as text."""
    return f"items of {', '.join(shape_of(leaf) for leaf in pytree.tree_leaves(item))}"


class _OfDatasets(Task):
    """The common part of both kinds of datasets."""

    name: ClassVar[str] = "datasets"
    summary: ClassVar[str] = "Datasets of your own."

    def __init__(self, splits: dict[Split, Any]) -> None:
        self.splits = splits
        counts = [f"{len(splits[name]):,} {words}" for name, words in zip(_SPLITS, _FOR, strict=True)]
        self.title = "Your datasets"
        self.description = f"{type(splits['train']).__name__}: {counts[0]}, {counts[1]}, {counts[2]}."
        self.options: dict[str, Any] = {"contents": _contents(splits)}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(held) for name, held in self.splits.items()}

    def _batch(self, split: Split, chosen: Sequence[int]) -> Any:
        return default_collate([self.splits[split][index] for index in chosen])

    def batches(self, batch_size: int, seed: int, *, start: int = 0) -> Iterator[Any]:
        items, generator = len(self.splits["train"]), torch.Generator().manual_seed(seed)
        an_epoch = items // batch_size  # a short last batch would give its items more weight
        for epoch in itertools.count():
            order = torch.randperm(items, generator=generator).tolist()
            for number in range(max(0, start - epoch * an_epoch), an_epoch):
                batch = self._batch("train", order[number * batch_size : (number + 1) * batch_size])
                yield tuple(batch) if isinstance(batch, list) else batch

    def once(self, split: Split, batch_size: int) -> Iterator[Any]:
        count = len(self.splits[split])
        for start in range(0, count, batch_size):
            batch = self._batch(split, range(start, min(start + batch_size, count)))
            yield tuple(batch) if isinstance(batch, list) else batch


_FOR = ("inputs to train on", "for validation", "to test")


class Datasets(_OfDatasets):
    """Inputs and targets of any kind. The first axis of the first input counts as its tokens."""

    kind: ClassVar[TaskKind] = "other"
    measure: ClassVar[Literal["accuracy", "bits_per_byte"]] = "accuracy"
    positions: ClassVar[tuple[str, ...]] = FIRST_ON_TEXT
    standard: ClassVar[tuple[str, ...]] = STANDARD_ON_TEXT

    @property
    def grid(self) -> tuple[int, ...]:
        first = next(leaf for leaf in pytree.tree_leaves(self.splits["train"][0]))
        return (first.shape[0] if isinstance(first, Tensor) and first.dim() else 1,)

    @property
    def size(self) -> int:
        return self.grid[0]

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (OwnProbe("test", "test", "test", None, 0, "The test data."),)

    def noise(self, grid: tuple[int, ...], batch_size: int) -> Any:
        return next(self.batches(batch_size, 0))


class OwnProbe(Probe):
    """The plain test of data with one input size, so that models cannot grow."""

    @property
    def size(self) -> int:
        raise NotImplementedError("these data have one size")


class ImageDatasets(_OfDatasets, ImageTask):
    """Images of one size with one class each.

    Raises:
        ValueError: a class is below 0, or items differ in kind.
    """

    positions: ClassVar[tuple[str, ...]] = FIRST
    standard: ClassVar[tuple[str, ...]] = STANDARD

    def __init__(self, splits: dict[Split, Any], patch_size: tuple[int, int]) -> None:
        super().__init__(splits)
        image = splits["train"][0][0]
        self.channels, self.image_size, self.patch_size = image.shape[0], tuple(image.shape[1:]), patch_size
        highest = max(int(self.labels(split).max()) for split in splits)
        lowest = min(int(self.labels(split).min()) for split in splits)
        if lowest < 0:
            fail("classes counted from 0", str(lowest), "Renumber them.")
        classes = hashlib.sha256(b"".join(_bytes(self.labels(split)) for split in _SPLITS)).hexdigest()[:12]
        self.options["contents"] += f", classes {classes}"
        named = getattr(splits["train"], "classes", ())
        self.classes = tuple(map(str, named if len(named) > highest else range(highest + 1)))

    @cached_property
    def _labels(self) -> dict[Split, Int[Tensor, " n"]]:
        return {
            split: torch.tensor([int(held[index][1]) for index in range(len(held))])
            for split, held in self.splits.items()
        }

    @property
    def probes(self) -> tuple[ImageProbe, ...]:
        return (ImageProbe("test", "test", "test", None, 0, "The test images.", self.image_size, 1),)

    def labels(self, split: Split) -> Int[Tensor, " n"]:
        return self._labels[split]

    def examples(
        self, probe: ImageProbe, split: Split, chosen: slice = slice(None)
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        which = range(len(self.splits[split]))[chosen]
        return torch.stack([self.splits[split][index][0] for index in which])[:, None], self.labels(split)[chosen]


def _contents(splits: dict[Split, Any]) -> str:
    """A fingerprint of the sizes and the items: all tensors, or else eight evenly spaced items per split.

    Items are read twice with the same random seed. Values that differ nevertheless, such as training items augmented by
    their own generator, are left out. For images with classes, `ImageDatasets` adds all classes.
    """
    digest = hashlib.sha256()
    for name in _SPLITS:
        held = splits[name]
        if type(held) is TensorDataset:
            leaves: list[Any] = [[x.shape, x.dtype, _bytes(x)] for x in held.tensors]
        else:
            last = len(held) - 1
            spread = sorted({round(number * last / (_LOOKED_AT - 1)) for number in range(_LOOKED_AT)})
            first, second = (_read(held, spread) for _ in range(2))
            leaves = [one for one, other in zip(first, second, strict=False) if one == other]
        digest.update(repr(leaves).encode())
    counts = " + ".join(str(len(splits[name])) for name in _SPLITS)
    return f"{counts} items, sha256 {digest.hexdigest()[:12]}"


def _read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The leaves of some items, read with fixed random seeds; the global random states are restored."""
    python, array, own = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.default_generator.manual_seed(0)
        leaves = [leaf for index in indices for leaf in pytree.tree_leaves(dataset[index])]
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.set_rng_state(own)
    return [_bytes(leaf) if isinstance(leaf, Tensor | np.ndarray) else repr(leaf) for leaf in leaves]


def _bytes(held: Tensor | NDArray[Any]) -> bytes:
    if isinstance(held, Tensor):
        held = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(held.tobytes()).digest()
