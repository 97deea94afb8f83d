"""ESPnet: Transformer-XL's positions in its Conformers, E-Branchformers and transducers.

    RelPositionMultiHeadedAttention    distances from T - 1 down to -(T - 1), as in `transformer_xl`
        zero_triu                      no position where the key is later
        simplified_attention_score     one number per head and distance instead of vectors (transducers)
    LegacyRelPositionMultiHeadedAttention

The legacy class has vectors P[0], ..., P[T - 1] for distances T - 1 down to 0 alone. Its shift reads on into the next
row, so that a later key meets the *next* query and a vector of an earlier distance:

    position[i, j] = <q[i] + v, P[T - 1 - (i - j)]>        j <= i
                     0                                     j == i + 1
                     <q[i + 1] + v, P[j - i - 2]>          j >= i + 2

With a vector of zeros at the distances that a term lacks, these are two terms on distances; the second multiplies with
the next query instead of its own. Nothing of it depends on the mask.

ESPnet reads attention weights from `attn` in a forward hook: a module with one runs as published.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.common.pair_masks import mask_of_pairs
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.adapters.retrofits.transformer_xl import transformer_xl_terms
from relpos.core import LineBias, LineVectors, Mask, Sequence, Terms, at_least_float32, lines


class OfDistances(Retrofitted):
    """What the classes share."""

    border = 1024
    training_border = 1024

    def serves(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor) -> bool:
        """Whether relpos may compute a call."""
        tokens = query.shape[1]
        alike = key.shape[1] == value.shape[1] == tokens and pos_emb.shape[:2] == (1, self.distances(tokens))
        return alike and not self._forward_hooks and self.takes(tokens, tokens)

    def distances(self, tokens: int) -> int:
        """The number of position embeddings of a call."""
        return 2 * tokens - 1

    def attended(self, q: Tensor, k: Tensor, v: Tensor, position: Terms, mask: Mask | None) -> Tensor:
        """Attention and the output projection, `[B, T, E]`."""
        drop: float = self.dropout.p if self.training else 0.0
        out = self.attend(q, k, v, position=position, mask=mask, scale=self.d_k**-0.5, dropout=drop)
        self.attn = None  # the weights of an earlier call would be those of other inputs
        merged: Tensor = self.linear_out(out.transpose(1, 2).flatten(2))
        return merged


class ESPnetAttention(OfDistances):
    """`RelPositionMultiHeadedAttention`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None) -> Any:
        """`[B, T, E]`. As published with a forward hook, other numbers of keys, or a mask that is not of intervals."""
        tokens = query.shape[1]
        found = None
        served = self.serves(query, key, value, pos_emb)
        if served and mask is not None:
            found = mask_of_pairs(mask.eq(0) if mask.dtype != torch.bool else ~mask, tokens)
        if not served or (mask is not None and found is None):
            return super().forward(query, key, value, pos_emb, mask)
        q, k, v = self.forward_qkv(query, key, value)
        return self.attended(q, k, v, self.position(pos_emb, q), found)

    def position(self, pos_emb: Tensor, q: Tensor) -> Terms:
        """The position terms."""
        projected, tokens = self.linear_pos(pos_emb)[0], q.shape[2]
        if self.zero_triu:
            projected = torch.cat((projected[:tokens], torch.zeros_like(projected[tokens:])))
        return transformer_xl_terms(projected, self.pos_bias_u, self.pos_bias_v)


class LegacyESPnetAttention(ESPnetAttention):
    """`LegacyRelPositionMultiHeadedAttention`."""

    def distances(self, tokens: int) -> int:
        """The number of position embeddings of a call."""
        return tokens

    def position(self, pos_emb: Tensor, q: Tensor) -> Terms:
        """The position terms."""
        projected, tokens = self.linear_pos(pos_emb)[0], q.shape[2]
        later = projected.new_zeros(tokens - 1, projected.shape[1])
        own = transformer_xl_terms(torch.cat((projected, later)), self.pos_bias_u, self.pos_bias_v)
        if self.zero_triu or tokens < 3:
            return own
        vectors = at_least_float32(projected).unflatten(-1, self.pos_bias_v.shape).transpose(0, 1)[:, : tokens - 2]
        following = at_least_float32(q[:, :, 1:]) + at_least_float32(self.pos_bias_v)[:, None]
        following = torch.nn.functional.pad(following, (0, 0, 0, 1))  # the last query has no such keys
        line = lines(Sequence(tokens), device=q.device)
        return own + LineVectors(vectors.flip(1), None, line, side="query", content=following)


