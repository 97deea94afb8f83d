"""A mechanism as a small picture: what it does to scores over queries and keys, or how it rotates."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RAISES, LOWERS = (194, 87, 12), (76, 48, 158)
SHOWN = 16
"""Tokens along each side."""


def pixels(entry: dict[str, Any]) -> NDArray[np.uint8]:
    """`[rows, columns, 4]`: orange where attention is raised, purple where it is lowered, transparent where neither.

    Args:
        entry: what `explored` returns. A rotation is drawn as the cosine of each pair of dimensions (rows) over
            positions; else on a sequence queries are rows and keys columns, and on a grid one query in the middle is
            drawn over its keys. The first head, trained if there is an example.
    """
    tokens = "sequence" if "sequence" in entry else "grid"
    if tokens not in entry:
        return np.zeros((SHOWN, SHOWN, 4), np.uint8)
    states = entry[tokens]
    numbers = states.get("trained", states["start"])
    if entry["family"] == "rotation" and "cosine" in numbers:
        return _coloured(_filled(numbers["cosine"][0]).reshape(entry["turns"][tokens], -1)[:, : 4 * SHOWN])
    return _coloured(_of_pairs(numbers, grid=tokens == "grid"))


def address(entry: dict[str, Any]) -> str:
    """The picture as an address with its data."""
    buffer = io.BytesIO()
    Image.fromarray(pixels(entry)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _of_pairs(numbers: dict[str, Any], *, grid: bool) -> NDArray[np.float64]:
    if "offsets" in numbers:
        line = _filled(numbers["offsets"][0][0])
        if grid:
            span = round(len(line) ** 0.5)
            middle, half = span // 2, min(span // 2, SHOWN // 2)
            return line.reshape(span, span)[::-1, ::-1][
                middle - half : middle + half + 1, middle - half : middle + half + 1
            ]
        places = np.arange(SHOWN)
        return line[len(line) // 2 + places[:, None] - places]
    size, heads = next(iter(numbers["pairs"].items()))
    count = int(size) ** 2 if grid else int(size)
    matrix = _filled(heads[0][0]).reshape(count, count)
    if not grid:
        return matrix[:SHOWN, :SHOWN]
    return matrix[count // 2 + int(size) // 2].reshape(int(size), int(size))


def _filled(numbers: list[int | None]) -> NDArray[np.float64]:
    return np.asarray([np.nan if x is None else x for x in numbers], dtype=np.float64)


def _coloured(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    share = np.nan_to_num(values / max(float(np.nanmax(np.abs(values), initial=0.0)), 1e-9))
    colour = np.where(share[..., None] > 0, RAISES, LOWERS)
    return np.concatenate([colour, 255 * np.abs(share)[..., None]], axis=-1).round().astype(np.uint8)
