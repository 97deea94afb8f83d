"""Transformer-XL's positions in Conformers: queries meet a projected sinusoid of the distance, with biases u and v.

    score[h, i, j] = scale * ( <q[i] + u[h], k[j]> + <q[i] + v[h], W[h] r(i - j)> )

The models make the sinusoids once, `[1 or B, 2 N - 1, E]`, from distance N - 1 down to -(N - 1), and hand them to the
layers, which project them. That stays, and with it their dropout and whatever was put on the projection. What goes are
the products of all queries with all distances, and their shift.

Masks are one number a key. Where a library makes them by its attention interface, that is switched. Parakeet, Nemotron
and FastSpeech2 make their own; the encoders of the first two are replaced as well, and hand on

    Parakeet    [B, 1, 1, M] in place of [B, 1, N, M]                     True at real keys
    Nemotron    [1 or B, 1, N, 2] of int64 in place of [B, 1, N, M]       the first and the last key of each query
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.interface import mask_of, refuse_recorded_weights, weights_are_recorded
from relpos.adapters.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.random_inputs import RandomInputs
from relpos.adapters.retrofitted import Retrofitted, is_swapped
from relpos.core import LineVectors, Mask, QueryBias, Sequence, Terms, at_least_float32, lines


def transformer_xl_terms(projected: Tensor, u: Tensor, v: Tensor) -> Terms:
    """The terms of projected sinusoids.

    Args:
        projected: `[2 N - 1, H D]`, from distance N - 1 (query - key) down.
        u, v: `[H, D]`.
    """
    heads, width = u.shape
    tokens = (projected.shape[0] + 1) // 2
    vectors = at_least_float32(projected).flip(0).unflatten(-1, (heads, width)).transpose(0, 1)
    line = lines(Sequence(tokens), device=projected.device)
    met = LineVectors(vectors, None, line, side="query", bias=at_least_float32(v))
    return Terms(QueryBias(at_least_float32(u)), met)


def by_head(x: Tensor, width: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    parts: Tensor = x.unflatten(-1, (-1, width))
    return parts.transpose(1, 2)


class ConformerAttention(Retrofitted):
    """The attention of wav2vec 2.0's Conformer and its copies, served by the attention interface."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """`(output, None)`; calls that are too short, or whose mask is not one number a key, as published."""
        tokens = hidden_states.shape[1]
        relative = args[0] if args else kwargs.get("relative_position_embeddings")
        plain = attention_mask is None or attention_mask.dim() == 2
        missing = self.position_embeddings_type == "relative" and relative is None  # the library has an error for that
        if missing or not (plain and self.takes(tokens, tokens)):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        refuse_recorded_weights()
        module: Any = self
        linears = module.linear_q, module.linear_k, module.linear_v
        q, k, v = (by_head(linear(hidden_states), module.head_size) for linear in linears)
        out = self.attend(
            q,
            k,
            v,
            position=self.terms(tokens, relative),
            mask=mask_of(attention_mask, tokens, tokens),
            scale=module.scaling,
            dropout=module.dropout.p if self.training else 0.0,
        )
        return module.linear_out(out.transpose(1, 2).flatten(2)), None

    def terms(self, tokens: int, relative: Tensor | None) -> Terms:
        """The position of a call of this many tokens."""
        module: Any = self
        return transformer_xl_terms(module.linear_pos(relative)[0], module.pos_bias_u, module.pos_bias_v)


