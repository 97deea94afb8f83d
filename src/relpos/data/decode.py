"""Image files to arrays of one size: any file type, mode, depth and orientation that Pillow opens.

A camera's orientation is applied, an animation gives its first frame, transparent parts become white. Images of more
than 8 bits keep their depth. 16 bits, also those stored in 32, are taken by their whole range; wider values and
floating point have none and are stretched from the smallest to the largest value of each image, so that how bright one
image is beside another is lost. The picture is scaled until its shorter side fits, and the longer is cropped evenly.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from relpos.data.task import Watch

Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""[rows, columns, 3], values from 0 to 255."""

_DEEP = ("I", "F")
_NO_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""What Pillow knows by name and cannot read on its own, data sets and films among them."""


def endings() -> frozenset[str]:
    """The endings of files that Pillow opens, in small letters."""
    known = Image.registered_extensions()
    return frozenset(ending for ending, kind in known.items() if kind in Image.OPEN and kind not in _NO_PICTURES)


def _deep(image: Image.Image) -> Image.Image:
    """One channel of more than 8 bits as floating point from 0 to 255."""
    values = np.asarray(image, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ValueError("some values are not finite")
    low, high = (0.0, 65535.0) if image.mode.startswith("I;16") else (values.min(), values.max())
    if image.mode == "I" and low >= 0 and high <= 65535:  # 16 bits in a wider mode
        low, high = 0.0, 65535.0
    return Image.fromarray((values - low) * np.float32(255 / max(high - low, 1e-12)))


def _plain(image: Image.Image) -> Image.Image:
    """An image in RGB, or in floating point with one channel."""
    if image.mode.startswith(_DEEP):
        return _deep(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def decode(data: bytes, size: tuple[int, int]) -> Pixels:
    """The picture in a file's bytes.

    Args:
        size: (rows, columns) of the result.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.draft(None, (2 * max(size), 2 * max(size)))  # a large JPEG is read at a fraction of its size
        upright = ImageOps.exif_transpose(image)
        fitted = ImageOps.fit(_plain(upright), (size[1], size[0]), method=Image.Resampling.BICUBIC)
    pixels = np.asarray(fitted)
    return pixels if pixels.ndim == 3 else np.repeat(pixels[:, :, None], 3, axis=2)


def _attempt(path: Path, size: tuple[int, int]) -> Pixels | str:
    """The picture in a file, or why there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not data:
        return "the file is empty"
    try:
        return decode(data, size)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return "Pillow finds no image in it"
    except Exception as error:  # Pillow's many formats raise anything at all on a damaged file
        return f"it is broken: {' '.join(str(error).split()) or type(error).__name__}"


@contextmanager
def _without_limits() -> Iterator[None]:
    """Large images are welcome, and what Pillow would warn of is no business of whoever waits."""
    most, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = most


def decode_all(paths: Sequence[Path], size: tuple[int, int], watch: Watch | None = None) -> list[Pixels | str]:
    """The picture of every file, in order, or why it has none."""
    found: list[Pixels | str] = []
    threads = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        with _without_limits():
            for done, one in enumerate(threads.map(lambda path: _attempt(path, size), paths), start=1):
                found.append(one)
                if watch is not None:
                    watch(done, len(paths))
    finally:
        threads.shutdown(cancel_futures=True)
    return found
