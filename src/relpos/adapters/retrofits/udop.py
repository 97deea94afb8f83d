"""UDOP's buckets of the distance in the text and of the horizontal and vertical distance on the page, all learned.

    score[h, i, j] += text[bucket(j - i), h] + x[bucket(100 (x_j - x_i)), h] + y[bucket(100 (y_j - y_i)), h]

The published encoder adds three tensors `[B, H, N, N]` before its layers and passes on their sum, which gets a gradient
as large. Here it passes on

    bias            [1, H, 1, R], one number per head and combination of buckets: the sum of their rows; R = 32 ** 3
    relpos_pairs    [B, N, N] integers of two bytes, the combination that each pair reads; an argument by name that
                    the published layers hand on to their attention

Layers that get both attend with an `IndexedBias`. The decoder has T5's buckets, and is served as T5 is. Compiled, the
encoder runs as published: no compiler follows a context variable, by which its bias says what each pair reads.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import PAIRS, is_switched
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, rows_of
from relpos.adapters.retrofits.t5 import T5Attention, run_attention
from relpos.core import at_least_float32

_BIASES = (
    "RelativePositionBiasBase",
    "RelativePositionBias1D.prepare_input",
    "RelativePositionBiasHorizontal.prepare_input",
    "RelativePositionBiasVertical.prepare_input",
)
"""What finds the rows that pairs read."""

_pairs: ContextVar[list[Tensor] | None] = ContextVar("relpos_pairs", default=None)
"""In the forward of an encoder, where its bias puts the combination of each pair."""


class UdopStack(Retrofitted):
    """The encoder, which hands its layers what each pair reads; a decoder has nothing of the kind."""

    border = T5Attention.border
    training_border = T5Attention.training_border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        served = is_switched(self.config) and not kwargs.get("output_attentions")
        if self.is_decoder or not served or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        pairs: list[Tensor] = []
        token = _pairs.set(pairs)
        try:
            return super().forward(*args, **kwargs, **{PAIRS: pairs})
        finally:
            _pairs.reset(token)


class UdopBias(Retrofitted):
    """`RelativePositionBiasAggregated`, which adds the biases of all pairs up."""

    border = UdopStack.border
    training_border = UdopStack.training_border

    def forward(self, attention_mask: Any = None, bbox: Any = None) -> Any:
        """One number per combination of buckets if relpos attends, else of every pair."""
        pairs = None if torch.compiler.is_compiling() else _pairs.get()
        tokens = 0 if attention_mask is None else attention_mask.shape[1]
        if pairs is None or not self.takes(tokens, tokens) or any(bias.expand for bias in self.biases):
            return super().forward(attention_mask, bbox)
        values, *others = (at_least_float32(rows_of(bias.relative_attention_bias)) for bias in self.biases)
        pair, *more = (_rows(bias, attention_mask, bbox) for bias in self.biases)
        for table, rows in zip(others, more, strict=True):
            values, pair = (values[:, None] + table).flatten(0, 1), pair * table.shape[0] + rows
        pairs.append(pair.to(torch.int16 if values.shape[0] <= 2**15 else torch.int32))
        return values.T[None, :, None]


def _rows(bias: Any, attention_mask: Tensor, bbox: Any) -> Tensor:
    """The row of a bias's table that each pair reads, `[1 or B, N, N]`, as in its published forward."""
    rows: Tensor = bias.get_bucket(attention_mask, bbox)
    if bias.prefix_bucket:
        order = torch.arange(rows.shape[-1], device=rows.device)
        within = order < (bbox[:, :, 1] < 0).sum(-1, keepdim=True)  # boxes of a prefix are negative
        first, second, count = within[:, :, None], within[:, None], bias.relative_attention_num_buckets
        rows = torch.where(first & ~second, count, torch.where(second & ~first, count + 1, rows))
    return rows.clamp(0, bias.relative_attention_bias.weight.shape[0] - 1)  # an adapter has no num_embeddings


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the encoder or the decoder with one layer, on padded tokens anywhere on the page, of which one is prefix."""
    tokens, valid = draws.tokens, draws.padding(draws.batch, draws.tokens)
    x = draws.normal(draws.batch, tokens, module.config.d_model)
    if module.is_decoder:
        encoded = {"encoder_hidden_states": draws.normal(*x.shape), "encoder_attention_mask": valid}
        return (module(inputs_embeds=1 * x, attention_mask=valid, use_cache=False, **encoded)[0],)
    boxes = torch.rand(draws.batch, tokens, 4, generator=torch.Generator().manual_seed(0)).to(x.device)
    boxes[:, 0] = -boxes[:, 0]
    out: Tensor = module(inputs_embeds=1 * x, attention_mask=valid, bbox=boxes)[0]  # which it adds to in place
    return (out[valid.bool()],)


_TABLES = ("relative_attention_bias.weight",)
_FILE = class_path("udop", "")

KINDS = (
    PositionKind(
        name="learned buckets of boxes",
        library="transformers",
        switches=True,
        replaced=(
            Replaced("udop", "UdopStack", UdopStack),
            Replaced(
                "udop",
                "RelativePositionBiasAggregated",
                UdopBias,
                reads=("forward", *(_FILE + name for name in _BIASES)),
            ),
            Replaced(
                "udop",
                "UdopAttention",
                T5Attention,
                reads=("forward", "compute_bias", "_relative_position_bucket"),
            ),
        ),
        verified=(
            Verified(_FILE + "UdopStack", _run, tables=_TABLES, first=("block",)),
            Verified(_FILE + "UdopAttention", run_attention, tables=_TABLES),
        ),
    ),
)
