"""Norms over the channels of tokens `[B, N, E]`, and of queries and keys.

Statistics over several tokens would let a token see later ones, so `GroupNorm` computes them token by token by default.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core.checks import NO_OTHER, fail, require_choice, require_flag, require_int, require_number, require_tokens

NormChoice = Literal["layernorm", "rmsnorm", "groupnorm"]
HeadNormChoice = Literal["layernorm", "rmsnorm", "cosine"]
GROUP = 16
"""Channels of a group in `norm_layer`, if the width allows it (Wu and He 2018, section 4.1)."""


def norm_layer(norm: NormChoice, dim: int, eps: float | None = None) -> nn.LayerNorm | nn.RMSNorm | GroupNorm:
    """The norm with a name: PyTorch's LayerNorm, RMSNorm, or GroupNorm token by token.

    Args:
        eps: added to the variance; None for 1e-5 of "layernorm", as PyTorch has it, and 1e-6 of the others.
    """
    require_choice(norm, "norm", get_args(NormChoice), NO_OTHER)
    if eps is None:
        eps = 1e-5 if norm == "layernorm" else 1e-6
    require_number(eps, "norm_eps", "above 0", "It keeps a norm from dividing by 0.")
    if norm == "groupnorm":
        return GroupNorm(dim, math.gcd(dim, max(1, dim // GROUP)), eps)
    return nn.LayerNorm(dim, eps) if norm == "layernorm" else RMSNorm(dim, eps)


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich 2019): PyTorch's, with an `eps`.

    Args:
        d_model: size of the last axis.
        eps: added to the mean square.

    Raises:
        ValueError: a width below 1, or an eps that is not above 0.

    Examples:
        >>> relpos.RMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()  # divided by sqrt((9 + 16) / 2)
        tensor([[0.8485, 1.1314]])
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        require_int(d_model, "d_model", at_least=1)
        require_number(eps, "eps", "above 0", "It keeps a token of zeros from dividing by 0.")
        super().__init__(d_model, eps=eps)


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He 2018) of the channels of tokens.

    `[B, N, E]` to `[B, N, E]`.

    Args:
        d_model: width of a token, E; a multiple of `num_groups`.
        num_groups: groups of neighbouring channels, each with its own statistics.
        eps: added to the variance.
        across_tokens: whether mean and variance of a group are over all tokens of a sequence, as over all pixels of an
            image. Not for causal models, whose tokens would see later ones.

    Raises:
        ValueError: `num_groups` does not divide `d_model`; in use, tokens of another width.

    Examples:
        >>> relpos.GroupNorm(64, num_groups=8)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
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
        eps: as in `norm_layer`.
    """

    def __init__(
        self, head_dim: int, norm: Literal["layernorm", "rmsnorm"] = "rmsnorm", eps: float | None = None
    ) -> None:
        super().__init__()
        require_choice(norm, "norm", ("layernorm", "rmsnorm"), NO_OTHER)
        self.query, self.key = norm_layer(norm, head_dim, eps), norm_layer(norm, head_dim, eps)

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"]]:
        # Under autocast q and k are in half precision; the norms compute in the dtype of their weights.
        wide: torch.dtype = self.query.weight.dtype  # type: ignore[assignment]
        return self.query(q.to(wide)).to(q.dtype), self.key(k.to(wide)).to(k.dtype)


LARGEST_SCALE = math.log(100)
"""Upper limit of the logarithm that `CosineScale` learns (Liu et al. 2022, section 3.2)."""


class CosineScale(nn.Module):
    """Queries and keys of length 1, and a learned scale per head (Liu et al. 2022, "Swin V2", section 3.2).

        score[h, i, j] = exp(min(logit_scale[h], log 100)) <q[h, i] / |q[h, i]|, k[h, j] / |k[h, j]|>

    Attention then scales by 1, not by 1/sqrt(D).

    Args:
        num_heads: query heads, H.

    Attributes:
        logit_scale: `[H, 1, 1]`, initially log 10.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G N D"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"]]:
        scale = self.logit_scale.clamp(max=LARGEST_SCALE).exp()
        return (F.normalize(q, dim=-1) * scale).to(q.dtype), F.normalize(k, dim=-1)
