"""DeBERTa's disentangled attention, in DeBERTa and SEW-D: queries and keys are multiplied with vectors of the distance.

    score[h, i, j] = (<q[i], k[j]> + <q[i], K[h] p[b]> + <k[j], Q[h] p[b]>) * scale,  b = bucket(i - j) + span

The published encoder makes an N x N mask and N x N relative positions once, and passes both to its layers. Here it
passes

    mask                [B, 1, 1, N], one number per token
    relative position   [2 N - 1], one number per offset i - j, from 1 - N on

A layer that receives these attends with relpos. Anything else is dense and runs as published. A call that asks for
attention weights also runs as published; the layer expands both tensors first. A padded query attends to the real
tokens; in the published model it weights all tokens equally.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import LineVectors, Sequence, Terms, lines


class DisentangledEncoder(Retrofitted):
    """`DebertaV2Encoder` and similar encoders: what they pass to their layers."""

    border = 640
    training_border = 1024

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask in the form the layers take."""
        tokens = attention_mask.shape[-1]
        if attention_mask.dim() == 2 and self.takes(tokens, tokens):
            return attention_mask[:, None, None]
        published: Tensor = super().get_attention_mask(attention_mask)  # type: ignore[misc]
        # a caller's mask must not look like ours
        return published.expand(-1, -1, tokens, -1) if _is_by_token(published) else published

    def get_rel_pos(self, hidden_states: Any, query_states: Any = None, relative_pos: Any = None) -> Any:
        """The relative position of each offset, `[2 N - 1]`."""
        given = query_states is not None or relative_pos is not None or not isinstance(hidden_states, Tensor)
        if given or not self.takes(hidden_states.shape[-2], hidden_states.shape[-2]):
            return super().get_rel_pos(hidden_states, query_states, relative_pos)  # type: ignore[misc]
        return _by_offset(self, hidden_states.shape[-2], hidden_states.device)


