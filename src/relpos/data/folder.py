"""A folder of images by class: its files, and the split of each image.

    DIR/{train,val,test}/class/...   val may be valid or validation; a split without a folder is taken from train
    DIR/class/...                    every split is taken

Images are found at any depth below a class's folder, by the endings that Pillow opens. The rule for taking a split
depends only on the paths below DIR of the readable files. In each class, they are sorted by the SHA-256 of their paths.
The first 20% are for test if it has no folder, the next 10% for validation if it has none, at least one image each. The
rest are for training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos.core.checks import fail
from relpos.data.task import Split
from relpos.files.reading import require_utf8
from relpos_command.visible import visible

SPLITS: dict[str, Split] = {
    "train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test",
}  # fmt: skip
"""Folder names in lower case, and their splits."""
SHARES: dict[Split, float] = {"test": 0.2, "validation": 0.1}
"""The share of a class's images that a split without a folder takes, in the order of taking."""
_LITTER = {"thumbs.db", "desktop.ini", "__macosx"}
"""Files that operating systems create, besides hidden ones."""


@dataclass(frozen=True)
class Found:
    """An image file: its path below the folder, its class, and the split that its folder states."""

    path: str
    label: str
    split: Split


@dataclass(frozen=True)
class Listing:
    """The image files of a folder.

    Attributes:
        images: sorted by split, class and name. classes: sorted.
        taken: the splits without a folder, which are taken from the training images.
        ignored: visible files that are no images, as paths below the folder.
    """

    images: tuple[Found, ...]
    classes: tuple[str, ...]
    taken: tuple[Split, ...]
    ignored: tuple[str, ...]


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """Folders and files directly inside, sorted, without hidden ones."""
    try:
        there = list(folder.iterdir())
    except OSError as error:
        fail("a folder that can be read", f"{folder} ({error.strerror})", "Change its permissions, or move it.")
    seen = sorted(path for path in there if path.name[0] != "." and path.name.lower() not in _LITTER)
    return [path for path in seen if path.is_dir()], [path for path in seen if not path.is_dir()]


def _below(folder: Path) -> list[Path]:
    """Files below a folder, sorted, without hidden ones. Links to folders are not followed: they may form a cycle."""
    found: list[Path] = []
    left = [folder]
    while left:
        folders, files = _inside(left.pop())
        links = {path for path in folders if path.is_symlink()}
        found += [*files, *links]
        left += [path for path in folders if path not in links]
    return sorted(found)


def _split_folders(folder: Path) -> dict[Split, Path]:
    """The split folders: none unless `train` is a folder that contains folders."""
    folders, _ = _inside(folder)
    named = {path.name.lower(): path for path in folders}
    if len(named) < len(folders) and set(named) & set(SPLITS):
        twice = next(path for path in folders if named[path.name.lower()] != path)
        fail(
            "folders whose names differ by more than capitals", f"{twice} and {named[twice.name.lower()]}", "Join them."
        )
    if "train" not in named:
        if named and set(named) <= set(SPLITS):
            fail(
                f"a folder train with {', '.join(named)}",
                f"none in {folder}",
                "Add it, with a folder for each class.",
            )
        return {}
    if not _inside(named["train"])[0]:
        return {}
    found: dict[Split, Path] = {}
    for name, path in named.items():
        if name not in SPLITS:
            fail(
                "only the folders train, val and test",
                f"{path}",
                "Move it elsewhere, or keep one folder per class without train, val and test.",
            )
        if SPLITS[name] in found:
            fail(f"one folder for {SPLITS[name]}", f"{found[SPLITS[name]]} and {path}", "Keep only one of them.")
        found[SPLITS[name]] = path
    return found


def list_folder(folder: Path, endings: Iterable[str]) -> Listing:
    """List a folder of images.

    Args:
        endings: endings of image files, in lower case with the dot.

    Raises:
        ValueError: no folder, no images, one class, an empty class, a class that a split lacks.
    """
    if not folder.is_dir():
        came = f"the file {folder}" if folder.exists() else f"{folder}, which is not there"
        fail("a folder of images", came, "Name the folder that holds the folders of the classes.")
    require_utf8(folder, "a folder")
    known = frozenset(endings)
    splits = _split_folders(folder)
    images: list[Found] = []
    ignored = _inside(folder)[1] if splits else []
    classes: dict[Split, list[str]] = {}
    for split, top in (splits or {"train": folder}).items():
        folders, others = _inside(top)
        loose = [path for path in others if path.suffix.lower() in known]
        if loose and not folders:
            fail(
                "a folder for each class",
                f"images without one in {top}, such as {loose[0].name}",
                "Move them into class folders.",
            )
        ignored += others
        classes[split] = [path.name for path in folders]
        for inner in folders:
            require_utf8(inner, "a folder")
            files = _below(inner)
            mine = [path for path in files if path.suffix.lower() in known]
            if not mine:
                other = f" but {len(files)} other files, such as {files[0].name}" if files else ""
                fail(
                    f"images in {inner}, a class's folder",
                    f"none{other}",
                    "Add some or remove it.",
                )
            images += [Found(path.relative_to(folder).as_posix(), inner.name, split) for path in mine]
            ignored += sorted(set(files) - set(mine))
    _require_classes(folder, classes)
    return Listing(
        images=tuple(images),
        classes=tuple(classes["train"]),
        taken=tuple(split for split in SHARES if split not in splits),
        ignored=tuple(visible(path.relative_to(folder).as_posix()) for path in ignored),
    )


def _require_classes(folder: Path, classes: dict[Split, list[str]]) -> None:
    wanted = classes["train"]
    if not wanted:
        fail(f"images in {folder}, in a folder for each class", "no folders in it", "Name the folder that holds them.")
    if len(wanted) == 1:
        fail("at least two classes", f"one, {wanted[0]!r}, in {folder}", "Each class is a folder of its own.")
    for split, there in classes.items():
        for name in wanted:
            if name not in there:
                fail(f"the class {name!r} in every split", f"none for {split} in {folder}", "Add images of it there.")
        for name in there:
            if name not in wanted:
                fail(
                    f"the classes of train in {split}",
                    f"also {name!r} in {folder}",
                    "Add it to train, or remove it.",
                )


def _order(image: Found) -> bytes:
    return hashlib.sha256(os.fsencode(image.path)).digest()


def assign(images: Sequence[Found], classes: Sequence[str], taken: Sequence[Split]) -> dict[Split, list[Found]]:
    """The images of each split, by the rule above.

    Args:
        images: the readable ones. classes, taken: see `Listing`.

    Raises:
        ValueError: a class has too few images.
    """
    splits: dict[Split, list[Found]] = {"train": [], "validation": [], "test": []}
    for label in classes:
        mine = [image for image in images if image.label == label]
        left = sorted((image for image in mine if image.split == "train"), key=_order)
        if len(left) <= len(taken):
            wanted = f"at least {len(taken) + 1} readable images of {label!r} for {' and '.join(('train', *taken))}"
            fail(wanted, str(len(left)), "Add images of it, or remove its folder.")
        counts = {split: max(1, round(SHARES[split] * len(left))) for split in taken}
        for split in splits:
            own = [image for image in mine if image.split == split != "train"]
            if split not in ("train", *taken) and not own:
                fail(f"a readable image of {label!r} for {split}", "none", "Add images of it there.")
            splits[split] += own
        for split, count in counts.items():
            splits[split] += left[:count]
            left = left[count:]
        splits["train"] += left
    return {split: sorted(found, key=lambda image: image.path) for split, found in splits.items()}
