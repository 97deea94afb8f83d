"""A folder of your own images as a task: class folders, any size, channels and file type."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from relpos.core.checks import fail, require_choice, require_int
from relpos.data.folder import SHARES, Found, Listing, assign, list_folder
from relpos.data.pictures import IMAGE_SIZE, PATCH, Moments, Pictures
from relpos.data.task import Split, Watch
from relpos_command.visible import visible

_NAMED = 3
_OPTIONS = ("images", "image_size", "patch", "bad_images", "rotate", "max_pixels", "contents")


class ImageFolder(Pictures):
    """Images in a folder, a folder for each class; see `relpos.data.folder` for how they are split.

    Args:
        images: the folder.
        image_size: (rows, columns) of the model's input, including the margin.
        patch: (rows, columns) of a patch.
        bad_images: "error" names the files that cannot be read; "skip" leaves them out and counts them.
        max_pixels: an image with more cannot be read; by default `relpos.data.decode.MAX_PIXELS`.
        rotate: adds probes with pictures rotated by 90, 180 and 270 degrees.
        watch: receives how many files are read, of how many.

    Raises:
        ValueError: no folder, a broken image, an empty class, a class that a split lacks, sizes that do not fit.
    """

    name: ClassVar[str] = "images"
    summary: ClassVar[str] = "Your own images, a folder for each class."

    def __init__(
        self,
        images: str | Path,
        image_size: tuple[int, int] = IMAGE_SIZE,
        patch: tuple[int, int] = PATCH,
        bad_images: str = "error",
        rotate: bool = False,
        watch: Watch | None = None,
        *,
        max_pixels: int | None = None,
    ) -> None:
        from relpos.data.decode import MAX_PIXELS, decode_all, endings  # needs Pillow

        super().__init__(image_size, patch, rotate)
        require_choice(bad_images, "bad_images", ("error", "skip"))
        max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
        require_int(max_pixels, "max_pixels", at_least=1)
        folder = Path(images).expanduser().resolve()
        listing = list_folder(folder, endings())
        self.classes, self.ignored = listing.classes, listing.ignored
        paths = [folder / image.path for image in listing.images]
        decoded = decode_all(paths, self.picture_size, watch, max_pixels=max_pixels)
        pairs = list(zip(listing.images, decoded, strict=True))
        self.skipped = tuple(
            {"path": visible(image.path), "reason": one} for image, one in pairs if isinstance(one, str)
        )
        if self.skipped and bad_images == "error":
            _refuse(folder, self.skipped)
        pictures = {image: one for image, one in pairs if not isinstance(one, str)}
        splits = assign(list(pictures), listing.classes, listing.taken)
        self._keep(splits, pictures)
        self.title = f"Images in {folder.name or folder}"
        self.description = self._describe(folder, listing)
        self.options = {
            "images": str(folder),
            "image_size": list(image_size),
            "patch": list(patch),
            "bad_images": bad_images,
            "rotate": rotate,
            "max_pixels": max_pixels,
            "contents": _contents(splits, pictures),
        }

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        """The task of `options`; if they include `contents`, the folder must be unchanged."""
        if "images" not in options or not set(options) <= set(_OPTIONS):
            fail(f"options among {', '.join(_OPTIONS)}, with images", str(options), "Name the folder.")
        made = {name: value for name, value in options.items() if name != "contents"}
        made |= {name: tuple(made[name]) for name in ("image_size", "patch") if name in made}
        task = cls(**made, watch=watch)
        if options.get("contents", task.options["contents"]) != task.options["contents"]:
            came = f"{task.options['contents']} in {options['images']}"
            fail(f"{options['contents']}", came, "The folder has changed; restore it, or start again.")
        return task

    def _keep(self, splits: dict[Split, list[Found]], pictures: dict[Found, Any]) -> None:
        """Keep pixels and labels of each split; one channel if every picture is grey."""
        grey = all((one == one[:, :, :1]).all() for one in pictures.values())
        self.channels = 1 if grey else 3
        for split, images in splits.items():
            stacked = np.stack([pictures[image][:, :, : self.channels] for image in images])
            self._pixels[split] = torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)))
            self._labels[split] = torch.tensor([self.classes.index(image.label) for image in images])
        moments = Moments()
        moments.add(self._pixels["train"])
        self._level = moments.level(self.channels)

    def _describe(self, folder: Path, listing: Listing) -> str:
        sizes = self.sizes
        rule = ""
        if listing.taken:
            shares = " and ".join(f"{SHARES[split]:.0%} for {split}" for split in listing.taken)
            rule = f", of every class {shares} in the order of a hash of the files' paths"
        return (
            f"{sum(sizes.values())} images of {len(self.classes)} classes in {folder.name or folder}: "
            f"{sizes['train']} for training, {sizes['validation']} for validation, {sizes['test']} for test{rule}. "
            + self._how_shown()
        )


def _contents(splits: dict[Split, list[Found]], pictures: dict[Found, Any]) -> str:
    """A fingerprint of everything that affects figures: paths, splits and pixels."""
    digest = hashlib.sha256()
    for split, images in splits.items():
        for image in images:
            digest.update(f"{split}\0{image.path}\0".encode("utf-8", "surrogateescape"))
            digest.update(pictures[image].tobytes())
    return f"{len(pictures)} images, sha256 {digest.hexdigest()[:12]}"


def _refuse(folder: Path, broken: Sequence[dict[str, str]]) -> None:
    named = "; ".join(f"{folder / one['path']} ({one['reason']})" for one in broken[:_NAMED])
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    fail(
        "images that can be read", f"{named}{more}", "Repair or remove them, or leave them out with --bad-images skip."
    )
