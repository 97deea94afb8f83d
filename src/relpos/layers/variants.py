"""Attention layers for other kinds and patterns of attention, after their papers.

LinearAttention     no softmax, O(N)                            Katharopoulos et al. 2020; retention, Sun et al. 2023
FlashAttention      a softmax in tiles, O(N) memory             Dao et al. 2022
LocalAttention      a softmax over a window                     Beltagy et al. 2020, section 3.1
SparseAttention     a softmax over a block and every n-th token Child et al. 2019, section 4.3

Input and output are tokens `[B, N, E]`. `d_model` is E, a multiple of `num_heads`, H. `num_kv_heads`, G, divides H; it
is H if None.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, LineBias, Mask, Terms
from relpos.core.checks import fail, require_flag, require_int
from relpos.engines import flash_attention, linear_attention
from relpos.engines.linear import FeatureMap
from relpos.layers.attention import MultiHeadAttention
from relpos.layers.projection import SelfAttention
from relpos.patterns import fixed, local
from relpos.position import Mechanism


def retention_decay(num_heads: int) -> Float[Tensor, " H"]:
    """RetNet's decay per head, `1 - 2^(-5 - h)` (Sun et al. 2023, equation 8)."""
    return 1 - 2.0 ** (-5 - torch.arange(num_heads, dtype=torch.float64))


class LinearAttention(SelfAttention):
    """Multi-head `relpos.linear_attention`: time and memory are linear in the number of tokens.

    `d_model`, `num_heads`, `num_kv_heads`, `qkv_bias` and `proj_bias` are as in `MultiHeadAttention`.

    Args:
        feature_map: "elu", "relu", "identity", or "softmax" (not causal).
        causal: whether a token sees no later token.
        position: a rotation, such as `RotaryEmbedding`, or None; for others `forward` raises NotImplementedError.
        retention: whether to compute RetNet's retention: weights decay with distance at a rate per head and are not
            normalized; the output of each head has an RMS norm instead. Causal only.

    Raises:
        ValueError: the heads do not divide the width, or retention is not causal.

    Examples:
        >>> layer = relpos.LinearAttention(32, 4, causal=True, position=relpos.RotaryEmbedding(8))
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = "elu",
        causal: bool = False,
        num_kv_heads: int | None = None,
        position: Mechanism | None = None,
        retention: bool = False,
        qkv_bias: bool = True,
        proj_bias: bool = True,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads, qkv_bias=qkv_bias, proj_bias=proj_bias, position=position)
        require_flag(causal, "causal")
        require_flag(retention, "retention")
        if retention and not causal:
            fail("retention only in a causal layer", "causal=False", "Pass causal=True.")
        self.feature_map: FeatureMap = feature_map
        self.causal, self.retention = causal, retention
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6, elementwise_affine=False) if retention else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Terms | None) -> Tensor:
        decay = retention_decay(self.num_heads).to(q.device) if self.retention else None
        attended = linear_attention(
            q, k, v, feature_map=self.feature_map, causal=self.causal, position=position, decay=decay,
            normalize=not self.retention,
        )  # fmt: skip
        return attended if self.norm is None else self.norm(attended)


class FlashAttention(SelfAttention):
    """Multi-head `relpos.flash_attention`, for reading; train with `MultiHeadAttention`.

    `d_model` and `num_heads` are as in `MultiHeadAttention`.

    Args:
        block_size: rows and columns of a tile.
        causal: whether a token sees no later token.
        position: a mechanism with one line bias, or None; for others `forward` raises NotImplementedError.

    Raises:
        ValueError: the heads do not divide the width, or an argument is invalid.

    Examples:
        >>> layer = relpos.FlashAttention(d_model=32, num_heads=4, block_size=4, causal=True)
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        block_size: int = 64,
        *,
        causal: bool = False,
        position: Mechanism | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, position=position)
        require_int(block_size, "block_size", at_least=1)
        require_flag(causal, "causal")
        self.block_size, self.causal = block_size, causal

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Terms | None) -> Tensor:
        bias = None if position is None else position.one(LineBias)
        if position is not None and (bias is None or len(position) > 1):
            came = ", ".join(type(term).__name__ for term in position)
            lacks = f"expected a position that is one line bias; got {came}, which FlashAttention lacks."
            raise NotImplementedError(f"{lacks} Use MultiHeadAttention.")
        return flash_attention(q, k, v, bias=bias, causal=self.causal, block_size=self.block_size)


class _PatternAttention(nn.Module):
    """`MultiHeadAttention` under the mask that a subclass defines."""

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(d_model, num_heads, **options)

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Self-attention of tokens; `coordinates` are those of the tokens, by default a sequence."""
        attended: Tensor = self.attn(x, coordinates=coordinates, mask=self._pattern(x))
        return attended

    def _pattern(self, x: Tensor) -> Mask:
        raise NotImplementedError


class LocalAttention(_PatternAttention):
    """Multi-head attention to `window_size` tokens, with the query in the middle, or last if causal.

    `d_model`, `num_heads`, `num_kv_heads`, `position` and `backend` are as in `MultiHeadAttention`.

    Args:
        window_size: the number of tokens in the window; odd unless causal.
        causal: whether a token sees no later token.

    Raises:
        ValueError: the heads do not divide the width, or the window is even and not causal.

    Examples:
        >>> layer = relpos.LocalAttention(32, 4, window_size=5, position=relpos.RotaryEmbedding(8))
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        window_size: int = 7,
        *,
        causal: bool = False,
        num_kv_heads: int | None = None,
        position: Mechanism | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=num_kv_heads, position=position, backend=backend)
        self.mask = local(window_size, causal=causal)

    def _pattern(self, x: Tensor) -> Mask:
        return self.mask


class SparseAttention(_PatternAttention):
    """Multi-head attention in the fixed pattern of the Sparse Transformer.

    `d_model`, `num_heads`, `num_kv_heads`, `position` and `backend` are as in `MultiHeadAttention`.

    A token sees its block of `sparsity_factor` tokens, and the last token of every block, in the same head. So what
    the last token of a block has gathered reaches all tokens in the next layer. A token sees about N / n + n tokens,
    fewest for n near sqrt(N).

    Args:
        sparsity_factor: n, the stride of the paper; with 1 a token sees all tokens.
        causal: whether a token sees none after it, as in the paper.

    Raises:
        ValueError: the heads do not divide the width, or an argument is invalid.

    Examples:
        >>> layer = relpos.SparseAttention(32, 4, sparsity_factor=4, causal=True)
        >>> layer(torch.randn(2, 16, 32)).shape
        torch.Size([2, 16, 32])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        sparsity_factor: int = 4,
        *,
        causal: bool = False,
        num_kv_heads: int | None = None,
        position: Mechanism | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=num_kv_heads, position=position, backend=backend)
        require_int(sparsity_factor, "sparsity_factor", at_least=1)
        require_flag(causal, "causal")
        self.sparsity_factor, self.causal = sparsity_factor, causal

    def _pattern(self, x: Tensor) -> Mask:
        return fixed(x.shape[1], self.sparsity_factor, causal=self.causal).to(x.device)
