"""WavLM's gated bias: the first layer makes a bias by distance bucket for all layers; each query multiplies it by a
gate.

    score[h, i, j] += gate[h, i] * rel_attn_embed[bucket(j - i), h]

This equals a product of queries with vectors of the distance. The gate is appended to each query as one more component;
keys get a 0 there, and the distance's vector holds the bias there. The first layer passes on one number per offset,
`[1, H, 1, 2 N - 1]`, in place of `[B H, N, N]`. The mask is one number per key, as published. The library's own
attention, which always computes weights for all pairs, is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import dense_by_offset, is_by_offset, mask_of
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped
from relpos.adapters.retrofits.transformer_xl import by_head
from relpos.core import LineVectors, Sequence, Terms, at_least_float32, lines


class GatedAttention(Retrofitted):
    """WavLM's attention."""

    border = 1536
    training_border = 1536

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> Any:
        """`(output, None, bias)`. As published if weights are recorded or the bias is given for all pairs."""
        module: Any = self
        tokens = hidden_states.shape[1]
        handed_on = position_bias is not None and is_by_offset(position_bias, tokens, tokens)
        plain = attention_mask is None or attention_mask.dim() == 2
        known = (position_bias is None or handed_on) and plain
        if not (known and self.takes(tokens, tokens)):
            if handed_on:
                assert position_bias is not None
                position_bias = _of_all_pairs(position_bias, hidden_states)
            return super().forward(hidden_states, attention_mask, position_bias, index, **kwargs)
        if position_bias is None:
            offset = torch.arange(1 - tokens, tokens, device=hidden_states.device)
            position_bias = module.rel_attn_embed(module._relative_positions_bucket(-offset)).T[None, :, None]
        linears = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (by_head(_as_read(linear, hidden_states), module.head_dim) for linear in linears)
        values = at_least_float32(position_bias[0, :, 0])
        out = self.attend(
            torch.cat([q, _gate(module, hidden_states).to(q.dtype)], dim=-1),
            torch.nn.functional.pad(k, (0, 1)),
            v,
            position=_terms(values, tokens, module.head_dim),
            mask=mask_of(None if attention_mask is None else attention_mask.eq(1), tokens, tokens),
            scale=module.scaling,
            dropout=module.dropout if self.training else 0.0,
        )
        return _as_read(module.out_proj, out.transpose(1, 2).flatten(2)), None, position_bias


def _as_read(linear: Any, x: Tensor) -> Tensor:
    """The linear layer's output from its weights alone. The published code does not call it: adapters on it have no
    effect."""
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def _gate(module: Any, hidden_states: Tensor) -> Tensor:
    """The gate of each query, `[B, H, N, 1]`."""
    projected = module.gru_rel_pos_linear(by_head(hidden_states, module.head_dim))
    first, second = torch.sigmoid(projected.unflatten(-1, (2, 4)).sum(-1)).chunk(2, dim=-1)
    gate: Tensor = first * (second * module.gru_rel_pos_const - 1.0) + 2.0
    return gate


def _terms(values: Tensor, tokens: int, width: int) -> Terms:
    """The bias as vectors that are 0 except in their last component."""
    line = lines(Sequence(tokens), device=values.device)
    vectors = torch.nn.functional.pad(values[..., None], (width, 0))
    return Terms(LineVectors(vectors, None, line, side="query", scaled=False))


def _of_all_pairs(bias: Tensor, hidden_states: Tensor) -> Tensor:
    """A bias by offset in the library's form, `[B H, N, N]`."""
    batch, tokens, _ = hidden_states.shape
    dense = dense_by_offset(bias, tokens, tokens).to(hidden_states.dtype)
    return dense.repeat(batch, 1, 1, 1).flatten(0, 1)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run a layer with a bias from an earlier layer, and with its own if it has a table."""
    tokens = draws.tokens
    mask = draws.padding(draws.batch, tokens)
    x = draws.normal(draws.batch, tokens, module.embed_dim)
    bias = draws.normal(1, module.num_heads, 1, 2 * tokens - 1)
    handed_on = bias if is_swapped(module) else _of_all_pairs(bias, x)
    outputs = [module(x, attention_mask=mask, position_bias=handed_on)[0]]
    if hasattr(module, "rel_attn_embed"):
        own, _, bias = module(x, attention_mask=mask)
        outputs += [own, module(own, attention_mask=mask, position_bias=bias)[0]]
    return tuple(outputs)


_WAVLM = class_path("wavlm", "WavLMAttention")

KINDS = (
    PositionKind(
        name="Gated bias",
        library="transformers",
        replaced=(
            Replaced(
                "wavlm",
                _WAVLM,
                GatedAttention,
                reads=("forward", "torch_multi_head_self_attention", "compute_bias", "_relative_positions_bucket"),
            ),
        ),
        verified=(Verified(_WAVLM, _run, tables=("rel_attn_embed.weight", "gru_rel_pos_const")),),
        refused=(
            Refused(
                "prophetnet",
                "ProphetNetNgramSelfAttention",
                "its tokens compute a bias for each bucket, in streams that attend to one another",
            ),
        ),
    ),
)