class DisentangledAttention(Retrofitted):
    """`DisentangledSelfAttention` of DeBERTa-v2 and SEW-D."""

    border = DisentangledEncoder.border
    training_border = DisentangledEncoder.training_border

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: Any = False,
        query_states: Any = None,
        relative_pos: Any = None,
        rel_embeddings: Any = None,
    ) -> Any:
        """The published forward, or relpos if the encoder passed its tensors in relpos's form."""
        if output_attentions or query_states is not None or not _is_for_relpos(attention_mask, relative_pos):
            return super().forward(
                hidden_states,
                _dense_mask(attention_mask),
                output_attentions,
                query_states=query_states,
                relative_pos=_dense(relative_pos),
                rel_embeddings=rel_embeddings,
            )
        return self.attended(hidden_states, attention_mask, relative_pos, rel_embeddings), None

    def attended(self, hidden_states: Tensor, mask: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
        """The output of the layer, `[B, N, E]`."""
        q, k, v = self.projected(hidden_states)
        rows = (offsets + self.span()).clamp(0, 2 * self.span() - 1)
        tokens, device = q.shape[2], q.device
        line = self.cached(tokens, device, lambda: lines(Sequence(tokens), device=device), 2 * tokens)
        table = self.pos_dropout(table)[: 2 * self.span()]
        met_by = {"query": self.position_of_keys(table), "key": self.position_of_queries(table)}
        parts = [
            LineVectors(x, rows, line, side=side)  # type: ignore[arg-type]
            for side, x in met_by.items()
            if x is not None
        ]
        out = self.attend(
            q,
            k,
            v,
            position=Terms(*parts),
            mask=mask_of(mask[:, 0, 0], q.shape[2], k.shape[2]),
            scale=_scale(q.shape[-1], self.products()),
            dropout=_probability(self.dropout) if self.training else 0.0,
        )
        return out.transpose(1, 2).flatten(2)

    def by_head(self, x: Tensor) -> Tensor:
        """`[..., N, H D]` as `[..., H, N, D]`."""
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(-3, -2)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[B, H, N, D]`."""
        q, k, v = self.query_proj(x), self.key_proj(x), self.value_proj(x)
        return self.by_head(q), self.by_head(k), self.by_head(v)

    def position_of_keys(self, table: Tensor) -> Tensor | None:
        """The vectors that queries are multiplied with, `[H, 2 span, D]`."""
        if "c2p" not in self.pos_att_type:
            return None
        projection = self.key_proj if self.share_att_key else self.pos_key_proj
        return self.by_head(projection(table))

    def position_of_queries(self, table: Tensor) -> Tensor | None:
        """The vectors that keys are multiplied with, `[H, 2 span, D]`."""
        if "p2c" not in self.pos_att_type:
            return None
        projection = self.query_proj if self.share_att_key else self.pos_query_proj
        return self.by_head(projection(table))

    def span(self) -> int:
        """Half the rows of the table."""
        return int(self.pos_ebd_size)

    def products(self) -> int:
        """How many products are summed in the score."""
        return 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))


class FirstDisentangledAttention(DisentangledAttention):
    """`DisentangledSelfAttention` of the first DeBERTa: one joint projection, separate biases, and no buckets."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.by_head(self.in_proj(x)).chunk(3, dim=-1)
        q_bias, v_bias = (self.by_head(x[None]) for x in (self.q_bias, self.v_bias))
        return q + q_bias, k, v + v_bias

    def position_of_keys(self, table: Tensor) -> Tensor | None:
        return self.by_head(self.pos_proj(table)) if "c2p" in self.pos_att_type else None

    def position_of_queries(self, table: Tensor) -> Tensor | None:
        return self.by_head(self.pos_q_proj(table)) if "p2c" in self.pos_att_type else None

    def span(self) -> int:
        return int(self.max_relative_positions)

    def products(self) -> int:
        return 1 + len(self.pos_att_type)


class SpeechDisentangledAttention(DisentangledAttention):
    """`DisentangledSelfAttention` of SEW-D, which takes other arguments."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        query_states: Any = None,
        relative_pos: Any = None,
        rel_embeddings: Any = None,
        **more: Any,
    ) -> Any:
        """The published forward, or relpos if the encoder passed its tensors in relpos's form."""
        if query_states is not None or not _is_for_relpos(attention_mask, relative_pos):
            return super(DisentangledAttention, self).forward(
                hidden_states,
                _dense_mask(attention_mask),
                query_states=query_states,
                relative_pos=_dense(relative_pos),
                rel_embeddings=rel_embeddings,
                **more,
            )
        return self.attended(hidden_states, attention_mask, relative_pos, rel_embeddings), None


def _is_for_relpos(mask: Tensor, relative_pos: Any) -> bool:
    """Whether the encoder passed one number per token as mask and one per offset as positions."""
    return _is_by_token(mask) and isinstance(relative_pos, Tensor) and relative_pos.dim() == 1


def _is_by_token(mask: Tensor) -> bool:
    return mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1


def _dense_mask(mask: Tensor) -> Tensor:
    """The mask as the published layer takes it, `[B, 1, N, N]`."""
    return mask.mT * mask if _is_by_token(mask) else mask


def _dense(relative_pos: Any) -> Any:
    """Relative positions as the published layer takes them, `[1, N, N]`."""
    if not isinstance(relative_pos, Tensor) or relative_pos.dim() != 1:
        return relative_pos
    order = torch.arange((relative_pos.shape[0] + 1) // 2, device=relative_pos.device)
    return relative_pos[order[:, None] - order + len(order) - 1][None]


def _by_offset(module: Any, tokens: int, device: torch.device) -> Tensor:
    """`[2 N - 1]`, the relative position of offsets from 1 - N on, from the library's own buckets."""
    offsets = torch.arange(1 - tokens, tokens, device=device)
    buckets = getattr(module, "position_buckets", -1)
    if buckets <= 0:
        return offsets
    made: Tensor = sys.modules[type(module).__module__].make_log_bucket_position(
        offsets, buckets, module.max_relative_positions
    )
    return made.long()


def _scale(width: int, products: int) -> float:
    """1 / sqrt(D * products), the root rounded to float32 as published."""
    return 1.0 / float(torch.tensor(float(width * products), dtype=torch.float32).sqrt())


def _probability(dropout: Any) -> float:
    return float(dropout.drop_prob if hasattr(dropout, "drop_prob") else dropout.p)


def _unfit(module: Any) -> str | None:
    """Why an attention module, or an encoder of such modules, cannot be served."""
    if not module.relative_attention:
        return "relative_attention=False: it has no relative position"
    attention = module.layer[0].attention.self if hasattr(module, "layer") else module
    if getattr(attention, "talking_head", False):
        return "its talking heads mix the scores of all heads, N x N"
    if not {"c2p", "p2c"} & set(attention.pos_att_type):
        return "pos_att_type has neither c2p nor p2c: it has no relative position"
    return None


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the encoder with its first layer on padded tokens."""
    padding = draws.padding(draws.batch, draws.tokens)
    x = draws.normal(draws.batch, draws.tokens, module.rel_embeddings.weight.shape[1])
    out: Tensor = module(x, padding)[0]
    return (out[padding.bool()],)


_ARCHITECTURES: tuple[tuple[str, str, type[Retrofitted], tuple[str, ...]], ...] = (
    ("deberta", "DebertaEncoder", FirstDisentangledAttention, ("disentangled_att_bias", "build_relative_position")),
    (
        "deberta_v2",
        "DebertaV2Encoder",
        DisentangledAttention,
        ("disentangled_attention_bias", "build_relative_position", "make_log_bucket_position"),
    ),
    (
        "sew_d",
        "SEWDTransformerEncoder",
        SpeechDisentangledAttention,
        ("disentangled_attention_bias", "build_relative_position", "make_log_bucket_position"),
    ),
)

KINDS = (
    PositionKind(
        name="disentangled",
        library="transformers",
        replaced=tuple(
            one
            for architecture, encoder, mixin, reads in _ARCHITECTURES
            for one in (
                Replaced(
                    architecture,
                    encoder,
                    DisentangledEncoder,
                    reads=("forward", "get_attention_mask", "get_rel_pos"),
                    unfit=_unfit,
                ),
                Replaced(architecture, "DisentangledSelfAttention", mixin, reads=("forward", *reads), unfit=_unfit),
            )
        ),
        verified=tuple(
            Verified(class_path(architecture, encoder), _run, tables=("rel_embeddings.weight",), first=("layer",))
            for architecture, encoder, *_ in _ARCHITECTURES
        ),
        refused=(
            Refused(
                "bros",
                "BrosSelfAttention",
                "queries are multiplied with N x N x D vectors, one per pair of boxes, which the model computes",
            ),
            Refused(
                "cpmant",
                "CpmAntSegmentPositionEmbedding",
                "its bias is by distance within a segment, and by the pair of segments across segments",
            ),
        ),
    ),
)
