"""The base of attention layers: the QKV projection, and the output projection.

    x -> qkv(x) -> q, k, v by head -> attention of the subclass -> heads concatenated -> proj

One linear layer computes q, k and v, in fewer kernels than three. With fewer key heads than query heads this is
grouped-query attention (Ainslie et al. 2023), with one it is multi-query attention (Shazeer 2019).
"""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Sequence, Terms
from relpos.core.checks import NO_OTHER, fail, require_choice, require_flag, require_int, require_tokens, shape_of
from relpos.layers.norms import CosineScale, HeadNormChoice, QueryKeyNorm
from relpos.position import Mechanism
from relpos.position.base.device import settle
from relpos.position.base.states import terms_of
from relpos.position.base.wrapped import is_mechanism


class SelfAttention(nn.Module):
    """Base class of attention layers, with arguments as in `MultiHeadAttention`; a subclass defines `_attend`.

    Args:
        width: width of a token, E.
        width_name: its name in the subclass, for error messages.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: HeadNormChoice | None = None,
        norm_eps: float | None = None,
        position: Mechanism | None = None,
        width_name: str = "d_model",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_int(num_heads, "num_heads", at_least=1)
        require_int(width, width_name, at_least=1)
        require_int(num_kv_heads, "num_kv_heads", at_least=1)
        if width % num_heads:
            fail(f"{width_name} to be a multiple of num_heads", f"{width} and {num_heads}", "Change one of them.")
        if num_heads % num_kv_heads:
            fail("num_heads to be a multiple of num_kv_heads", f"{num_heads} and {num_kv_heads}", "Change one of them.")
        require_flag(qkv_bias, "qkv_bias")
        require_flag(proj_bias, "proj_bias")
        if position is not None and not is_mechanism(position):
            fail("position to be a mechanism", shape_of(position), "Build it first, e.g. RotaryEmbedding(head_dim).")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, width // num_heads
        if qk_norm is not None:
            require_choice(qk_norm, "qk_norm", get_args(HeadNormChoice), NO_OTHER)
        cosine = qk_norm == "cosine"
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias and not cosine)
        self.q_bias = self.v_bias = None
        self.qk_norm: CosineScale | QueryKeyNorm | None = None
        if qk_norm == "cosine":
            self.qk_norm = CosineScale(num_heads)
            if qkv_bias:
                self.q_bias = nn.Parameter(torch.zeros(num_heads * self.head_dim))
                self.v_bias = nn.Parameter(torch.zeros(num_kv_heads * self.head_dim))
        elif qk_norm is not None:
            self.qk_norm = QueryKeyNorm(self.head_dim, qk_norm, norm_eps)
        self.scale = 1.0 if cosine else None
        self.proj = nn.Linear(width, width, bias=proj_bias)
        self.position = position

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Self-attention of tokens; `coordinates` are those of the tokens, by default a sequence."""
        q, k, v = self._heads(x)
        position = None
        if self.position is not None:
            settle(self.position, x.device)
            position = terms_of(self.position, Sequence(x.shape[1]) if coordinates is None else coordinates, states=x)
        return self._joined(self._attend(q, k, v, position))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Terms | None) -> Tensor:
        """The output of attention, `[B, H, N, D]`, for H heads of q and G heads of k and v."""
        raise NotImplementedError

    def _heads(
        self, x: Float[Tensor, "B N E"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"], Float[Tensor, "B G N D"]]:
        """The queries, keys and values of tokens."""
        require_tokens(x, self.qkv.in_features, self.qkv.weight)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(counts, dim=1)
        if self.q_bias is not None and self.v_bias is not None:
            q, v = (y + bias.view(-1, 1, self.head_dim).to(y.dtype) for y, bias in ((q, self.q_bias), (v, self.v_bias)))
        return (q, k, v) if self.qk_norm is None else (*self.qk_norm(q, k), v)

    def _joined(self, heads: Float[Tensor, "B H N D"]) -> Float[Tensor, "B N E"]:
        """The output projection of the concatenated heads."""
        tokens: Tensor = self.proj(heads.transpose(1, 2).flatten(2))
        return tokens
