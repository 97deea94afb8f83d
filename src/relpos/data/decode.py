"""Image files to arrays of one size: any file type, mode, depth and orientation that Pillow opens.

A camera's orientation is applied, an animation gives its first frame, transparent parts become white. Images of more
than 8 bits keep their depth. 16 bits, also those stored in 32, are taken by their whole range; wider values and
floating point have none and are stretched from the smallest to the largest value of each image, so that how bright one
image is beside another is lost. The picture is scaled until its shorter side fits, and the longer is cropped evenly.

Decoding takes about 12 bytes per pixel, and a file of a few kilobytes may claim any number of pixels. `max_pixels` is
the most that one image may have, read from its header, and the most that all images decoded at one time have together.
"""

from __future__ import annotations

import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from relpos.data.task import Watch
from relpos.files.reading import FileError, open_file

Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""[rows, columns, 3], values from 0 to 255."""

MAX_PIXELS = 100_000_000
"""Of an image where nobody says otherwise: decoding takes 1.2 GB at most."""
_BYTES = 8
"""Of a file for each pixel that it may have: 16 bits in four channels, not compressed."""
_REMEDY = "--max-pixels raises the limit"
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


class Budget:
    """Pixels that threads may hold together; each waits until as many as it needs are free.

    Args:
        most: of them all. One image never asks for more.
    """

    def __init__(self, most: int) -> None:
        self.most = self._left = most
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold this many, all where it is more than there are."""
        count = min(count, self.most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= count)
            self._left -= count
        try:
            yield
        finally:
            with self._changed:
                self._left += count
                self._changed.notify_all()


def _too_many(pixels: int, budget: Budget) -> str:
    return f"it has {pixels:,} pixels, more than {budget.most:,}; {_REMEDY}"


def decode(file: io.BufferedReader | io.BytesIO, size: tuple[int, int], budget: Budget | None = None) -> Pixels:
    """The picture in a file.

    Args:
        size: (rows, columns) of the result.
        budget: of pixels that are decoded at one time; without limit where left out.

    Raises:
        FileError: the header says that it has more pixels than the budget. Pillow raises anything else.
    """
    with Image.open(file) as image:
        if budget is not None and image.width * image.height > budget.most:  # Pillow's own limit is an even number
            raise FileError(_too_many(image.width * image.height, budget))
        image.draft(None, (2 * max(size), 2 * max(size)))  # a large JPEG is read at a fraction of its size
        pixels = image.width * image.height
        with (budget or Budget(pixels)).take(pixels):
            upright = ImageOps.exif_transpose(image)
            fitted = ImageOps.fit(_plain(upright), (size[1], size[0]), method=Image.Resampling.BICUBIC)
    values = np.asarray(fitted)
    return values if values.ndim == 3 else np.repeat(values[:, :, None], 3, axis=2)


def _attempt(path: Path, size: tuple[int, int], budget: Budget) -> Pixels | str:
    """The picture in a file, or why there is none."""
    try:
        with open_file(path, _BYTES * budget.most, _REMEDY) as file:
            if not os.fstat(file.fileno()).st_size:
                return "the file is empty"
            return decode(file, size, budget)
    except FileError as error:
        return str(error)
    except MemoryError:  # damaged headers ask for any amount
        return "memory ran out while it was decoded"
    except UnidentifiedImageError:
        return "Pillow finds no image in it"
    except Image.DecompressionBombError as error:  # from a header, that of an image inside an icon as well
        counted = re.search(r"\((\d+) pixels\)", str(error))
        return _too_many(int(counted[1]), budget) if counted else f"it has more than {budget.most:,} pixels; {_REMEDY}"
    except Exception as error:  # Pillow's many formats raise anything at all on a damaged file
        return f"it is broken: {' '.join(str(error).split()) or type(error).__name__}"


@contextmanager
def _limited(max_pixels: int) -> Iterator[None]:
    """Pillow's limit as asked for, and silence: what it would warn of is no business of whoever waits."""
    most, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, (max_pixels + 1) // 2  # it raises above twice its limit
    silent, log = logging.NullHandler(), logging.getLogger("PIL")
    log.addHandler(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeHandler(silent)
        Image.MAX_IMAGE_PIXELS = most


def decode_all(
    paths: Sequence[Path], size: tuple[int, int], watch: Watch | None = None, *, max_pixels: int = MAX_PIXELS
) -> list[Pixels | str]:
    """The picture of every file, in order, or why it has none."""
    found: list[Pixels | str] = []
    budget = Budget(max_pixels)
    threads = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        with _limited(max_pixels):
            for done, one in enumerate(threads.map(lambda path: _attempt(path, size, budget), paths), start=1):
                found.append(one)
                if watch is not None:
                    watch(done, len(paths))
    finally:
        threads.shutdown(cancel_futures=True)
    return found
