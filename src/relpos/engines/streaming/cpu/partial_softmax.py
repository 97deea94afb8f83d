"""Attention over some of the keys by PyTorch's flash kernel, and its weight in the softmax over all keys."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.private import flash_kernel


def forbids(values: Tensor | None) -> bool:
    """Whether the values of a bias, if any, contain -inf."""
    return values is not None and bool((values == -torch.inf).any())


def attend(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B H m D"],
    v: Float[Tensor, "B H m D"],
    bias: Float[Tensor, "#B #H n m"] | None,
    scale: float,
    *,
    forbidding: bool,
) -> tuple[Float[Tensor, "B H n D"], Float[Tensor, "B H n 1"]]:
    """Output and log-sum-exp.

    Args:
        forbidding: whether the bias may be -inf in a whole row; the kernel returns a log-sum-exp of 0 for such rows.
    """
    kernel = flash_kernel()
    assert kernel is not None
    out, lse = kernel(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    lse = lse[..., None]
    if forbidding and bias is not None:
        lse.masked_fill_(bias.amax(dim=-1, keepdim=True) == -torch.inf, -torch.inf)
    return out, lse


def share(part: Float[Tensor, "*P n m"], total: Float[Tensor, "*Q n 1"]) -> Float[Tensor, "*P n m"]:
    """The softmax weight of keys, from their scores or the log-sum-exp of some of them (`part`), and the log-sum-exp of
    all keys (`total`); 0 in a row that sees no key."""
    return torch.where(total == -torch.inf, 0, torch.exp(part - total))


def merge(
    out: Float[Tensor, "B H n V"],
    lse: Float[Tensor, "B H n 1"],
    more: Float[Tensor, "B H n V"],
    more_lse: Float[Tensor, "B H n 1"],
) -> None:
    """Add further keys to the results of rows, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.lerp_(more, share(more_lse, total))
    lse.copy_(total)