class TransducerAttention(OfDistances):
    """`RelPositionMultiHeadedAttention` of transducers: masks are True where a frame is hidden."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_enc: Tensor,
        mask: Tensor,
        chunk_mask: Tensor | None = None,
        left_context: int = 0,
    ) -> Any:
        """`[B, T, E]`. As published in streaming, too."""
        tokens = query.shape[1]
        found = None
        if left_context == 0 and self.serves(query, key, value, pos_enc):
            hidden = mask[:, None]
            found = mask_of_pairs(hidden if chunk_mask is None else chunk_mask[None] | hidden, tokens)
        if found is None:
            return super().forward(query, key, value, pos_enc, mask, chunk_mask, left_context)
        q, k, v = self.forward_qkv(query, key, value)
        return self.attended(q, k, v, self.position(pos_enc, q), found)

    def position(self, pos_enc: Tensor, q: Tensor) -> Terms:
        """The position terms."""
        projected = self.linear_pos(pos_enc)[0]
        if hasattr(self, "pos_bias_u"):
            return transformer_xl_terms(projected, self.pos_bias_u, self.pos_bias_v)
        values = at_least_float32(projected).T.flip(-1) * self.d_k**-0.5
        return Terms(LineBias(values, lines(Sequence(q.shape[2]), device=values.device)))


def _masks(draws: RandomInputs) -> tuple[Tensor, Tensor]:
    """Real frames, `[B, T]`, and pairs, `[B, T, T]`: real keys no later than two frames after a query."""
    real = draws.padding(draws.batch, draws.tokens).bool()
    near = torch.ones(draws.tokens, draws.tokens, dtype=torch.bool, device=real.device).tril(2)
    return real, near & real[:, None]


def _run(module: Any, draws: RandomInputs, distances: int | None = None) -> tuple[Tensor, ...]:
    width = module.linear_q.in_features
    x = draws.normal(draws.batch, draws.tokens, width)
    pos_emb = draws.normal(1, 2 * draws.tokens - 1 if distances is None else distances, width)
    real, pairs = _masks(draws)
    return module(x, x, x, pos_emb, real[:, None]), module(x, x, x, pos_emb, pairs)


def _run_legacy(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    return _run(module, draws, draws.tokens)


def _run_transducer(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    width = module.linear_q.in_features
    x, pos_enc = draws.normal(draws.batch, draws.tokens, width), draws.normal(1, 2 * draws.tokens - 1, width)
    real, pairs = _masks(draws)
    later = ~pairs[0]
    return module(x, x, x, pos_enc, ~real), module(x, x, x, pos_enc, ~real, chunk_mask=later)


_FILE = "espnet.nets.pytorch_backend.transformer.attention."
_TRANSDUCER = "espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention"
_READS = ("forward", "forward_qkv", "forward_attention", "rel_shift")
_TABLES = ("pos_bias_u", "pos_bias_v", "linear_pos.weight")

KINDS = (
    PositionKind(
        name="Transformer-XL",
        library="espnet",
        replaced=(
            Replaced("espnet", _FILE + "RelPositionMultiHeadedAttention", ESPnetAttention, _READS),
            Replaced("espnet legacy", _FILE + "LegacyRelPositionMultiHeadedAttention", LegacyESPnetAttention, _READS),
            Replaced(
                "espnet transducer",
                _TRANSDUCER,
                TransducerAttention,
                (*_READS, "compute_attention_score", "compute_simplified_attention_score"),
            ),
        ),
        verified=(
            Verified(_FILE + "RelPositionMultiHeadedAttention", _run, _TABLES),
            Verified(_FILE + "LegacyRelPositionMultiHeadedAttention", _run_legacy, _TABLES),
            Verified(_TRANSDUCER, _run_transducer, _TABLES),
        ),
    ),
    PositionKind(
        name="Transformer-XL",
        library="fairseq2",
        replaced=(),
        verified=(),
        refused=(
            Refused(
                "fairseq2",
                "fairseq2.models.transformer.sdpa.relative.RelativePositionSDPA",
                "fairseq2 0.8.1 needs PyTorch 2.9.1, which relpos does not support",
            ),
        ),
    ),
)
