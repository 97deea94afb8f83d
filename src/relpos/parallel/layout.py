"""Which tokens of a sequence each rank holds, as stretches of consecutive ones.

    contiguous, 2 ranks      0 0 0 0 1 1 1 1        rank r holds the r-th of R parts
    zigzag, 2 ranks          0 0 1 1 1 1 0 0        the r-th and the r-th from the end of 2 R parts

Under a causal mask the last of contiguous ranks has most of the work. In a zigzag each rank holds as many early tokens
as late ones, and so the same number of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from relpos.core.checks import fail, require_choice

ShardLayout = Literal["contiguous", "zigzag"]
Stretch = tuple[int, int]
"""The first token, and the one after the last."""


def require_layout(layout: object) -> None:
    """Raise unless it is the name of a layout."""
    require_choice(layout, "layout", get_args(ShardLayout))


def stretches(count: int, size: int, layout: ShardLayout) -> list[list[Stretch]]:
    """The stretches of each rank, in the order in which it holds them, which is that of the sequence.

    Args:
        count: tokens of the sequence. size: the number of ranks.

    Raises:
        ValueError: the tokens cannot be divided into equal shares.
    """
    parts = size if layout == "contiguous" or size == 1 else 2 * size
    if count % parts or count < parts:
        what = f"a number of tokens that {size} ranks share equally" + (", in two parts each" if parts > size else "")
        below, above = count // parts * parts, count // parts * parts + parts
        fail(f"{what} (a multiple of {parts})", str(count), f"Pad to {above}{f' or cut to {below}' if below else ''}.")
    width = count // parts
    if parts == size:
        return [[(rank * width, (rank + 1) * width)] for rank in range(size)]
    of = [(part * width, (part + 1) * width) for part in range(parts)]
    return [[of[rank], of[parts - 1 - rank]] for rank in range(size)]


def local_slices(spans: list[Stretch]) -> Callable[[Stretch], slice]:
    """A function from some consecutive tokens within a rank's stretches to where the rank holds them."""

    def find(span: Stretch) -> slice:
        held = 0
        for start, stop in spans:
            if start <= span[0] and span[1] <= stop:
                return slice(held + span[0] - start, held + span[1] - start)
            held += stop - start
        raise KeyError(span)

    return find


def in_order(parts: list[Tensor], shares: list[list[Stretch]], dim: int) -> Tensor:
    """The whole sequence, from the share of each rank along an axis."""
    pieces = {
        span: piece
        for part, spans in zip(parts, shares, strict=True)
        for span, piece in zip(spans, part.split([stop - start for start, stop in spans], dim), strict=True)
    }
    return torch.cat([pieces[span] for span in sorted(pieces)], dim=dim)


def share_of(x: Tensor, spans: list[Stretch], dim: int) -> Tensor:
    """The tokens of some stretches along an axis; a view where they are one."""
    found = [x.narrow(dim, start, stop - start) for start, stop in spans]
    return found[0] if len(found) == 1 else torch.cat(found, dim=dim)
