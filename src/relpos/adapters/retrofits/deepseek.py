"""DeepSeek V4's sliding layers: one head of keys, which are the values too; values come rotated, the output is turned
back by its query's angles, and each head has a sink.

    out[i] = R(-i) sum over i - window < j <= i of weight[i, j] R(j) kv[j],    R on the trailing dimensions

Published, scores are N x M numbers a head. Projections, norms, rotations (the library's own functions) and the cache
run as they are. The model still makes one mask of N x M, which compressed layers need; the sliding layers read from it
the mask of tokens that it was made from (`OF_TOKENS`).

Compressed layers (CSA, HCA) run as published: their keys also hold what a compressor pools from the tokens, and in CSA
an indexer chooses among these by content.

Source: DeepSeek-V4 technical report (2026), section 2.3, and transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import OF_TOKENS, mask_of
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import Sinks, Terms


class DeepseekV4Attention(Retrofitted):
    """A sliding layer's attention."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. As published if the call is too short, has its own mask or weights are requested."""
        tokens, module = hidden_states.shape[1], self
        keys = tokens
        if past_key_values is not None:
            keys, _ = past_key_values.get_mask_sizes(tokens, module.layer_idx)
        of_tokens = getattr(attention_mask, OF_TOKENS, None)
        if of_tokens is None or attention_mask.shape[-1] != keys or not self.takes(tokens, keys):  # type: ignore[union-attr]
            given = hidden_states, position_embeddings, position_ids, attention_mask, past_key_values
            return super().forward(*given, **kwargs)
        rotate: Any = sys.modules[type(self).__module__].apply_rotary_pos_emb
        cos, sin = position_embeddings[module.rope_layer_type]
        heads = (*hidden_states.shape[:-1], -1, module.head_dim)
        q = module.q_b_proj(module.q_a_norm(module.q_a_proj(hidden_states))).view(heads).transpose(1, 2)
        q = rotate(module.q_b_norm(q), cos, sin)
        kv = rotate(module.kv_norm(module.kv_proj(hidden_states)).view(heads).transpose(1, 2), cos, sin)
        if past_key_values is not None:
            kv = past_key_values.update(kv, kv, module.layer_idx)[0]
        out = self.attend(
            q,
            kv,
            kv,
            position=Terms(Sinks(module.sinks)),
            mask=mask_of(of_tokens[0], tokens, keys, causal=True, window=module.sliding_window),
            scale=module.scaling,
            dropout=module.attention_dropout if self.training else 0.0,
        )
        out = rotate(out, cos, -sin).transpose(1, 2).reshape(*heads[:2], module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(out).flatten(2)), None


def _unfit(module: Any) -> str | None:
    """Why a compressed layer is not served."""
    if module.layer_type == "sliding_attention":
        return None
    return "a compressed layer (CSA, HCA), see its compressor"


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """A layer on rows with padding, and a window that so few tokens reach; on a copy."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = module.config
    config.sliding_window = module.sliding_window = min(module.sliding_window, draws.tokens // 3)
    x, padding = draws.normal(draws.batch, draws.tokens, config.hidden_size), draws.padding(draws.batch, draws.tokens)
    position_ids = torch.arange(draws.tokens, device=draws.device)[None]
    rotary: Any = sys.modules[type(module).__module__].DeepseekV4RotaryEmbedding
    turns = rotary(config).to(draws.device)(x, position_ids, layer_type=module.rope_layer_type)
    mask: Any = create_sliding_window_causal_mask(
        config=config, inputs_embeds=x, attention_mask=padding, past_key_values=None, position_ids=position_ids
    )
    return (module(x, {module.rope_layer_type: turns}, position_ids, mask)[0],)


_PATH = class_path("deepseek_v4", "DeepseekV4Attention")
_READS = (
    "apply_rotary_pos_emb",
    "rotate_half",
    class_path("deepseek_v4", "DeepseekV4Model"),
    "transformers.masking_utils.create_sliding_window_causal_mask",
    "transformers.masking_utils.sliding_window_causal_mask_function",
    "transformers.masking_utils.sliding_window_overlay",
)
_POOLED = "its layer also attends to keys that it pools from tokens"

KINDS = (
    PositionKind(
        name="Rotated values",
        library="transformers",
        switches=True,
        replaced=(Replaced("deepseek_v4", _PATH, DeepseekV4Attention, reads=("forward", *_READS), unfit=_unfit),),
        verified=(Verified(_PATH, _run, tables=("sinks",)),),
        refused=(
            Refused("deepseek_v4", "DeepseekV4HCACompressor", _POOLED),
            Refused("deepseek_v4", "DeepseekV4CSACompressor", _POOLED + ", chosen by content"),
        ),
    ),
)
