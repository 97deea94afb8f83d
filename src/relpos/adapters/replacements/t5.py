"""transformers' T5. Own position: a table of 32 buckets of distances, in the first layer of a stack, used by all
layers.

Encoder and decoder are separate stacks. Cross-attention, which has no position, and T5's scale of 1 stay as published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from relpos.adapters.common.kinds import class_path
from relpos.adapters.replacements.hf import RepositionedInterfaceAttention, RepositionedTokenModel
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.position import Site

_LONGEST = 512
"""T5's length in training (Raffel et al. 2020, section 3.1.2); its configuration does not have it."""


class RepositionedT5Attention(RepositionedInterfaceAttention):
    """`T5Attention` among the tokens of a stack. It passes on one zero instead of its bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """The published forward without its bias."""
        nothing = hidden_states.new_zeros(1, self.n_heads, 1, 1)
        return super().forward(hidden_states, mask, key_value_states, nothing, **more)


class RepositionedT5Stack(RepositionedTokenModel):
    """`T5Stack`, which itself adds no position to tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward on tokens with their position."""
        kwargs = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        tokens, embeds, cache = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "past_key_values"))
        x = self.embedded(tokens, embeds, cache if self.is_decoder else None)
        return super().forward(**kwargs | {"inputs_embeds": x, "input_ids": tokens if x is None else None})


_ARGUMENTS = (
    "input_ids", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "inputs_embeds",
    "past_key_values", "use_cache",
)  # fmt: skip


def _t5(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(block.layer[0].SelfAttention, _ATTENTION) for block in model.block)
    first, where = layers[0], "block.0.layer.0.SelfAttention.relative_attention_bias"
    own = (
        Own(where, f"table of {first.relative_attention_num_buckets} buckets, for all layers", (f"{where}.weight",)),
    )
    longest = given.sequence(_LONGEST)
    site = Site(first.n_heads, first.key_value_proj_dim, first.d_model, longest, causal=first.is_causal)
    yield Stack(name, model, site, layers, RepositionedT5Attention, own, ((model, RepositionedT5Stack),))


_STACK, _ATTENTION = (class_path("t5", name) for name in ("T5Stack", "T5Attention"))
STACKS = {_STACK: _t5}
READS = {_STACK: ("forward",), _ATTENTION: ("forward",)}
