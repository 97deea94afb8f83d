"""Decode image files to arrays of one size: any raster format, mode, depth and orientation that Pillow decodes.

The camera's orientation is applied, an animation gives its first frame, transparent parts become white. Images of more
than 8 bits keep their depth. 16-bit values, also if stored in 32 bits, are scaled by their full range. Wider values and
floating point have no fixed range: each image is scaled from its smallest to its largest value, so that relative
brightness between images is lost. The picture is scaled until its shorter edge fits; the longer is cropped evenly.

Decoding takes about 12 bytes per pixel, and a file of a few kilobytes may claim any number of pixels. `max_pixels`
limits the pixels of one image, read from its header, and the total of all images decoded at the same time.
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
"""The default limit per image: decoding takes at most 1.2 GB."""
_BYTES = 8
"""Largest file size per allowed pixel: 16 bits in four channels, uncompressed."""
_REMEDY = "--max-pixels raises the limit"
_DEEP = ("I", "F")
_COMMON = ("BMP", "GIF", "JPEG", "PPM", "PNG")
"""Formats that are tried first, as Pillow does."""
_PICTURES = frozenset({
    *_COMMON, "AVIF", "BLP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "ICNS", "ICO", "IM", "IMT",
    "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PSD", "QOI", "SGI", "SPIDER", "SUN", "TGA", "TIFF", "WEBP",
    "XBM", "XPM", "XVTHUMB",
})  # fmt: skip
"""Formats that Pillow decodes by itself. The others are opened by no name: for EPS it starts Ghostscript, in IPTC it
opens any format, and the rest are data sets and films, or belong to plugins of other libraries."""


def bytes_at_most(max_pixels: int) -> int:
    """The largest file of an image with at most `max_pixels`."""
    return _BYTES * max_pixels


def endings() -> frozenset[str]:
    """The file endings that Pillow opens, in lower case."""
    known = Image.registered_extensions()
    return frozenset(ending for ending, kind in known.items() if kind in Image.OPEN and kind in _PICTURES)


def _formats() -> list[str]:
    """The formats that this Pillow opens, whatever a file is called."""
    Image.init()
    return sorted(_PICTURES & Image.OPEN.keys(), key=lambda kind: (kind not in _COMMON, kind))


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
    """A limit on pixels that threads decode together; a thread waits until enough are free.

    Args:
        most: the limit. One image never takes more.
    """

    def __init__(self, most: int) -> None:
        self.most = self._left = most
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold `count` pixels, or all if it exceeds the limit."""
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
        budget: limits the pixels decoded at the same time; by default there is no limit.

    Raises:
        FileError: the header claims more pixels than the budget. Pillow may raise any other error.
    """
    with Image.open(file, formats=_formats()) as image:
        if budget is not None and image.width * image.height > budget.most:  # Pillow's own limit is an even number
            raise FileError(_too_many(image.width * image.height, budget))
        image.draft(None, (2 * max(size), 2 * max(size)))  # decode a large JPEG at reduced size
        pixels = image.width * image.height
        with (budget or Budget(pixels)).take(pixels):
            upright = ImageOps.exif_transpose(image)
            fitted = ImageOps.fit(_plain(upright), (size[1], size[0]), method=Image.Resampling.BICUBIC)
    values = np.asarray(fitted)
    return values if values.ndim == 3 else np.repeat(values[:, :, None], 3, axis=2)


def _attempt(source: Path | bytes, size: tuple[int, int], budget: Budget) -> Pixels | str:
    """The picture in a file, or in the bytes of one, or the reason why there is none."""
    try:
        if isinstance(source, bytes):
            return decode(io.BytesIO(source), size, budget) if source else "the file is empty"
        with open_file(source, bytes_at_most(budget.most), _REMEDY) as file:
            if not os.fstat(file.fileno()).st_size:
                return "the file is empty"
            return decode(file, size, budget)
    except FileError as error:
        return str(error)
    except MemoryError:  # damaged headers may request any amount
        return "memory ran out while it was decoded"
    except UnidentifiedImageError:
        return "Pillow finds no image in it"
    except Image.DecompressionBombError as error:  # from a header, also of an image inside an icon
        counted = re.search(r"\((\d+) pixels\)", str(error))
        return _too_many(int(counted[1]), budget) if counted else f"it has more than {budget.most:,} pixels; {_REMEDY}"
    except Exception as error:  # Pillow raises any error on a damaged file
        return f"it is broken: {' '.join(str(error).split()) or type(error).__name__}"


@contextmanager
def _limited(max_pixels: int) -> Iterator[None]:
    """Set Pillow's pixel limit, and silence its warnings and log, which do not concern the user."""
    most, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, (max_pixels + 1) // 2  # Pillow raises above twice this
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
    sources: Sequence[Path | bytes], size: tuple[int, int], watch: Watch | None = None, *, max_pixels: int = MAX_PIXELS
) -> list[Pixels | str]:
    """The picture of every file, or of the bytes of one, in order, or the reason why there is none."""
    found: list[Pixels | str] = []
    budget = Budget(max_pixels)
    threads = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        with _limited(max_pixels):
            for done, one in enumerate(threads.map(lambda one: _attempt(one, size, budget), sources), start=1):
                found.append(one)
                if watch is not None:
                    watch(done, len(sources))
    finally:
        threads.shutdown(cancel_futures=True)
    return found
