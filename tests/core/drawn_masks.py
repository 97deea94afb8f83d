"""Masks of any kind, drawn by hypothesis."""

import math
from typing import Any

import torch
from hypothesis import strategies as st

from relpos import Blocks, Mask

BATCH, HEADS = 3, 2


@st.composite
def masks(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """What `made` makes a mask of, and its numbers of queries and keys.

    Orders, bounds and intervals, segments, globals, a limit and blocks, each or not; for all of a batch or for each.
    """
    n = draw(st.integers(1, 7))
    m = draw(st.just(n) | st.integers(1, 7))

    def tensor(count: int, low: int, high: int) -> torch.Tensor:
        shape = draw(st.sampled_from(((count,), (1, count), (BATCH, count))))
        size = math.prod(shape)
        values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return torch.tensor(values, dtype=draw(st.sampled_from((torch.int32, torch.int64)))).view(shape)

    def some(count: int, low: int, high: int) -> torch.Tensor | None:
        return tensor(count, low, high) if draw(st.booleans()) else None

    parts: dict[str, Any] = {name: draw(st.none() | st.integers(-2, 4)) for name in ("left", "right", "limit")}
    parts |= {"low": some(n, -3, 6), "high": some(n, -3, 9)}
    if n != m or draw(st.booleans()):
        parts |= {"query_order": tensor(n, -3, 6), "key_order": tensor(m, -3, 6)}
    if draw(st.booleans()):
        queries = tensor(n, -1, 2)
        shared = n == m and draw(st.booleans())
        parts |= {"query_segments": queries, "key_segments": queries if shared else tensor(m, -1, 2)}
    for name, count in (("query_global", n), ("key_global", m)):
        chosen = some(count, 0, 1)
        parts[name] = None if chosen is None else chosen.bool()
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        shape = (draw(st.integers(1, HEADS)), -(-n // size), -(-m // size))
        count = math.prod(shape)
        layout = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        parts["blocks"] = layout.view(shape), size
    return parts, n, m


def made(parts: dict[str, Any]) -> Mask:
    """No strategy may do so: a class whose types are checked draws numbers of its own."""
    blocks = parts.get("blocks")
    return Mask(**(parts | {"blocks": blocks and Blocks(*blocks)}))