class FastSpeech2Attention(Retrofitted):
    """FastSpeech2's, whose mask is `[B, 1, M]`."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        """`(output, None)`; with attention weights as published."""
        tokens = hidden_states.shape[1]
        plain = attention_mask is None or attention_mask.shape[1:] == (1, tokens)
        one = pos_emb is not None and pos_emb.shape[0] == 1
        if output_attentions or not (plain and one and self.takes(tokens, tokens)):
            return super().forward(hidden_states, attention_mask, pos_emb, output_attentions)
        assert pos_emb is not None
        module: Any = self
        linears = module.linear_q, module.linear_k, module.linear_v
        q, k, v = (by_head(linear(hidden_states), module.head_dim) for linear in linears)
        out = self.attend(
            q,
            k,
            v,
            position=transformer_xl_terms(module.linear_pos(pos_emb)[0], module.pos_bias_u, module.pos_bias_v),
            mask=mask_of(None if attention_mask is None else attention_mask[:, 0].ne(0), tokens, tokens),
            scale=module.dim_key**-0.5,
            dropout=module.dropout.p if self.training else 0.0,
        )
        return module.linear_out(out.transpose(1, 2).flatten(2)), None


class ParakeetAttention(Retrofitted):
    """Parakeet's and Nemotron's."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`; with a cache, a mask of all pairs or recorded weights as published."""
        tokens = hidden_states.shape[1]
        mask = _mask_handed_on(attention_mask, tokens)
        served = attention_mask is None or mask is not None
        if not (served and _alike(self, position_embeddings) and _is_offline(kwargs) and self.takes(tokens, tokens)):
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
    """The mask in a tensor that an encoder of ours handed on; None for any other."""
    if mask is None or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool and mask.shape[2:] == (1, tokens):
        return mask_of(mask[:, 0, 0], tokens, tokens)
    if mask.dtype == torch.int64 and mask.shape[2:] == (tokens, 2):
        return Mask(low=mask[:, 0, :, 0], high=mask[:, 0, :, 1])
    return None


def _alike(module: Any, positions: Tensor) -> bool:
    """Whether the elements of a batch have the same sinusoids. Dropout differs between them."""
    return positions.shape[0] == 1 or not (module.training and module.config.dropout_positions)


def _is_offline(kwargs: dict[str, Any]) -> bool:
    """Whether a call has no cache, and nobody waits for attention weights."""
    return kwargs.get("past_key_values") is None and not weights_are_recorded()


class ParakeetEncoder(Retrofitted):
    """Parakeet's encoder, for its mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward, which hands on a mask of one number a key."""
        return _captured(_encode_parakeet)(self, *args, **kwargs)


