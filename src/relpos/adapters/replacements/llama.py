"""transformers' Llama. Own position: a rotation of queries and keys, made once for all layers, `rotary_emb`.

The rotation is switched off by angles of 0. Keys stay unrotated in the cache, and a mechanism that rotates does so at
every step. Key heads are grouped as in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from relpos.adapters.common.kinds import class_path
from relpos.adapters.replacements.hf import RepositionedInterfaceAttention, RepositionedTokenModel
from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.position import Site


class NoRotation(Repositioned):
    """`LlamaRotaryEmbedding`, at angle 0."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[1, N, D]`."""
        width = 2 * self.inv_freq.shape[0]
        return x.new_ones(1, x.shape[1], width), x.new_zeros(1, x.shape[1], width)


class RepositionedLlama(RepositionedTokenModel):
    """`LlamaModel`, which itself adds no position to tokens."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """The published forward on tokens with their position."""
        x = self.embedded(input_ids, inputs_embeds, past_key_values, position_ids)
        return super().forward(
            None if x is not None else input_ids, attention_mask, position_ids, past_key_values, x, **more
        )


def _llama(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(layer.self_attn, _ATTENTION) for layer in model.layers)
    config, first = model.config, layers[0]
    longest = given.sequence(config.max_position_embeddings)
    site = Site(config.num_attention_heads, first.head_dim, config.hidden_size, longest, causal=True)
    rotary = require_class(model.rotary_emb, _ROTARY)
    base = config.rope_parameters["rope_theta"]
    own = (Own("rotary_emb", f"rotation of queries and keys, {rotary.rope_type}, base {base:g}"),)
    yield Stack(
        name,
        model,
        site,
        layers,
        RepositionedInterfaceAttention,
        own,
        ((model, RepositionedLlama), (rotary, NoRotation)),
    )


_MODEL, _ATTENTION, _ROTARY = (
    class_path("llama", name) for name in ("LlamaModel", "LlamaAttention", "LlamaRotaryEmbedding")
)
STACKS = {_MODEL: _llama}
READS = dict.fromkeys((_MODEL, _ATTENTION, _ROTARY), ("forward",))
