"""Windows around each token of a sequence, contiguous or dilated."""

from __future__ import annotations

import torch

from relpos.core import Mask
from relpos.core.checks import fail, require_flag, require_int


def _reach(window_size: int, causal: bool) -> tuple[int, int]:
    """How far a window reaches back and ahead, in steps of its dilation."""
    require_int(window_size, "window_size", at_least=1)
    require_flag(causal, "causal")
    if causal:
        return window_size - 1, 0
    if window_size % 2 == 0:
        fail("an odd window_size, half of it on each side", str(window_size), "Add one, or pass causal=True.")
    return window_size // 2, window_size // 2


def local(window_size: int, *, causal: bool = False) -> Mask:
    """Each token sees `window_size` tokens, with itself in the middle or, if causal, at the end.

    At the ends of a sequence there are fewer. (Beltagy et al. 2020, "Longformer", section 3.1)

    Args:
        window_size: number of tokens seen, including itself; odd unless causal.
        causal: whether a token sees no later token.

    Raises:
        ValueError: a window is below 1, or even and not causal.

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
    """`local` with `dilation - 1` tokens skipped between neighbouring seen tokens (Longformer, section 3.1).

    Tokens with different remainders modulo `dilation` never attend to each other, even through stacked layers.

    Args:
        length: number of tokens in the sequence.
        window_size: number of tokens seen, including itself; odd unless causal.
        dilation: distance between neighbouring seen tokens.
        causal: whether a token sees no later token.

    Raises:
        ValueError: a number is out of range, or an even window is not causal.

    Examples:
        >>> relpos.patterns.dilated(6, window_size=3, dilation=2).dense(6, 6)[0, 0, 2].int()
        tensor([1, 0, 1, 0, 1, 0], dtype=torch.int32)
    """
    require_int(length, "length", at_least=0)
    require_int(dilation, "dilation", at_least=1)
    back, ahead = (dilation * steps for steps in _reach(window_size, causal))
    return Mask.window(back, ahead) & Mask.packed(torch.arange(length) % dilation)
