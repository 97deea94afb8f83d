"""Windows around each token of a sequence: as they are, and with gaps."""

from __future__ import annotations

import torch

from relpos.core import Mask
from relpos.core.checks import fail, require_flag, require_int


def _reach(window_size: int, causal: bool) -> tuple[int, int]:
    """How far a window goes back and ahead, in its own steps."""
    require_int(window_size, "window_size", at_least=1)
    require_flag(causal, "causal")
    if causal:
        return window_size - 1, 0
    if window_size % 2 == 0:
        fail("an odd window_size, half of it on each side", str(window_size), "Add one, or pass causal=True.")
    return window_size // 2, window_size // 2


def local(window_size: int, *, causal: bool = False) -> Mask:
    """Each token sees `window_size` tokens: itself in the middle of them, or, causal, at their end.

    At the ends of a sequence there are fewer. (Beltagy et al. 2020, "Longformer", section 3.1)

    Args:
        window_size: tokens that are seen, itself among them; odd unless causal.
        causal: whether a token sees none after it.

    Raises:
        ValueError: a window below 1, or an even one that is not causal.

    Examples:
        >>> relpos.patterns.local(3).dense(4, 4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1],
                [0, 0, 1, 1]], dtype=torch.int32)
        >>> relpos.patterns.local(2, causal=True).dense(4, 4)[0, 0].sum(dim=1)  # itself and the one before
        tensor([1, 2, 2, 2])
    """
    return Mask.window(*_reach(window_size, causal))


def dilated(length: int, window_size: int, dilation: int, *, causal: bool = False) -> Mask:
    """The same with `dilation - 1` tokens left out between any two that are seen (section 3.1 there).

    Tokens that differ in their remainder by `dilation` never meet, in this layer or by stacking it alone.

    Args:
        length: tokens of the sequence.
        window_size: tokens that are seen, itself among them; odd unless causal.
        dilation: distance between two that are seen.
        causal: whether a token sees none after it.

    Raises:
        ValueError: numbers out of their range, or an even window that is not causal.

    Examples:
        >>> relpos.patterns.dilated(6, window_size=3, dilation=2).dense(6, 6)[0, 0, 2].int()
        tensor([1, 0, 1, 0, 1, 0], dtype=torch.int32)
    """
    require_int(length, "length", at_least=0)
    require_int(dilation, "dilation", at_least=1)
    back, ahead = (dilation * steps for steps in _reach(window_size, causal))
    return Mask.window(back, ahead) & Mask.packed(torch.arange(length) % dilation)
