"""NeMo: Transformer-XL's positions in its Conformers and FastConformers, Parakeet and Canary among them.

NeMo hands a mask `[B, T, T]` to all layers, True where a pair may not attend, of padding, a limited context or chunks
(`pair_masks`). Calls with a cache, of streaming, run as published.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.common.pair_masks import mask_of_pairs
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, published_class
from relpos.adapters.retrofits.transformer_xl import transformer_xl_terms


class NeMoAttention(Retrofitted):
    """`RelPositionMultiHeadAttention`."""

    border = 1024
    training_border = 1024

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        pos_emb: Tensor,
        cache: Tensor | None = None,
    ) -> Any:
        """`[B, T, E]`. As published with a cache, or a mask that is not of intervals."""
        tokens = query.shape[1]
        alike = key.shape[1] == value.shape[1] == tokens and pos_emb.shape[:2] == (1, 2 * tokens - 1)
        served = cache is None and alike and self.takes(tokens, tokens)
        found = mask_of_pairs(mask, tokens) if served and mask is not None else None
        if not served or (mask is not None and found is None):
            return super().forward(query, key, value, mask, pos_emb, cache)
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        with sys.modules[published_class(self).__module__].avoid_float16_autocast_context():
            q, k, v = self.forward_qkv(query, key, value)
            out = self.attend(
                q,
                k,
                v,
                position=transformer_xl_terms(self.linear_pos(pos_emb)[0], self.pos_bias_u, self.pos_bias_v),
                mask=found,
                scale=self.d_k**-0.5,
                dropout=self.dropout_rate if self.training else 0.0,
            )
            return self.linear_out(out.transpose(1, 2).flatten(2))


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run without a mask, with one of padding, and with one of chunks beside it."""
    tokens, width = draws.tokens, module.linear_q.in_features
    x, pos_emb = draws.normal(draws.batch, tokens, width), draws.normal(1, 2 * tokens - 1, width)
    real = draws.padding(draws.batch, tokens).bool()
    pairs = real[:, None] & real[:, :, None]
    chunk = torch.arange(tokens, device=real.device) // 4
    before = chunk[:, None] - chunk
    masks = None, ~pairs, ~(pairs & (before >= 0) & (before <= 2))
    return tuple(module(x, x, x, mask, pos_emb) for mask in masks)


_FILE = "nemo.collections.asr.parts.submodules."
_ATTENTION = _FILE + "multi_head_attention.RelPositionMultiHeadAttention"

KINDS = (
    PositionKind(
        name="Transformer-XL",
        library="nemo",
        replaced=(
            Replaced(
                "nemo",
                _ATTENTION,
                NeMoAttention,
                ("forward", "forward_qkv", "forward_attention", "rel_shift", "update_cache"),
            ),
        ),
        verified=(Verified(_ATTENTION, _run, ("pos_bias_u", "pos_bias_v", "linear_pos.weight")),),
        refused=(
            Refused(
                "nemo local",
                _ATTENTION + "Longformer",
                "it attends within a sliding window, already in O(N)",
            ),
            Refused(
                "nemo adapter",
                _FILE + "adapters.multi_head_attention_adapter_module.RelPositionMultiHeadAttentionAdapter",
                "it calls the published forward of its base class by name",
            ),
            Refused(
                "nemo transformer",
                "nemo.collections.asr.modules.transformer_encoder.MultiHeadAttention",
                "its attention is PyTorch's FlexAttention, whose bias of all pairs NeMo makes",
            ),
        ),
    ),
)
