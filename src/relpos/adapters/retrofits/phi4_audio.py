"""The bias of Phi-4's audio encoder: a table of one number per head and clipped offset, made once for all layers.

    score[h, i, j] += bias_values[clip(j - i, -R, R - 1) + R, h] + seen[j]

The published model adds the bias of all pairs and heads to its mask, 1 where a frame is seen and 0 elsewhere, and hands
on the sum, `[B, H, N, N]`. Here it hands on as many numbers as it has, which the model's own addition puts together:

    bias    row 0: one number per offset    row 1: 0
    mask    row 0: 0                        row 1: one number per frame, the rest 0
    sum     [B, H, 2, 2 N - 1]

A layer that gets this attends with relpos. A model that streams (`chunk_size`) has a mask of all pairs: it runs as
published, as does a compiled one, for no compiler follows a context variable. It cuts audio into pieces of 500 frames.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, rows_of
from relpos.core import DenseBias, LineBias, Sequence, Terms, at_least_float32, lines, lookup

_model: ContextVar[Phi4AudioModel | None] = ContextVar("relpos_phi4_audio", default=None)
"""The model whose forward runs, if relpos may compute it."""


class Phi4AudioModel(Retrofitted):
    """The encoder, which makes the mask of all layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        served = self.config.chunk_size <= 0 and not torch.compiler.is_compiling()
        token = _model.set(self if served else None)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _model.reset(token)

    def forward_embeddings(self, hidden_states: Tensor, masks: Tensor | None) -> tuple[Any, ...]:
        """The published embeddings, with the mask in relpos's form."""
        hidden_states, mask, masks = super().forward_embeddings(hidden_states, masks)  # type: ignore[misc]
        return hidden_states, self.packed(mask, hidden_states), masks

    def calculate_hs_mask(self, hidden_states: Tensor, *args: Any) -> Tensor:
        """The mask of pieces, in relpos's form."""
        return self.packed(super().calculate_hs_mask(hidden_states, *args), hidden_states)  # type: ignore[misc]

    def packed(self, mask: Tensor, like: Tensor) -> Tensor:
        """A mask of all pairs, `[B, N, N]`, alike for all queries, as `[B, 2, 2 N - 1]` if relpos attends."""
        tokens = mask.shape[-1]
        if _model.get() is not self or not self.takes(tokens, tokens):
            return mask
        return F.pad(mask[:, :1].to(like.dtype), (0, tokens - 1, 1, 0))


class Phi4AudioBias(Retrofitted):
    """`Phi4MultimodalAudioRelativeAttentionBias`."""

    def forward(self, x: Tensor) -> Any:
        """The bias of each offset, `[1, H, 2, 2 N - 1]`, if the model's layers attend with relpos."""
        tokens, model = x.shape[1], None if torch.compiler.is_compiling() else _model.get()
        if model is None or not model.takes(tokens, tokens):
            return super().forward(x)
        offset = torch.arange(1 - tokens, tokens, device=x.device)  # query - key; published is key - query
        row = (-offset).clamp(-self.max_distance, self.max_distance - 1)
        row = row.abs() if self.symmetric else row + self.num_buckets // 2
        values = lookup(at_least_float32(rows_of(self.bias_values)), row).T
        return F.pad(values[None, :, None], (0, 0, 0, 1))


class Phi4AudioAttention(Retrofitted):
    """A layer that is given a mask."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        """Attention by relpos if the mask is in its form, else as published."""
        tokens = hidden_states.shape[1]
        if attention_mask is None or attention_mask.shape[2:] != (2, 2 * tokens - 1):
            return super().forward(hidden_states, attention_mask, **kwargs)
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        device = q.device
        line = self.cached(tokens, device, lambda: lines(Sequence(tokens), device=device), 2 * tokens)
        bias = LineBias(at_least_float32(attention_mask[0, :, 0]), line)
        seen = DenseBias(attention_mask[:, :1, 1:, :tokens].detach())
        dropout: float = self.attention_dropout if self.training else 0.0
        out = self.attend(q, k, v, position=Terms(bias, seen), scale=self.scaling, dropout=dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the model with one layer; not streaming, where it runs as published."""
    module.config.chunk_size = -1
    frames = draws.tokens * module.config.time_reduction
    x = draws.normal(draws.batch, frames, module.config.input_size)
    return (module(x, draws.padding(draws.batch, frames).bool()),)


def _path(name: str) -> str:
    return class_path("phi4_multimodal", f"Phi4MultimodalAudio{name}")


KINDS = (
    PositionKind(
        name="clipped offsets",
        library="transformers",
        replaced=(
            Replaced(
                "phi4_multimodal",
                _path("Model"),
                Phi4AudioModel,
                reads=("forward", "forward_embeddings", "calculate_hs_mask", "_streaming_mask", "adaptive_enc_mask"),
            ),
            Replaced("phi4_multimodal", _path("RelativeAttentionBias"), Phi4AudioBias),
            Replaced("phi4_multimodal", _path("Attention"), Phi4AudioAttention),
        ),
        verified=(Verified(_path("Model"), _run, tables=("bias_values.weight",), first=("encoders",)),),
    ),
)
