"""Granite Speech: Shaw's vectors within blocks of `context_size` tokens, offsets query - key.

    score[h, i, j] = scale * <q[i], k[j] + a[i - j]>     i and j in one block

Blocks form a batch, as published. The last block is padded, and its padding is masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, rows_of
from relpos.adapters.retrofits.shaw import shaw_terms
from relpos.adapters.retrofits.transformer_xl import by_head


class GraniteAttention(Retrofitted):
    """Granite Speech's attention within blocks. Its blocks of 200 tokens are faster as published."""

    border = 512
    training_border = 512

    def forward(self, hidden_states: Tensor, attention_dists: Tensor) -> Tensor:
        """The output, `[B, N, E]`."""
        module: Any = self
        size, tokens = module.context_size, hidden_states.shape[1]
        if not self.takes(size, size):
            published: Tensor = super().forward(hidden_states, attention_dists)
            return published
        hidden_states = module.pre_norm(hidden_states)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, -tokens % size))
        key, value = module.to_kv(padded).chunk(2, dim=-1)
        q, k, v = (_blocks(x, size, module.dim_head) for x in (module.to_q(padded), key, value))
        valid = None if padded is hidden_states else _filled(padded, tokens, size)
        longest = module.max_pos_emb
        out = self.attend(
            q,
            k,
            v,
            position=shaw_terms(rows_of(module.rel_pos_emb), size, -longest, longest),
            mask=mask_of(valid, size, size),
            scale=module.scale,
        )
        out = out.transpose(1, 2).flatten(2).reshape(*padded.shape[:2], -1)
        done: Tensor = module.dropout(module.to_out(out[:, :tokens]))
        return done


class Granite5Attention(Retrofitted):
    """Granite Speech 5's attention, which takes a mask of tokens. Its blocks of 128 are faster as published."""

    border = 512
    training_border = 512

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """`(output, None)`."""
        module: Any = self
        size, tokens = module.context_size, hidden_states.shape[1]
        by_token = attention_mask is None or attention_mask.dim() == 2
        if not (by_token and self.takes(size, size)):
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, -tokens % size))
        linears = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (_blocks(linear(padded), size, module.head_dim) for linear in linears)
        valid = None if tokens % size == 0 else _filled(padded, tokens, size)
        if attention_mask is not None:
            real = torch.nn.functional.pad(attention_mask.bool(), (0, -tokens % size), value=False)
            valid = real.reshape(-1, size)
        longest = module.rel_pos_emb.weight.shape[0] // 2
        out = self.attend(
            q,
            k,
            v,
            position=shaw_terms(rows_of(module.rel_pos_emb), size, -longest, longest),
            mask=mask_of(valid, size, size),
            scale=module.scaling,
            dropout=module.attention_dropout if self.training else 0.0,
        )
        out = out.transpose(1, 2).flatten(2).reshape(*padded.shape[:2], -1)
        return module.o_proj(out[:, :tokens]), None


def _blocks(x: Tensor, size: int, width: int) -> Tensor:
    """`[B, N, H D]` as `[B N / size, H, size, D]`."""
    return by_head(x.reshape(-1, size, x.shape[-1]), width)


def _filled(padded: Tensor, tokens: int, size: int) -> Tensor:
    """Which tokens of each block are not padding, `[B N / size, size]`."""
    real = torch.arange(padded.shape[1], device=padded.device) < tokens
    return real.expand(padded.shape[0], -1).reshape(-1, size)


def _distances(module: Any, longest: int, device: torch.device) -> Tensor:
    order = torch.arange(module.context_size, device=device)
    return order[:, None] - order + longest


def _run_granite(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    x = draws.normal(draws.batch, module.context_size * 3 // 2, module.to_q.in_features)
    return (module(x, attention_dists=_distances(module, module.max_pos_emb, x.device)),)


def _run_granite5(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    tokens = module.context_size * 3 // 2
    x = draws.normal(draws.batch, tokens, module.q_proj.in_features)
    distances = _distances(module, module.rel_pos_emb.weight.shape[0] // 2, x.device)
    mask = draws.padding(draws.batch, tokens).bool()
    return (module(x, position_embeddings=distances, attention_mask=mask)[0],)


def _context(module: Any) -> int:
    return int(module.context_size)


_GRANITE = {
    "granite_speech": "GraniteSpeechConformerAttention",
    "granite_speech_plus": "GraniteSpeechPlusConformerAttention",
}


_GRANITE5 = class_path("granite_speech5", "GraniteSpeech5EncoderAttention")


KINDS = (
    PositionKind(
        name="Shaw, in blocks",
        library="transformers",
        replaced=(
            *(
                Replaced(architecture, name, GraniteAttention, tokens=_context)
                for architecture, name in _GRANITE.items()
            ),
            Replaced("granite_speech5", _GRANITE5, Granite5Attention, tokens=_context),
        ),
        verified=(
            *(
                Verified(class_path(architecture, name), _run_granite, tables=("rel_pos_emb.weight",))
                for architecture, name in _GRANITE.items()
            ),
            Verified(_GRANITE5, _run_granite5, tables=("rel_pos_emb.weight",)),
        ),
    ),
)