@cache
def _captured(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that records hidden states where it is asked to, as the published ones."""
    from transformers.utils.generic import merge_with_config_defaults
    from transformers.utils.output_capturing import capture_outputs

    captured: Callable[..., Any] = merge_with_config_defaults(capture_outputs(forward))  # type: ignore[no-untyped-call]
    return captured


def _file(module: nn.Module) -> Any:
    """The library's file that a module comes from."""
    return sys.modules[type(module).__module__]


def _encode_parakeet(
    self: Any,
    input_features: Tensor,
    attention_mask: Tensor | None = None,
    output_attention_mask: bool = True,
    **kwargs: Any,
) -> Any:
    hidden_states = self.subsampling(input_features, attention_mask) * self.input_scale
    positions = self.encode_positions(hidden_states)
    tokens = hidden_states.shape[1]
    own = self.takes(tokens, tokens) and _alike(self, positions) and _is_offline(kwargs)
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
    """Nemotron's streaming encoder, where a query sees its own chunk and some before it."""

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The published forward, which hands on the first and the last key of each query; with a cache as published."""
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
    positions = self.encode_positions(hidden_states)
    own = self.takes(tokens, tokens) and _alike(self, positions) and _is_offline(kwargs)
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
    """The first and the last key that each query sees, `[1 or B, 1, N, 2]`: whole chunks, padded at the right."""
    size = right + 1
    chunk = torch.arange(tokens, device=device) // size
    before = left // size if left >= 0 else tokens
    low, high = ((chunk - before) * size).clamp(min=0)[None], ((chunk + 1) * size).clamp(max=tokens)[None]
    if valid is not None:
        high = torch.minimum(high, valid.sum(-1, keepdim=True))
    low, high = torch.broadcast_tensors(low, high - 1)
    return torch.stack([low, high], dim=-1)[:, None]


def run_conformer(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """An attention module that is served by the attention interface, on a padded batch."""
    from transformers.masking_utils import create_bidirectional_mask

    tokens, width = draws.tokens, module.linear_q.in_features
    x = draws.normal(draws.batch, tokens, width)
    mask = create_bidirectional_mask(module.config, x, draws.padding(draws.batch, tokens))
    if module.position_embeddings_type != "relative":
        return (module(x, attention_mask=mask)[0],)
    relative = draws.normal(1, 2 * tokens - 1, width)
    return (module(x, attention_mask=mask, relative_position_embeddings=relative)[0],)


def _run_fastspeech2(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    x = draws.normal(draws.batch, draws.tokens, module.hidden_size)
    positions = draws.normal(1, 2 * draws.tokens - 1, module.hidden_size)
    return (module(x, attention_mask=draws.padding(draws.batch, draws.tokens)[:, None], pos_emb=positions)[0],)


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
    seen = chunks[:, 0, :, 1] >= chunks[:, 0, :, 0]  # the others are NaN where the library's softmax has no key
    return (module(x, position_embeddings=positions, attention_mask=mask)[0][seen],)


def other_position(module: Any) -> str | None:
    """Why an attention module of a Conformer has nothing to replace, or None."""
    kind = module.position_embeddings_type
    if kind in ("relative", "relative_key"):
        return None
    return "it has no position" if kind is None else f"its position ({kind}) has no N x N numbers as it is"


def path(architecture: str, name: str) -> str:
    """The full name of a class of transformers."""
    return f"transformers.models.{architecture}.modeling_{architecture}.{name}"


def _not_sdpa(module: Any) -> str | None:
    own = module.config._attn_implementation
    return (
        None if own == "sdpa" else f"attn_implementation={own!r}, whose mask the library turns around; load with sdpa"
    )


_INTERFACE = {
    "wav2vec2_conformer": "Wav2Vec2ConformerSelfAttention",
    "seamless_m4t": "SeamlessM4TConformerSelfAttention",
}
_LOCAL = "it attends within chunks, in O(N) as it is"

KINDS = (
    PositionKind(
        name="Transformer-XL",
        library="transformers",
        switches=True,
        replaced=tuple(
            Replaced(
                architecture,
                path(architecture, name),
                ConformerAttention,
                reads=("forward", "_apply_relative_position_encoding"),
                unfit=other_position,
            )
            for architecture, name in _INTERFACE.items()
        ),
        verified=tuple(
            Verified(path(architecture, name), run_conformer, tables=("pos_bias_u", "pos_bias_v", "linear_pos.weight"))
            for architecture, name in _INTERFACE.items()
        ),
    ),
    PositionKind(
        name="Transformer-XL, masks of its own",
        library="transformers",
        replaced=(
            Replaced(
                "parakeet",
                path("parakeet", "ParakeetEncoderAttention"),
                ParakeetAttention,
                reads=("forward", "_rel_shift", "ParakeetEncoderConvolutionModule"),
            ),
            Replaced("parakeet", path("parakeet", "ParakeetEncoder"), ParakeetEncoder),
            Replaced(
                "nemotron_asr_streaming",
                path("nemotron_asr_streaming", "NemotronAsrStreamingEncoderAttention"),
                ParakeetAttention,
                reads=("forward", "_rel_shift"),
                unfit=_not_sdpa,
            ),
            Replaced(
                "nemotron_asr_streaming",
                path("nemotron_asr_streaming", "NemotronAsrStreamingEncoder"),
                NemotronEncoder,
                reads=("forward", "chunked_limited_mask_function"),
                unfit=_not_sdpa,
            ),
            Replaced(
                "fastspeech2_conformer",
                path("fastspeech2_conformer", "FastSpeech2ConformerAttention"),
                FastSpeech2Attention,
                reads=("forward", "shift_relative_position_tensor"),
            ),
        ),
        verified=(
            Verified(
                path("parakeet", "ParakeetEncoderAttention"),
                _run_parakeet,
                tables=("bias_u", "bias_v", "relative_k_proj.weight"),
                exact=1e-6,  # its eager attention has a softmax in float32
            ),
            Verified(
                path("nemotron_asr_streaming", "NemotronAsrStreamingEncoderAttention"),
                _run_nemotron,
                tables=("bias_u", "bias_v", "relative_k_proj.weight"),
            ),
            Verified(
                path("fastspeech2_conformer", "FastSpeech2ConformerAttention"),
                _run_fastspeech2,
                tables=("pos_bias_u", "pos_bias_v", "linear_pos.weight"),
            ),
        ),
        refused=(
            Refused(
                "xlnet",
                path("xlnet", "XLNetRelativeAttention"),
                "its segments and its masks are N x N numbers that the model makes before any layer",
            ),
            Refused(
                "funnel",
                path("funnel", "FunnelRelMultiheadAttention"),
                "its token types and its class token are N x N numbers that the model makes before any layer",
            ),
            Refused("gemma3n", path("gemma3n", "Gemma3nAudioAttention"), _LOCAL),
            Refused("gemma4", path("gemma4", "Gemma4AudioAttention"), _LOCAL),
        ),
    ),
)
