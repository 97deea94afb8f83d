"""A folder of images as people have them, made from the photographs and textures that come with scikit-image."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image

CLASSES = ("brick", "cat", "grass")
"""chelsea is the cat, in colour; the textures are grey."""


def _deep(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def _floating(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255)


def _transparent(image: Image.Image) -> Image.Image:
    clear = image.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(image.size))
    return clear


KINDS: dict[str, tuple[str, Callable[[Image.Image], Image.Image]]] = {
    "colour": ("png", lambda image: image.convert("RGB")),
    "grey": ("png", lambda image: image.convert("L")),
    "palette": ("png", lambda image: image.convert("RGB").quantize(64)),
    "deep": ("png", _deep),
    "floating": ("tiff", _floating),
    "transparent": ("png", _transparent),
    "two": ("bmp", lambda image: image.convert("1")),
    "print": ("jpg", lambda image: image.convert("CMYK")),
    "camera": ("JPEG", lambda image: image.convert("RGB")),
    "web": ("webp", lambda image: image.convert("RGB")),
    "animation": ("gif", lambda image: image.convert("P")),
    "scan": ("tif", lambda image: image.convert("L")),
}
"""A name, the file's ending, and how a photograph becomes that kind of image."""


def crops(label: str, count: int) -> list[Image.Image]:
    """Parts of one photograph, of different sizes and shapes."""
    photograph = {"brick": skimage.data.brick, "cat": skimage.data.chelsea, "grass": skimage.data.grass}[label]()
    random = np.random.default_rng(CLASSES.index(label))
    found = []
    for number in range(count):
        height, width = 60 + 7 * (number % 5), 60 + 11 * (number % 4)
        row = int(random.integers(photograph.shape[0] - height))
        column = int(random.integers(photograph.shape[1] - width))
        found.append(Image.fromarray(photograph[row : row + height, column : column + width]))
    return found


def save(folder: Path, label: str, images: list[Image.Image]) -> None:
    """Crops as files of all kinds in a class's folder, every third one deeper."""
    kinds = list(KINDS.items())
    for number, image in enumerate(images):
        name, (ending, convert) = kinds[number % len(kinds)]
        inside = folder / label / ("more" if number % 3 == 0 else "")
        inside.mkdir(parents=True, exist_ok=True)
        convert(image).save(inside / f"{number:02}-{name}.{ending}")


def make_folder(folder: Path, count: int = 12) -> Path:
    """DIR/class/...: `count` images of each class, with what systems leave behind."""
    for label in CLASSES:
        save(folder, label, crops(label, count))
        (folder / label / ".DS_Store").write_bytes(b"x")
        (folder / label / "Thumbs.db").write_bytes(b"x")
    return folder
