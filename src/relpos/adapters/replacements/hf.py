"""Common base of the transformers families. Their layers attend through `adapters.common.interface`.

The published forward makes queries and keys and extends the cache. Our attention function asks the layer for its
position. Cached keys are not rotated; a rotation applies to all tokens at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import refuse_static, require_switched
from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.states import LayerStates


class RepositionedInterfaceAttention(Repositioned):
    """Attention that calls its configuration's attention function, which calls `attend_repositioned`.

    Published layers pass arguments that they do not know on to that function: so it gets the hidden states.
    """

    hands_on_states = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        require_switched(self.config)
        cache = kwargs.get("past_key_values")
        refuse_static(cache)
        if self.layer_position.needs_states:
            own: Tensor = args[0] if args else kwargs["hidden_states"]
            states = LayerStates(own, self.layer_position.remembered(own))
            kwargs |= {"relpos_states": states, "past_key_values": states.kept_in(cache)}
        return super().forward(*args, **kwargs)


class RepositionedEmbedding(Repositioned):
    """An `nn.Embedding` of positions: returns the vectors of position ids."""

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors `[1 or B, N, E]` of position ids `[1 or B, N]`."""
        module: Any = self
        own = self.global_ids(ids.shape[1], ids.device)
        ids = ids if own is None else own.expand(ids.shape)
        return self.layer_position.embed(module.weight.new_zeros(*ids.shape, module.embedding_dim), ids)


class RepositionedTokenModel(Repositioned):
    """A model without an embedding of positions: positions are added to its `inputs_embeds`."""

    def embedded(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: Any, ids: Tensor | None = None
    ) -> Tensor | None:
        """Tokens with their position, or the caller's `inputs_embeds` if there is nothing to add."""
        if (input_ids is None) == (inputs_embeds is None):
            return inputs_embeds  # fails, as published
        x: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        own = self.global_ids(x.shape[1], x.device)
        ids = ids if own is None else own
        if ids is None:
            before = 0 if cache is None else cache.get_seq_length()
            ids = torch.arange(before, before + x.shape[1], device=x.device)[None]
        return self.layer_position.embed(x, ids)
