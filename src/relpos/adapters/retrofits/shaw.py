"""Shaw's positions: queries are multiplied with a learned vector of the clipped distance; VITS also adds vectors to
values.

    score[h, i, j] = scale * <q[i], k[j] + a[clip(i - j)]>
    output[h, i]   = sum over j of p[i, j] * (v[j] + b[i - j])

The libraries look up the vectors of all pairs, N x M x D numbers, or skew the products; here queries are multiplied
with each vector once. The order of the tables:

    wav2vec2_bert, seamless_m4t_v2    key - query, from -left to right
    speecht5                          query - key, from -max to max - 1
    vits                              key - query, from -window to window; farther pairs have no vector

Masks are one number per key. The encoders of SpeechT5 and VITS are replaced too, and pass on `[B, 1, 1, M]` of bool.
SpeechT5's layers get the table, `[2 max, D]`, in place of the vectors of all pairs, `[N, N, D]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import MASKS, mask_of
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, rows_of
from relpos.adapters.retrofits.transformer_xl import ConformerAttention, by_head, other_position, run_conformer
from relpos.core import LineVectors, Sequence, Terms, at_least_float32, lines


def shaw_terms(
    table: Tensor, tokens: int, low: int, high: int, *, turned: bool = False, values: Tensor | None = None
) -> Terms:
    """The position terms of vectors of the clipped distance query - key.

    Args:
        table: `[R, D]`; row 0 belongs to `low`, or to `high` if `turned`.
        tokens: N, queries and keys.
        low, high: the range that distances are clipped to.
        turned: whether the table counts key - query.
        values: `[R, D]`, vectors added to the values. Pairs beyond `low` and `high` then have no vectors.
    """
    line = lines(Sequence(tokens), device=table.device)
    if low < 1 - tokens and high > tokens - 1:  # no pair is that far; other rows are not needed
        first = high - tokens + 1 if turned else 1 - tokens - low
        table = table[first : first + 2 * tokens - 1]
        values = None if values is None else values[first : first + 2 * tokens - 1]
        low, high = 1 - tokens, tokens - 1
    offset = torch.arange(1 - tokens, tokens, device=table.device)
    near = offset.clamp(low, high)
    rows = high - near if turned else near - low
    if values is not None:
        rows = torch.where(near == offset, rows, -1)
    terms = Terms(LineVectors(at_least_float32(table)[None], rows, line, side="query"))
    if values is None:
        return terms
    return terms + LineVectors(at_least_float32(values)[None], rows, line, side="value")


class ConformerShawAttention(ConformerAttention):
    """Conformers with "relative_key", or with Transformer-XL's "relative" if the class has both."""

    def terms(self, tokens: int, relative: Tensor | None) -> Terms:
        """The position terms of a call with this many tokens."""
        module: Any = self
        if module.position_embeddings_type != "relative_key":
            return super().terms(tokens, relative)
        left, right = module.left_max_position_embeddings, module.right_max_position_embeddings
        return shaw_terms(rows_of(module.distance_embedding), tokens, -right, left, turned=True)


