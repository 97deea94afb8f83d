"""MONAI's attention blocks, built with `rel_pos_embedding="decomposed"`: one vector per offset of rows and of columns.

    score[h, i, j] += <q[i], rel_pos_arr[0][row i - row j]> + <q[i], rel_pos_arr[1][column i - column j]>    q unscaled

With three axes they are refused: `add_decomposed_rel_pos` mixes the axes up, so that a pair gets products of other
queries, and fails unless the sizes are equal (MONAI's pull request 8890). See `decomposed.py` for models of images.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, path_of
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.retrofits.decomposed import DecomposedAttention
from relpos.core import Grid


class MonaiAttention(DecomposedAttention):
    """`SABlock` of MONAI."""

    def tables(self) -> tuple[Tensor, ...]:
        return tuple(self.rel_positional_embedding.rel_pos_arr)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attention of all cells `[B, N, E]`; the mask `[B, N]` is 0 at keys that nothing sees."""
        fits = attn_mask is None or (attn_mask.shape == x.shape[:2] and not self.causal)
        if not fits or not self.takes_cells(x, x):
            published: Tensor = super().forward(x, attn_mask)
            return published
        if self.use_combined_linear:
            q, k, v = self.input_rearrange(self.qkv(x)).unbind(0)
        else:
            q, k, v = (self.input_rearrange(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        return self.attended(q, k, v, attn_mask)

    def takes_cells(self, x: Tensor, context: Tensor) -> bool:
        """Whether relpos computes a call: not where weights are saved, or half of it has another dtype."""
        count = math.prod(self.mechanism.sizes)
        plain = not self.save_attn and self.attention_dtype is None
        return plain and x.shape[1] == context.shape[1] == count and self.takes(count, count)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """The output, from the heads' queries, keys and values, `[B, H, N, D]`."""
        grid = Grid(*self.mechanism.sizes)
        mask = mask_of(valid, grid.count, grid.count, causal=self.causal)
        dropout = self.drop_weights.p if self.training else 0.0
        position = self.decomposed(grid, grid)
        out = self.attend(q, k, v, position=position, mask=mask, scale=self.scale, dropout=dropout)
        dropped: Tensor = self.drop_output(self.out_proj(self.out_rearrange(out)))
        return dropped


class MonaiCrossAttention(MonaiAttention):
    """`CrossAttentionBlock` of MONAI, whose keys are as many as its queries where it has a position."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attention of all cells `[B, N, E]` to those of another image, or to one another."""
        keys = x if context is None else context
        if not self.takes_cells(x, keys):
            published: Tensor = super(MonaiAttention, self).forward(x, context)
            return published
        q, k, v = (self.input_rearrange(out) for out in (self.to_q(x), self.to_k(keys), self.to_v(keys)))
        return self.attended(q, k, v, None)


def _unfit(module: Any) -> str | None:
    own = module.rel_positional_embedding
    if own is None:
        return "it is built without relative positions"
    if path_of(type(own)) != _EMBEDDING:
        return f"its position is {type(own).__name__}, which is not known"
    if len(own.rel_pos_arr) == 3:
        return "MONAI's code for three axes mixes them up: it adds products of other queries (its pull request 8890)"
    if module.save_attn or module.attention_dtype is not None:
        return "it saves its weights (save_attn), or attends in another dtype (attention_dtype)"
    return None


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """On its own cells; with padding if it takes a mask."""
    tokens = math.prod(module.rel_positional_embedding.s_input_dims)
    x = draws.normal(draws.batch, tokens, module.hidden_input_size)
    if hasattr(module, "context_input_size"):
        return (module(x, draws.normal(draws.batch, tokens, module.context_input_size)),)
    return (module(x), *(() if module.causal else (module(x, draws.padding(draws.batch, tokens)),)))


_EMBEDDING = "monai.networks.blocks.rel_pos_embedding.DecomposedRelativePosEmbedding"
_SELF = "monai.networks.blocks.selfattention.SABlock"
_CROSS = "monai.networks.blocks.crossattention.CrossAttentionBlock"
_READS = (
    "forward",
    _EMBEDDING,
    "monai.networks.blocks.attention_utils.add_decomposed_rel_pos",
    "monai.networks.blocks.attention_utils.get_rel_pos",
)
_ARRAYS = tuple(f"rel_pos_arr.{axis}" for axis in range(2))

KINDS = (
    PositionKind(
        name="a vector per axis",
        library="monai",
        replaced=(
            Replaced("sa_block", _SELF, MonaiAttention, _READS, _unfit),
            Replaced("cross_attention_block", _CROSS, MonaiCrossAttention, _READS, _unfit),
        ),
        verified=(Verified(_SELF, _run, _ARRAYS), Verified(_CROSS, _run, _ARRAYS)),
    ),
)
