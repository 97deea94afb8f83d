"""Inkling's relative logits: each token's hidden state is projected to 16 numbers a head, which meet a learned vector
of the distance.

    score[h, i, j] = tau[i] * ( <q[i], k[j]> / D + <r[h, i], proj[:, i - j]> )      the second where 0 <= i - j < extent

tau, in full layers alone, grows with the logarithm of the position. The published bias is N x M numbers a head. Here r
and q are multiplied by tau, in float32 as published, and r meets each vector once. Sliding layers apply their window
themselves, so that the mask is one number per key for them, too. Projections, norms, clips and short convolutions run
as they are.

Inkling 2 scales by 1/sqrt(D), has a sink of each token and head beside the keys, reads tau's positions from
`position_ids` and rounds r after tau. Its full layers project keys and values from states of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import implementation, mask_of, published_mask
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.pair_masks import mask_of_documents
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.adapters.retrofits.transformer_xl import by_head
from relpos.core import Lines, Sequence, Sinks, Terms, at_least_float32, lines
from relpos.core.checks import fail
from relpos.position.inkling import distance_curves


class RelativeLogitsAttention(Retrofitted):
    """What the attention classes share: which calls relpos computes, and their terms."""

    def of_tokens(self, mask: Tensor | None, tokens: int, cache: Any) -> tuple[int, int] | None:
        """Keys, and the place of the first query, of a call that relpos computes; None if it runs as published."""
        keys, first_key, first = _places(self, tokens, cache)
        at_end = isinstance(first, int) and first + tokens == first_key + keys
        served = at_end and _is_causal(self) and self.takes(tokens, keys)
        if served and mask is not None and mask.dim() != 2:
            served = mask_of_documents(mask, self.sliding_window) is not None
        return (keys, first) if served else None

    def as_published(self, mask: Tensor | None, hidden_states: Tensor, cache: Any) -> Tensor | None:
        """Our mask in the form of the published layer, with its window; others pass through."""
        if mask is not None and mask.dim() != 2:
            return mask
        tokens = hidden_states.shape[1]
        keys, first_key, first = _places(self, tokens, cache)
        if isinstance(first, Tensor) or first + tokens != first_key + keys:  # the mask is not of these keys
            wanted = f"a cache that grows, which a mask of tokens fits, in a {type(self).__name__}"
            fail(wanted, type(cache).__name__, 'Generate with cache_implementation="dynamic", the default.')
        own, causal = implementation(self.config), _is_causal(self)
        return published_mask(own, mask, hidden_states[:, None], keys, causal=causal, window=self.sliding_window)

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, relative: Tensor, mask: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The heads' outputs side by side, `[B, N, H D]`.

        Args:
            relative: r, `[B, H, N, w]`.
            mask: `[B, M]`, or one of documents, or None.
            sinks: `[B, H, N]`.
        """
        queries, keys = q.shape[2], k.shape[2]
        window = self.sliding_window
        documents = None if mask is None or mask.dim() == 2 else mask_of_documents(mask, window)
        logits: Any = self.rel_logits_proj
        line = self.line(queries, keys, q.device)
        position = Terms(distance_curves(relative, logits.proj[:, : logits.rel_extent], line))
        out = self.attend(
            q,
            k,
            v,
            position=position if sinks is None else position + Sinks(sinks),
            mask=documents or mask_of(mask, queries, keys, causal=True, window=window),
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return out.transpose(1, 2).flatten(2)

    def line(self, queries: int, keys: int, device: torch.device) -> Lines:
        """The lines of the last queries of a sequence of keys."""
        start = keys - queries
        return self.cached(
            (queries, keys),
            device,
            lambda: lines(Sequence(queries, start=start), Sequence(keys), device=device),
            queries + keys,
        )


class InklingAttention(RelativeLogitsAttention):
    """Inkling's attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. As published if the call is too short, has its own mask or weights are requested."""
        tokens = hidden_states.shape[1]
        places = self.of_tokens(attention_mask, tokens, past_key_values)
        if places is None:
            attention_mask = self.as_published(attention_mask, hidden_states, past_key_values)
            return super().forward(hidden_states, attention_mask, conv_mask, past_key_values, **kwargs)
        module: Any = self
        convolved = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        k = module.k_sconv(module.k_proj(hidden_states), **convolved).unflatten(-1, (-1, module.head_dim))
        v = by_head(module.v_sconv(module.v_proj(hidden_states), **convolved), module.head_dim)
        q = module.q_norm(module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
        k = module.k_norm(k).transpose(1, 2)
        relative = at_least_float32(module.r_proj(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        floor = module.config.log_scaling_n_floor
        if not module.is_sliding and floor is not None:
            order = torch.arange(1, tokens + 1, device=q.device) + places[1]
            tau = _log_scaling(order, floor, module.config.log_scaling_alpha)[:, None]
            q, relative = (q.float() * tau).to(q.dtype), relative * tau
        return module.o_proj(self.attended(q, k, v, relative, attention_mask)), None


class Inkling2Attention(RelativeLogitsAttention):
    """What the two attention classes of Inkling 2 share."""

    def computed(
        self, hidden_states: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: Any, tau: Tensor | None
    ) -> Any:
        """`(output, None)`.

        Args:
            hidden_states: what q, r, gates and sinks are projected from.
            key: projected and convolved, `[B, M, G D]`; so is `value`.
            mask: `[B, M]`, or one of documents, or None.
            cache: or None.
            tau: `[1 or B, N, 1, 1]`, or None.
        """
        module: Any = self
        q = module.q_l2_clip(module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim)))
        relative = module.rel_l2_clip(module.r_proj(hidden_states).unflatten(-1, (module.num_heads, -1)))
        if tau is not None:
            q, relative = ((x.float() * tau).to(x.dtype) for x in (q, relative))
        k = module.k_l2_clip(key.unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
        v = value.unflatten(-1, (-1, module.head_dim))
        v = module.v_norm(v.float()).to(v.dtype).transpose(1, 2)
        gate, sinks = module.gate_proj(hidden_states), module.sink_proj(hidden_states).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, module.layer_idx)
        out = self.attended(q.transpose(1, 2), k, v, relative.transpose(1, 2), mask, sinks)
        return module.o_proj((out.float() * torch.sigmoid(gate.float())).to(out.dtype)), None


class Inkling2SlidingAttention(Inkling2Attention):
    """The attention of Inkling 2's sliding layers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. As published if the call is too short, has its own mask or weights are requested."""
        if self.of_tokens(attention_mask, hidden_states.shape[1], past_key_values) is None:
            attention_mask = self.as_published(attention_mask, hidden_states, past_key_values)
            return super().forward(hidden_states, attention_mask, conv_mask, past_key_values, **kwargs)
        module: Any = self
        convolved = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        key = module.k_sconv(module.k_proj(hidden_states), **convolved)
        value = module.v_sconv(module.v_proj(hidden_states), **convolved)
        return self.computed(hidden_states, key, value, attention_mask, past_key_values, None)


class Inkling2FullAttention(Inkling2Attention):
    """The attention of Inkling 2's full layers."""

    def forward(
        self,
        hidden_states: Tensor,
        key_hidden_states: Tensor,
        value_hidden_states: Tensor,
        attention_mask: Tensor | None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. As published if the call is too short, has its own mask or weights are requested."""
        if self.of_tokens(attention_mask, hidden_states.shape[1], past_key_values) is None:
            attention_mask = self.as_published(attention_mask, hidden_states, past_key_values)
            states = hidden_states, key_hidden_states, value_hidden_states
            return super().forward(*states, attention_mask, conv_mask, past_key_values, **kwargs)
        module: Any = self
        convolved = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        key = module.k_sconv(module.k_proj(key_hidden_states), key_hidden_states, **convolved)
        value = module.v_sconv(module.v_proj(value_hidden_states), value_hidden_states, **convolved)
        config = module.config
        tau = _log_scaling(kwargs["position_ids"] + 1, config.log_scaling_n_floor, config.log_scaling_alpha)
        return self.computed(hidden_states, key, value, attention_mask, past_key_values, tau[..., None, None])


def _log_scaling(order: Tensor, floor: int, alpha: float) -> Tensor:
    """tau of tokens counted from 1, as published: in float32."""
    tau: Tensor = 1.0 + alpha * torch.log((order.float() / floor).clamp(min=1.0))
    return tau


def _is_causal(module: Any) -> bool:
    """Whether the model makes causal masks."""
    return bool(getattr(module.config, "is_causal", True))


def _places(module: Any, tokens: int, cache: Any) -> tuple[int, int, Any]:
    """The number of keys, and the places of the first key and of the first query, before the cache is updated."""
    if cache is None:
        return tokens, 0, 0
    keys, first_key = cache.get_mask_sizes(tokens, module.layer_idx)
    return keys, first_key, cache.get_query_offset(module.layer_idx)


def _masks(module: Any, draws: RandomInputs, x: Tensor) -> dict[str, Tensor | None]:
    """The masks that the model makes for a layer, and settings that so few tokens reach; on a copy."""
    from transformers import masking_utils

    config, logits = module.config, module.rel_logits_proj
    logits.rel_extent = min(logits.rel_extent, draws.tokens // 2)
    if module.is_sliding:
        config.sliding_window_size = module.sliding_window = min(module.sliding_window, draws.tokens // 3)
    elif config.log_scaling_n_floor is not None:
        config.log_scaling_n_floor = min(config.log_scaling_n_floor, draws.tokens // 4)
    given = {
        "config": config,
        "inputs_embeds": x,
        "attention_mask": draws.padding(draws.batch, draws.tokens),
        "past_key_values": None,
    }
    name = "create_sliding_window_causal_mask" if module.is_sliding else "create_causal_mask"
    of_tokens: Any = getattr(masking_utils, name)
    of_convolutions: Any = masking_utils.create_recurrent_attention_mask
    return {"attention_mask": of_tokens(**given), "conv_mask": of_convolutions(**given)}


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    x = draws.normal(draws.batch, draws.tokens, module.config.hidden_size)
    return (module(x, **_masks(module, draws, x))[0],)


def _run_full(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """A full layer of Inkling 2, with other states for keys and values, and positions of their own."""
    states = [draws.normal(draws.batch, draws.tokens, module.config.hidden_size) for _ in range(3)]
    rows, order = torch.arange(draws.batch), torch.arange(draws.tokens)
    position_ids = (order + 3 * rows[:, None]).to(draws.device)
    return (module(*states, **_masks(module, draws, states[0]), position_ids=position_ids)[0],)


_MASKING = "transformers.masking_utils."
_WINDOWS = (
    "create_sliding_window_causal_mask",
    "sliding_window_causal_mask_function",
    "sliding_window_overlay",
    "create_recurrent_attention_mask",
)


def _reads(architecture: str, prefix: str) -> tuple[str, ...]:
    own = (class_path(architecture, prefix + name) for name in ("RelativeLogits", "TextModel"))
    return ("forward", *own, *(_MASKING + name for name in _WINDOWS))


_INKLING = class_path("inkling", "InklingAttention")
_SLIDING, _FULL = (class_path("inkling2", f"Inkling2{kind}Attention") for kind in ("Sliding", "Full"))

KINDS = (
    PositionKind(
        name="Relative logits",
        library="transformers",
        switches=True,
        replaced=(
            Replaced("inkling", _INKLING, InklingAttention, reads=_reads("inkling", "Inkling")),
            Replaced("inkling2", _SLIDING, Inkling2SlidingAttention, reads=_reads("inkling2", "Inkling2")),
            Replaced("inkling2", _FULL, Inkling2FullAttention, reads=_reads("inkling2", "Inkling2")),
        ),
        verified=tuple(
            Verified(path, run, tables=("rel_logits_proj.proj", "l2_clip.scale", "static_weight"))
            for path, run in ((_INKLING, _run), (_SLIDING, _run), (_FULL, _run_full))
        ),
    ),
)
