"""Norms over the channels of tokens `[B, N, E]`, and of queries and keys.

Statistics over several tokens would let a token see later ones, so `GroupNorm` computes them token by token by default.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core.checks import fail, require_choice, require_flag, require_int, require_number, require_tokens

NormChoice = Literal["layernorm", "rmsnorm", "groupnorm"]
HeadNormChoice = Literal["layernorm", "rmsnorm"]
GROUP = 16
"""Channels of a group in `norm_layer`, if the width allows it (Wu and He 2018, section 4.1)."""


def norm_layer(norm: NormChoice, dim: int) -> nn.LayerNorm | nn.RMSNorm | GroupNorm:
    """The norm with a name: PyTorch's LayerNorm, RMSNorm, or GroupNorm token by token."""
    require_choice(norm, "norm", get_args(NormChoice))
    if norm == "groupnorm":
        return GroupNorm(dim, math.gcd(dim, max(1, dim // GROUP)))
    return nn.LayerNorm(dim) if norm == "layernorm" else RMSNorm(dim)


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich 2019): PyTorch's, with an `eps`.

    Args:
        d_model: size of the last axis.
        eps: added to the mean square.
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        require_int(d_model, "d_model", at_least=1)
        require_number(eps, "eps", "above 0", "It keeps a token of zeros from dividing by 0.")
        super().__init__(d_model, eps=eps)


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He 2018) of the channels of tokens.

    Args:
        d_model: width of a token, E; a multiple of `num_groups`.
        num_groups: groups of neighbouring channels, each with its own statistics.
        eps: added to the variance.
        across_tokens: whether mean and variance of a group are over all tokens of a sequence, as over all pixels of an
            image. Not for causal models, whose tokens would see later ones.
    """

    def __init__(self, d_model: int, num_groups: int = 32, eps: float = 1e-6, *, across_tokens: bool = False) -> None:
        super().__init__()
        require_int(d_model, "d_model", at_least=1)
        require_int(num_groups, "num_groups", at_least=1)
        require_number(eps, "eps", "above 0", "It keeps equal channels from dividing by 0.")
        if d_model % num_groups:
            fail("d_model to be a multiple of num_groups", f"{d_model} and {num_groups}", "Change one of them.")
        require_flag(across_tokens, "across_tokens", "False is safe for causal models.")
        self.num_groups, self.eps, self.across_tokens = num_groups, eps, across_tokens
        self.norm = nn.GroupNorm(num_groups, d_model, eps)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        require_tokens(x, self.norm.num_channels, self.norm.weight)
        if self.across_tokens:
            together: Tensor = self.norm(x.mT)
            return together.mT
        each: Tensor = self.norm(x.flatten(0, 1))
        return each.view(x.shape)


class QueryKeyNorm(nn.Module):
    """One norm for queries and one for keys, over each head (Dehghani et al. 2023, "ViT-22B", section 2).

    It is applied before any rotation and before the cache.

    Args:
        head_dim: width of a head, D.
        norm: "layernorm" or "rmsnorm".
    """

    def __init__(self, head_dim: int, norm: HeadNormChoice = "rmsnorm") -> None:
        super().__init__()
        require_choice(norm, "qk_norm", get_args(HeadNormChoice))
        self.query, self.key = norm_layer(norm, head_dim), norm_layer(norm, head_dim)

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"]]:
        # Under autocast q and k are in half precision; the norms compute in the dtype of their weights.
        wide: torch.dtype = self.query.weight.dtype  # type: ignore[assignment]
        return self.query(q.to(wide)).to(q.dtype), self.key(k.to(wide)).to(k.dtype)