class SeamlessEncoder(Retrofitted):
    """SeamlessM4T v2's encoder, replaced for its mask: by default one chunk holds all tokens and needs no mask."""

    def _apply_chunk_attention(self, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
        tokens = hidden_states.shape[1]
        by_token = attention_mask is None or attention_mask.dim() == 2
        whole = by_token and tokens <= self.config.speech_encoder_chunk_size
        if whole and self.takes(tokens, tokens):
            return attention_mask
        published: Tensor = super()._apply_chunk_attention(attention_mask, hidden_states)  # type: ignore[misc]
        return published


class SpeechT5Positions(Retrofitted):
    """The module that makes SpeechT5's vectors, once for all layers."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The table, `[2 max, D]`, in place of `[N, N, D]`."""
        tokens = hidden_states.shape[1]
        if not self.takes(tokens, tokens):
            published: Tensor = super().forward(hidden_states)
            return published
        return rows_of(self.pe_k)


class MaskedByKeys(Retrofitted):
    """An encoder that passes on a mask of one number per key, `[B, 1, 1, M]` of bool."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        tokens, mask = hidden_states.shape[1], kwargs.get("attention_mask")
        weights_wanted = kwargs.get("output_attentions")
        weights_wanted = self.config.output_attentions if weights_wanted is None else weights_wanted
        named = self.config._attn_implementation is not None  # a VITS encoder built alone: the library drops masks
        if (
            mask is not None
            and mask.shape == hidden_states.shape[:2]
            and named
            and not args
            and not weights_wanted
            and self.takes(tokens, tokens)
        ):
            kwargs["attention_mask"] = mask[:, None, None].bool()
        elif mask is not None and _by_key(mask, tokens):
            kwargs["attention_mask"] = mask.to(hidden_states.dtype)  # the caller's, which layers add
        return super().forward(hidden_states, *args, **kwargs)


class VitsEncoder(MaskedByKeys):
    """VITS's text encoder, with the borders of its layers."""

    border = 1024
    training_border = 1024


def _by_key(mask: Tensor | None, tokens: int) -> bool:
    """Whether a mask comes from `MaskedByKeys`."""
    return mask is not None and mask.dtype == torch.bool and mask.shape[1:] == (1, 1, tokens)


def _dense_mask(mask: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """A mask by key as the libraries add it to scores, `[B, 1, N, M]`."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask.expand(-1, -1, tokens, -1), zero, torch.finfo(dtype).min)


class SpeechT5Attention(Retrofitted):
    """The attention of SpeechT5's encoder."""

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        """`(output, None)`. As published with attention weights, a cache or vectors of all pairs."""
        module: Any = self
        tokens = hidden_states.shape[1]
        by_key, table = _by_key(attention_mask, tokens), position_bias is not None and position_bias.dim() == 2
        alone = key_value_states is None and past_key_values is None and not output_attentions
        served = alone and table and (attention_mask is None or by_key) and self.takes(tokens, tokens)
        if not served:
            if by_key:
                assert attention_mask is not None
                attention_mask = _dense_mask(attention_mask, tokens, hidden_states.dtype)
            if table:
                assert position_bias is not None
                position_bias = _of_all_pairs(position_bias, tokens)
            return super().forward(
                hidden_states, key_value_states, past_key_values, attention_mask, position_bias, output_attentions
            )
        assert position_bias is not None
        longest = position_bias.shape[0] // 2
        linears = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (by_head(linear(hidden_states), module.head_dim) for linear in linears)
        out = self.attend(
            q,
            k,
            v,
            position=shaw_terms(position_bias, tokens, -longest, longest - 1),
            mask=mask_of(None if attention_mask is None else attention_mask[:, 0, 0], tokens, tokens),
            scale=module.scaling,
            dropout=module.dropout if self.training else 0.0,
        )
        return module.out_proj(out.transpose(1, 2).flatten(2)), None


def _of_all_pairs(table: Tensor, tokens: int) -> Tensor:
    """The vectors of all pairs, `[N, N, D]`, as in SpeechT5."""
    order, longest = torch.arange(tokens, device=table.device), table.shape[0] // 2
    return table[(order[:, None] - order).clamp(-longest, longest - 1) + longest]


class VitsAttention(Retrofitted):
    """The attention of VITS's text encoder."""

    border = 1024
    training_border = 1024

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        """`(output, None)`. As published with attention weights or a mask of all pairs."""
        module: Any = self
        tokens = hidden_states.shape[1]
        by_key = _by_key(attention_mask, tokens)
        if output_attentions or not (attention_mask is None or by_key) or not self.takes(tokens, tokens):
            if by_key:
                assert attention_mask is not None
                attention_mask = _dense_mask(attention_mask, tokens, hidden_states.dtype)
            return super().forward(hidden_states, key_value_states, attention_mask, output_attentions)
        reach = module.window_size
        linears = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (by_head(linear(hidden_states), module.head_dim) for linear in linears)
        out = self.attend(
            q,
            k,
            v,
            position=shaw_terms(module.emb_rel_k[0], tokens, -reach, reach, turned=True, values=module.emb_rel_v[0]),
            mask=mask_of(None if attention_mask is None else attention_mask[:, 0, 0], tokens, tokens),
            scale=module.scaling,
            dropout=module.dropout if self.training else 0.0,
        )
        return module.out_proj(out.transpose(1, 2).flatten(2)), None


def _run_speecht5(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    tokens = draws.tokens
    x = draws.normal(draws.batch, tokens, module.embed_dim)
    table = draws.normal(16, module.head_dim)  # shorter than the sequence
    position = table if is_swapped(module) else _of_all_pairs(table, tokens)
    return (module(x, attention_mask=_keys(module, draws), position_bias=position)[0],)


def _run_vits(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    x = draws.normal(draws.batch, draws.tokens, module.embed_dim)
    return (module(x, attention_mask=_keys(module, draws))[0],)


def _keys(module: Any, draws: RandomInputs) -> Tensor:
    mask = draws.padding(draws.batch, draws.tokens).bool()[:, None, None]
    return mask if is_swapped(module) else _dense_mask(mask, draws.tokens, draws.dtype)


def _run_speecht5_encoder(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    return _encoded(module, draws, draws.normal(draws.batch, draws.tokens, module.config.hidden_size))


def _run_vits_encoder(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    x = draws.normal(draws.batch, draws.tokens, module.config.hidden_size)
    return _encoded(module, draws, x, padding_mask=draws.padding(draws.batch, draws.tokens)[..., None])


def _run_seamless_encoder(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    config = module.config  # on a copy
    if config.speech_encoder_chunk_size is not None:
        config.speech_encoder_chunk_size = max(config.speech_encoder_chunk_size, draws.tokens)
    x = draws.normal(draws.batch, draws.tokens, config.hidden_size)
    padding = draws.padding(draws.batch, draws.tokens)
    return (module(x, attention_mask=padding)[padding.bool()],)


def _encoded(module: Any, draws: RandomInputs, x: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """The real tokens of an encoder with its first layer, on a padded batch."""
    padding = draws.padding(draws.batch, draws.tokens)
    return (module(x, attention_mask=padding, **more)[0][padding.bool()],)


def _no_window(module: Any) -> str | None:
    return None if _window(module) else "it has no position (window_size)"


def _window(module: Any) -> Any:
    """`window_size` of an attention module, or of an encoder of them."""
    return module.config.window_size if hasattr(module, "layers") else module.window_size


def _not_relative_key(module: Any) -> str | None:
    """Why a module of SeamlessM4T v2, which has only Shaw's position, has nothing to replace."""
    kind = module.config.position_embeddings_type if hasattr(module, "layers") else module.position_embeddings_type
    return None if kind == "relative_key" else "it has no position"


def _in_decoder(module: Any) -> str | None:
    return "it has no position: a decoder's" if module.is_decoder else None


_INTERFACE = {
    "wav2vec2_bert": "Wav2Vec2BertSelfAttention",
    "seamless_m4t_v2": "SeamlessM4Tv2ConformerSelfAttention",
}

KINDS = (
    PositionKind(
        name="Shaw",
        library="transformers",
        switches=True,
        replaced=(
            Replaced(
                "wav2vec2_bert",
                "Wav2Vec2BertSelfAttention",
                ConformerShawAttention,
                reads=("forward", "_apply_relative_position_encoding", "_apply_relative_key_position_encoding"),
                unfit=other_position,
            ),
            Replaced(
                "seamless_m4t_v2",
                "SeamlessM4Tv2ConformerSelfAttention",
                ConformerShawAttention,
                unfit=_not_relative_key,
            ),
        ),
        verified=tuple(
            Verified(
                class_path(architecture, name),
                run_conformer,
                tables=("distance_embedding.weight", "pos_bias_u", "pos_bias_v", "linear_pos.weight"),
            )
            for architecture, name in _INTERFACE.items()
        ),
    ),
    PositionKind(
        name="Shaw, masks of its own",
        library="transformers",
        replaced=(
            Replaced(
                "seamless_m4t_v2",
                "SeamlessM4Tv2ConformerEncoder",
                SeamlessEncoder,
                reads=("forward", "_apply_chunk_attention"),
                unfit=_not_relative_key,
            ),
            Replaced("speecht5", "SpeechT5RelativePositionalEncoding", SpeechT5Positions),
            Replaced("speecht5", "SpeechT5Attention", SpeechT5Attention, unfit=_in_decoder),
            Replaced("speecht5", "SpeechT5Encoder", MaskedByKeys, ("forward", *MASKS)),
            Replaced(
                "vits",
                "VitsAttention",
                VitsAttention,
                reads=(
                    "forward",
                    "_get_relative_embeddings",
                    "_relative_position_to_absolute_position",
                    "_absolute_position_to_relative_position",
                ),
                unfit=_no_window,
            ),
            Replaced("vits", "VitsEncoder", VitsEncoder, ("forward", *MASKS), unfit=_no_window),
        ),
        verified=(
            Verified(
                class_path("seamless_m4t_v2", "SeamlessM4Tv2ConformerEncoder"),
                _run_seamless_encoder,
                tables=("distance_embedding.weight",),
                first=("layers",),
            ),
            Verified(class_path("speecht5", "SpeechT5Attention"), _run_speecht5, tables=()),
            Verified(
                class_path("speecht5", "SpeechT5Encoder"),
                _run_speecht5_encoder,
                tables=("pe_k.weight",),
                first=("layers",),
            ),
            Verified(class_path("vits", "VitsAttention"), _run_vits, tables=("emb_rel_k", "emb_rel_v")),
            Verified(
                class_path("vits", "VitsEncoder"),
                _run_vits_encoder,
                tables=("emb_rel_k", "emb_rel_v"),
                first=("layers",),
            ),
        ),
        refused=(
            Refused(
                "esmfold2",
                "EsmFold2RelativePositionEncoding",
                "its vectors are an input of the pair representation, not of attention",
            ),
        ),
    ),
)
