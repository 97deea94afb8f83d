"""torchvision's MaxViT: a table of offsets in every layer, for the windows of a feature map and for its coarse grid.

    score[h, i, j] += table[row(i - j), h]          scale 1 / sqrt(E), of all heads' width, not of one head's

Both partitions have `size x size` tokens, made by other modules: this layer gets them as `[B, G, N, E]`, G of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos.adapters.common.grids import terms_of_table
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import Terms


class Partitions(Retrofitted):
    """What the layer does beside its position, retrofitted or replaced."""

    def attend_partitions(self, x: Tensor) -> Tensor:
        """Attention within partitions `[B, G, N, E]`."""
        q, k, v = self.to_qkv(x.flatten(0, 1)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        merged: Tensor = self.merge(self.attend_heads(q, k, v).transpose(1, 2).flatten(2))
        return merged.view(x.shape)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with position, `[B * G, H, N, D]`."""
        raise NotImplementedError


class PartitionAttention(Partitions):
    """`RelativePositionalMultiHeadAttention`, borders of timm's MaxViT."""

    border = 512
    training_border = 192

    def forward(self, x: Tensor) -> Any:
        """The published forward."""
        tokens = self.max_seq_len
        if x.dim() != 4 or x.shape[2] != tokens or not self.takes(tokens, tokens):
            return super().forward(x)
        return self.attend_partitions(x)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with the module's own position."""
        return self.attend(q, k, v, position=self.terms(), scale=self.scale_factor)

    def terms(self) -> Terms:
        """The position of one partition."""
        return terms_of_table(self, self.relative_position_bias_table, (self.size, self.size))


def _tokens(module: Any) -> int:
    return int(module.max_seq_len)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Two partitions of each image."""
    return (module(draws.normal(draws.batch, 2, module.max_seq_len, module.to_qkv.in_features)),)


_ATTENTION = "torchvision.models.maxvit.RelativePositionalMultiHeadAttention"

KINDS = (
    PositionKind(
        name="tables of partitions",
        library="torchvision",
        replaced=(
            Replaced(
                "maxvit",
                _ATTENTION,
                PartitionAttention,
                ("forward", "get_relative_positional_bias", "_get_relative_position_index"),
                tokens=_tokens,
            ),
        ),
        verified=(Verified(_ATTENTION, _run, ("relative_position_bias_table",)),),
    ),
)
