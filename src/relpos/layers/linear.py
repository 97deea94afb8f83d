"""Linear attention as a layer: projections around `relpos.linear_attention`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Sequence
from relpos.core.checks import fail, require_flag, require_int, require_tokens, shape_of
from relpos.engines.linear import FeatureMap, linear_attention
from relpos.position import Mechanism
from relpos.position.mechanism import is_mechanism


def retention_decay(num_heads: int) -> Float[Tensor, " H"]:
    """RetNet's decay per head, `1 - 2^(-5 - h)` (Sun et al. 2023, equation 8)."""
    return 1 - 2.0 ** (-5 - torch.arange(num_heads, dtype=torch.float64))


class LinearAttention(nn.Module):
    """Multi-head attention in time and memory linear in the number of tokens, without a softmax over pairs.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: heads, H. num_kv_heads: heads of keys and values, G, dividing H; None for H.
        feature_map: "elu", "relu", "identity", or "softmax" (not causal); see `relpos.linear_attention`.
        causal: whether a token sees none after it.
        position: a rotation, such as `RotaryEmbedding`, or None.
        retention: whether what is farther counts for less by RetNet's decay per head; causal alone. The weights are
            then not divided by their sum, and each head's output goes through an RMS norm, as retention's does.
        qkv_bias, proj_bias: whether the two projections have biases.
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
        super().__init__()
        require_int(d_model, "d_model", at_least=1)
        require_int(num_heads, "num_heads", at_least=1)
        if d_model % num_heads:
            fail("d_model to be a multiple of num_heads", f"{d_model} and {num_heads}", "Change one of them.")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_int(num_kv_heads, "num_kv_heads", at_least=1)
        if num_heads % num_kv_heads:
            fail("num_heads to be a multiple of num_kv_heads", f"{num_heads} and {num_kv_heads}", "Change one of them.")
        flags = {"causal": causal, "retention": retention, "qkv_bias": qkv_bias, "proj_bias": proj_bias}
        for name, flag in flags.items():
            require_flag(flag, name)
        if retention and not causal:
            fail("retention only in a causal layer", "causal=False", "Pass causal=True.")
        if position is not None and not is_mechanism(position):
            fail("position to be a mechanism", shape_of(position), "Build it first, e.g. RotaryEmbedding(head_dim).")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, d_model // num_heads
        self.feature_map: FeatureMap = feature_map
        self.causal, self.retention, self.position = causal, retention, position
        self.qkv = nn.Linear(d_model, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6, elementwise_affine=False) if retention else None
        self.proj = nn.Linear(d_model, d_model, bias=proj_bias)

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, a plain sequence where left out."""
        require_tokens(x, self.qkv.in_features, self.qkv.weight)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(counts, dim=1)
        where = Sequence(x.shape[1]) if coordinates is None else coordinates
        out = linear_attention(
            q, k, v,
            feature_map=self.feature_map,
            causal=self.causal,
            position=None if self.position is None else self.position.terms(where),
            decay=retention_decay(self.num_heads).to(x.device) if self.retention else None,
            normalize=not self.retention,
        )  # fmt: skip
        if self.norm is not None:
            out = self.norm(out)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected
