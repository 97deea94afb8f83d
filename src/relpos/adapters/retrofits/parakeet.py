"""Parakeet and Nemotron: Transformer-XL's positions in Conformers that make their own masks.

Their encoders are replaced too. They pass to their layers

    Parakeet    [B, 1, 1, M] in place of [B, 1, N, M]                     True at real keys
    Nemotron    [1 or B, 1, N, 2] of int64 in place of [B, 1, N, M]       the first and the last key of each query
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.interface import MASKS, mask_of
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, route, runs_as_published
from relpos.adapters.retrofits.transformer_xl import by_head, transformer_xl_terms
from relpos.core import Mask


class ParakeetAttention(Retrofitted):
    """The attention of Parakeet and Nemotron."""

    border = 1024
    training_border = 1024

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. Runs as published with a cache, a mask of all pairs or recorded weights."""
        tokens = hidden_states.shape[1]
        mask = _mask_handed_on(attention_mask, tokens)
        served = attention_mask is None or mask is not None
        cached = kwargs.get("past_key_values") is not None
        if cached or not (served and _has_equal_positions(self, position_embeddings) and self.takes(tokens, tokens)):
            if mask is not None:
                attention_mask = mask.dense(tokens, tokens, hidden_states.device)
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        module: Any = self
        projected = module.relative_k_proj(position_embeddings[:1])[0]
        linears = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (by_head(linear(hidden_states), module.head_dim) for linear in linears)
        out = self.attend(
            q,
            k,
            v,
            position=transformer_xl_terms(projected, module.bias_u, module.bias_v),
            mask=mask,
            scale=module.scaling,
            dropout=module.attention_dropout if self.training else 0.0,
        )
        return module.o_proj(out.transpose(1, 2).flatten(2)), None


def _mask_handed_on(mask: Tensor | None, tokens: int) -> Mask | None:
    """The mask in a tensor that one of our encoders passed on; None for any other tensor."""
    if mask is None or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool and mask.shape[2:] == (1, tokens):
        return mask_of(mask[:, 0, 0], tokens, tokens)
    if mask.dtype == torch.int64 and mask.shape[2:] == (tokens, 2):
        return Mask(low=mask[:, 0, :, 0], high=mask[:, 0, :, 1])
    return None


def _has_equal_positions(module: Any, positions: Tensor) -> bool:
    """Whether all elements of a batch have the same sinusoids. Dropout makes them differ."""
    return positions.shape[0] == 1 or not (module.training and module.config.dropout_positions)


class ParakeetEncoder(Retrofitted):
    """Parakeet's encoder, replaced for its mask."""

    border = ParakeetAttention.border
    training_border = ParakeetAttention.training_border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward, except that layers get a mask of one number per key."""
        return _captured(_encode_parakeet)(self, *args, **kwargs)


@cache
def _captured(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward wrapped to record hidden states on request, as published forwards are."""
    from transformers.utils.generic import merge_with_config_defaults
    from transformers.utils.output_capturing import capture_outputs

    captured: Callable[..., Any] = merge_with_config_defaults(capture_outputs(forward))  # type: ignore[no-untyped-call]
    return captured


def _positions(encoder: Any, hidden_states: Tensor) -> Tensor:
    """The sinusoids of all distances. Libraries refuse more than `max_position_embeddings` of them (Nemotron, and
    Parakeet in earlier versions), although they are computed, not learned: relpos has no such limit."""
    tokens, encode = hidden_states.shape[1], encoder.encode_positions
    if encode.max_position_embeddings < tokens and not (runs_as_published() or route(encoder).paused):
        encode = copy.copy(encode)
        encode.max_position_embeddings = tokens
    positions: Tensor = encode(hidden_states)
    return positions


def _file(module: nn.Module) -> Any:
    """The library's Python module that defines a module's class."""
    return sys.modules[type(module).__module__]


def _encode_parakeet(
    self: Any,
    input_features: Tensor,
    attention_mask: Tensor | None = None,
    output_attention_mask: bool = True,
    **kwargs: Any,
) -> Any:
    hidden_states = self.subsampling(input_features, attention_mask) * self.input_scale
    positions = _positions(self, hidden_states)
    tokens = hidden_states.shape[1]
    cached = kwargs.get("past_key_values") is not None
    own = not cached and self.takes(tokens, tokens) and _has_equal_positions(self, positions)
    if own:  # one set for the batch
        positions = positions[:1].expand_as(positions)
    hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
    positions = nn.functional.dropout(positions, p=self.dropout_positions, training=self.training)
    output_mask = mask = None
    if attention_mask is not None:
        output_mask = self._get_output_attention_mask(attention_mask, target_length=tokens)
        mask = output_mask[:, None, None]
        if not own:
            mask = mask & mask.mT
    for layer in self.layers:
        if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
            continue
        hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=positions, **kwargs)
    return _file(self).ParakeetEncoderModelOutput(
        last_hidden_state=hidden_states,
        attention_mask=output_mask.int() if output_mask is not None and output_attention_mask else None,
    )


class NemotronEncoder(Retrofitted):
    """Nemotron's streaming encoder: a query attends to its own chunk and some chunks before it."""

    border = ParakeetAttention.border
    training_border = ParakeetAttention.training_border

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The published forward, except that layers get the first and last key of each query. As published with a
        cache."""
        cached = any(kwargs.get(name) for name in ("use_cache", "past_key_values", "padding_cache"))
        if args or cached or getattr(self.config, "use_cache", False):
            return super().forward(input_features, attention_mask, *args, **kwargs)
        return _captured(_encode_nemotron)(self, input_features, attention_mask, **kwargs)


def _encode_nemotron(
    self: Any,
    input_features: Tensor,
    attention_mask: Tensor | None = None,
    *,
    output_attention_mask: bool = True,
    num_lookahead_tokens: int | None = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    padding_cache: Any = None,
    use_cache: Any = None,
    **kwargs: Any,
) -> Any:
    hidden_states = self.subsampling(input_features, attention_mask) * self.input_scale
    tokens, device = hidden_states.shape[1], hidden_states.device
    positions = _positions(self, hidden_states)
    own = self.takes(tokens, tokens) and _has_equal_positions(self, positions)
    if own:  # one set for the batch
        positions = positions[:1].expand_as(positions)
    output_mask = None
    if attention_mask is not None:
        output_mask = self._get_output_attention_mask(attention_mask, target_length=tokens)
    left, right = self._resolve_attn_context(num_lookahead_tokens)
    if own:
        mask = _chunks(tokens, left, right, output_mask, device)
        blank = mask[..., 1] < mask[..., 0]
    else:
        file = _file(self)
        chunks = file.chunked_limited_mask_function(left, right)
        mask = file.create_bidirectional_mask(self.config, hidden_states, output_mask, and_mask_function=chunks)
        blank = (~mask).all(dim=-1)
    hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
    positions = nn.functional.dropout(positions, p=self.dropout_positions, training=self.training)
    for layer in self.layers:
        if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
            continue
        hidden_states = layer(
            hidden_states, attention_mask=mask, all_masked_rows=blank, position_embeddings=positions, **kwargs
        )
    return _file(self).NemotronAsrStreamingEncoderModelOutput(
        last_hidden_state=hidden_states,
        attention_mask=output_mask.int() if output_mask is not None and output_attention_mask else None,
    )


def _chunks(tokens: int, left: int, right: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """The first and last key that each query attends to, `[1 or B, 1, N, 2]`: whole chunks, padded on the right."""
    size = right + 1
    chunk = torch.arange(tokens, device=device) // size
    before = left // size if left >= 0 else tokens
    low, high = ((chunk - before) * size).clamp(min=0)[None], ((chunk + 1) * size).clamp(max=tokens)[None]
    if valid is not None:
        high = torch.minimum(high, valid.sum(-1, keepdim=True))
    low, high = torch.broadcast_tensors(low, high - 1)
    return torch.stack([low, high], dim=-1)[:, None]


def _run_parakeet(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    width = module.q_proj.in_features
    x = draws.normal(draws.batch, draws.tokens, width)
    positions = draws.normal(1, 2 * draws.tokens - 1, width).expand(draws.batch, -1, -1)
    mask = draws.padding(draws.batch, draws.tokens).bool()[:, None, None]
    return (module(x, position_embeddings=positions, attention_mask=mask)[0],)


def _run_nemotron(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    tokens, width = draws.tokens, module.q_proj.in_features
    x = draws.normal(draws.batch, tokens, width)
    positions = draws.normal(1, 2 * tokens - 1, width).expand(draws.batch, -1, -1)
    valid = draws.padding(draws.batch, tokens).bool()
    chunks = _chunks(tokens, 8, 3, valid, x.device)
    mask = chunks if is_swapped(module) else Mask(low=chunks[:, 0, :, 0], high=chunks[:, 0, :, 1]).dense(tokens, tokens)
    seen = chunks[:, 0, :, 1] >= chunks[:, 0, :, 0]  # rows without a key are NaN in the library's softmax
    return (module(x, position_embeddings=positions, attention_mask=mask)[0][seen],)


def _run_encoder(module: Any, draws: RandomInputs, **more: Any) -> tuple[Tensor, ...]:
    """Run an encoder with its first layer on padded frames. Uses sdpa: eager attention makes padded rows NaN."""
    config = module.config  # on a copy
    config._attn_implementation_internal = "sdpa"
    frames = draws.tokens * config.subsampling_factor
    x = draws.normal(draws.batch, frames, config.num_mel_bins)
    out = module(x, attention_mask=draws.padding(draws.batch, frames), **more)
    return (out.last_hidden_state[out.attention_mask.bool()],)


def _run_streaming_encoder(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with short chunks, so that both of their ends take effect."""
    module.config.sliding_window = 9  # on a copy
    return _run_encoder(module, draws, num_lookahead_tokens=2)


def _not_sdpa(module: Any) -> str | None:
    own = module.config._attn_implementation
    return None if own == "sdpa" else f"attn_implementation={own!r}, whose mask the library inverts; load with sdpa"


_CAPTURED = (
    "transformers.utils.generic.merge_with_config_defaults",
    "transformers.utils.output_capturing.capture_outputs",
)
_TABLES = ("bias_u", "bias_v", "relative_k_proj.weight")

KINDS = (
    PositionKind(
        name="Transformer-XL, Parakeet",
        library="transformers",
        replaced=(
            Replaced(
                "parakeet",
                "ParakeetEncoderAttention",
                ParakeetAttention,
                reads=("forward", "_rel_shift", "ParakeetEncoderConvolutionModule"),
            ),
            Replaced("parakeet", "ParakeetEncoder", ParakeetEncoder, reads=("forward", *_CAPTURED)),
            Replaced(
                "nemotron_asr_streaming",
                "NemotronAsrStreamingEncoderAttention",
                ParakeetAttention,
                reads=("forward", "_rel_shift"),
                unfit=_not_sdpa,
            ),
            Replaced(
                "nemotron_asr_streaming",
                "NemotronAsrStreamingEncoder",
                NemotronEncoder,
                reads=("forward", "chunked_limited_mask_function", *MASKS, *_CAPTURED),
                unfit=_not_sdpa,
            ),
        ),
        verified=(
            Verified(class_path("parakeet", "ParakeetEncoderAttention"), _run_parakeet, _TABLES),
            Verified(class_path("parakeet", "ParakeetEncoder"), _run_encoder, _TABLES, first=("layers",)),
            Verified(
                class_path("nemotron_asr_streaming", "NemotronAsrStreamingEncoderAttention"), _run_nemotron, _TABLES
            ),
            Verified(
                class_path("nemotron_asr_streaming", "NemotronAsrStreamingEncoder"),
                _run_streaming_encoder,
                _TABLES,
                first=("layers",),
            ),
        ),
    ),
)
