"""The kinds of attention of a layer, by name, and the layers of the two that have no engine of `relpos.attention`.

softmax     `relpos.attention`: any position, any mask, any engine
linear      `relpos.linear_attention` with elu + 1: a rotation or no position, causal or not
flash       `relpos.flash_attention`: a line bias, a rotation, both or neither, causal or not
"""

from __future__ import annotations

from typing import Literal, NoReturn, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import LineBias, Mask, Rotation, Term, Terms
from relpos.core.checks import fail, require_flag, require_int
from relpos.engines import attention, flash_attention, linear_attention
from relpos.engines.call import check_term
from relpos.engines.dense import content
from relpos.engines.linear import FeatureMap
from relpos.layers.projection import SelfAttention
from relpos.position import Mechanism

Kind = Literal["softmax", "linear", "flash"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def attend(
    kind: Kind,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    *,
    position: Terms | Term | None,
    mask: Mask | None,
    dropout: float,
    backend: str,
) -> Float[Tensor, "B H N D"]:
    """Attention of a kind; `backend` chooses the engine of "softmax".

    Raises:
        NotImplementedError: a position, a mask or dropout that a kind other than "softmax" lacks.
    """
    if kind == "softmax":
        attended = attention(q, k, v, position=position, mask=mask, dropout=dropout, backend=backend)
        assert isinstance(attended, Tensor)
        return attended
    if dropout:
        _lacks(kind, "no dropout of attention weights", f"{dropout:g}")
    if mask is not None and not mask.is_plain_causal:
        _lacks(kind, "a causal mask or none", "another mask")
    causal = mask is not None
    if kind == "linear":
        return linear_attention(q, k, v, causal=causal, position=position)
    terms = Terms() if position is None else Terms() + position
    biases, rotations = terms.of(LineBias), terms.of(Rotation)
    if len(biases) > 1 or len(biases) + len(rotations) < len(terms):
        _lacks(kind, "a line bias, a rotation or both as position", _names(terms))
    for rotation in rotations:
        check_term(rotation, q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k = content(Terms(*rotations), q, k)
    return flash_attention(q, k, v, bias=biases[0] if biases else None, causal=causal)


def _lacks(kind: Kind, expected: str, came: str) -> NoReturn:
    raise NotImplementedError(f"expected {expected}; got {came}, which kind={kind!r} lacks. Use 'softmax'.")


def _names(terms: Terms) -> str:
    return ", ".join(type(term).__name__ for term in terms)


def retention_decay(num_heads: int) -> Float[Tensor, " H"]:
    """RetNet's decay per head, `1 - 2^(-5 - h)` (Sun et al. 2023, equation 8)."""
    return 1 - 2.0 ** (-5 - torch.arange(num_heads, dtype=torch.float64))


class LinearAttention(SelfAttention):
    """Multi-head attention in time and memory linear in the number of tokens, without a softmax over pairs.

    See `relpos.linear_attention`; input and output are `[B, N, E]`.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads, num_kv_heads: query heads, H, and key/value heads, G, dividing H; None for H.
        feature_map: "elu", "relu", "identity", or "softmax" (not causal).
        causal: whether a token sees none after it.
        position: a rotation, such as `RotaryEmbedding`, or None.
        retention: RetNet's retention (Sun et al. 2023): weights decay with the distance at a rate of the head, are not
            divided by their sum, and the output of a head passes an RMS norm. Causal only.
        qkv_bias, proj_bias: whether the two projections have biases.

    Raises:
        ValueError: heads that do not divide, or retention that is not causal.
        NotImplementedError: in `forward`, a position that is not a rotation.
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
    """Multi-head attention by `relpos.flash_attention`, for reading; `MultiHeadAttention` is the one to train with.

    Input and output are `[B, N, E]`.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: heads, H.
        block_size: rows and columns of a tile.
        causal: whether a token sees none after it.
        position: a mechanism that is one line bias, or None.

    Raises:
        ValueError: heads that do not divide, or an argument of another kind.
        NotImplementedError: in `forward`, a position that is not one line bias.
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
        if position is not None and (bias is None or len(position) != 1):
            raise NotImplementedError(
                f"expected a position that is one line bias; got {_names(position)}, which FlashAttention lacks. "
                "Use MultiHeadAttention."
            )
        return flash_attention(q, k, v, bias=bias, causal=self.causal, block_size=self.block_size)
