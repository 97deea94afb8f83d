"""Transformer-XL's positions in Conformers: queries are multiplied with a projected sinusoid of the distance, with
biases u and v.

    score[h, i, j] = scale * ( <q[i] + u[h], k[j]> + <q[i] + v[h], W[h] r(i - j)> )

The models make the sinusoids once, `[1 or B, 2 N - 1, E]`, from distance N - 1 down to -(N - 1). The layers project
them. That stays, with their dropout and any adapters on the projection. Not computed: the products of all queries with
all distances, and their shift.

Masks are one number per key. If the attention interface makes them, it is switched; FastSpeech2 makes its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import LineVectors, QueryBias, Sequence, Terms, at_least_float32, lines


def transformer_xl_terms(projected: Tensor, u: Tensor, v: Tensor) -> Terms:
    """The position terms of projected sinusoids.

    Args:
        projected: `[2 N - 1, H D]`, in descending order from distance N - 1 (query - key).
        u, v: `[H, D]`.
    """
    heads, width = u.shape
    tokens = (projected.shape[0] + 1) // 2
    vectors = at_least_float32(projected).flip(0).unflatten(-1, (heads, width)).transpose(0, 1)
    line = lines(Sequence(tokens), device=projected.device)
    query_vectors = LineVectors(vectors, None, line, side="query", bias=at_least_float32(v))
    return Terms(QueryBias(at_least_float32(u)), query_vectors)


def by_head(x: Tensor, width: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    parts: Tensor = x.unflatten(-1, (-1, width))
    return parts.transpose(1, 2)


class ConformerAttention(Retrofitted):
    """The attention of wav2vec 2.0's Conformer and its copies, served through the attention interface."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """`(output, None)`. As published if the call is too short, the mask is not by key or weights are requested."""
        tokens = hidden_states.shape[1]
        relative = args[0] if args else kwargs.get("relative_position_embeddings")
        plain = attention_mask is None or attention_mask.dim() == 2
        missing = self.position_embeddings_type == "relative" and relative is None  # the library raises for that
        if missing or not (plain and self.takes(tokens, tokens)):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
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
        """The position terms of a call with this many tokens."""
        module: Any = self
        return transformer_xl_terms(module.linear_pos(relative)[0], module.pos_bias_u, module.pos_bias_v)


class FastSpeech2Attention(Retrofitted):
    """FastSpeech2's attention, whose mask is `[B, 1, M]`."""

    border = 1024
    training_border = 1024

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> Any:
        """`(output, None)`. As published with attention weights."""
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


def run_conformer(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run an attention module that uses the attention interface on a padded batch."""
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


def other_position(module: Any) -> str | None:
    """Why an attention module of a Conformer has nothing to replace, or None."""
    kind = module.position_embeddings_type
    if kind in ("relative", "relative_key"):
        return None
    return "it has no position" if kind is None else f"its position ({kind}) already has no N x N numbers"


_INTERFACE = {
    "wav2vec2_conformer": "Wav2Vec2ConformerSelfAttention",
    "seamless_m4t": "SeamlessM4TConformerSelfAttention",
}
_LOCAL = "it attends within chunks, already in O(N)"

KINDS = (
    PositionKind(
        name="Transformer-XL",
        library="transformers",
        switches=True,
        replaced=tuple(
            Replaced(
                architecture,
                name,
                ConformerAttention,
                reads=("forward", "_apply_relative_position_encoding"),
                unfit=other_position,
            )
            for architecture, name in _INTERFACE.items()
        ),
        verified=tuple(
            Verified(
                class_path(architecture, name), run_conformer, tables=("pos_bias_u", "pos_bias_v", "linear_pos.weight")
            )
            for architecture, name in _INTERFACE.items()
        ),
    ),
    PositionKind(
        name="Transformer-XL, masks of its own",
        library="transformers",
        replaced=(
            Replaced(
                "fastspeech2_conformer",
                "FastSpeech2ConformerAttention",
                FastSpeech2Attention,
                reads=("forward", "shift_relative_position_tensor"),
            ),
        ),
        verified=(
            Verified(
                class_path("fastspeech2_conformer", "FastSpeech2ConformerAttention"),
                _run_fastspeech2,
                tables=("pos_bias_u", "pos_bias_v", "linear_pos.weight"),
            ),
        ),
        refused=(
            Refused(
                "xlnet",
                "XLNetRelativeAttention",
                "its segments and its masks are N x N numbers that the model computes before its layers",
            ),
            Refused(
                "funnel",
                "FunnelRelMultiheadAttention",
                "its token types and its class token are N x N numbers that the model computes before its layers",
            ),
            Refused("gemma3n", "Gemma3nAudioAttention", _LOCAL),
            Refused("gemma4", "Gemma4AudioAttention", _LOCAL),
        ),
    ),
)
