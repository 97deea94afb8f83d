"""LeViT's biases, also in TinyViT, EfficientFormer, EfficientViT: one number per head and pair of absolute distances.

    score[h, i, j] += attention_biases[h, |d_row| * columns + |d_column|]

If attention downsamples a grid, the queries are every s-th row and column. Each entry of a line reads the table at its
absolute distances, so mirrored offsets share a number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import Grid, LineBias, Lines, Positions, Rows, Terms, at_least_float32, lines, read


class Distances(Retrofitted):
    """Common base of the mixins in this file."""

    border = 1024
    training_border = 1024

    def __getstate__(self) -> dict[str, Any]:
        """Without the dense biases that the published class caches in `eval()`: they may be part of an autograd
        graph."""
        return self.__dict__ | {"attention_bias_cache": {}}

    def terms(self, grid: tuple[int, int], stride: int = 1, head: int | None = None) -> Terms:
        """The position terms from every `stride`-th row and column of a grid to all its cells."""
        table: Tensor = self.attention_biases
        line, rows = self.cached(
            (grid, stride), table.device, lambda: _lines(grid, stride, table.device), 2 * math.prod(grid)
        )
        wide = at_least_float32(table if head is None else table[head : head + 1])
        return Terms(LineBias(read(wide.T, rows), line))


def _lines(grid: tuple[int, int], stride: int, device: torch.device) -> tuple[Lines, Rows]:
    """The lines, and for each of their entries the index into the table."""
    keys = Grid(*grid)
    if stride == 1:
        line = lines(keys, device=device)
    else:
        coarse = Grid(*(-(-size // stride) for size in grid))
        positions = coarse.tokens(device) * stride
        queries = Positions(positions, low=(0, 0), high=tuple((size - 1) * stride for size in coarse.sizes))
        line = lines(queries, keys, device=device)
    distance = line.offsets().axes.abs()
    return line, Rows(distance[:, 0] * grid[1] + distance[:, 1], grid[0] * grid[1])


def _asking(grid: tuple[int, int], stride: int) -> int:
    return math.prod(-(-size // stride) for size in grid)


class LevitAttention(Distances):
    """`LevitAttention` of transformers."""

    def forward(self, hidden_state: Tensor) -> Any:
        """Attention between cells `[B, N, E]`."""
        module: Any = self
        tokens, edge = hidden_state.shape[1], math.isqrt(hidden_state.shape[1])
        if not self.takes(tokens, tokens):
            return super().forward(hidden_state)
        width = module.key_dim
        q, k, v = (
            module.queries_keys_values(hidden_state)
            .unflatten(-1, (module.num_attention_heads, -1))
            .transpose(1, 2)
            .split([width, width, module.attention_ratio * width], dim=3)
        )
        out = self.attend(q, k, v, position=self.terms((edge, edge)), scale=module.scale)
        return module.projection(module.activation(out.transpose(1, 2).flatten(2)))


class LevitSubsample(Distances):
    """`LevitAttentionSubsample` of transformers."""

    def forward(self, hidden_state: Tensor) -> Any:
        """Attention of a subsampled grid to all cells, `[B, N, E]`."""
        module: Any = self
        edge, stride = module.queries_subsample.resolution, module.queries_subsample.stride
        if not self.takes(module.resolution_out**2, hidden_state.shape[1]):
            return super().forward(hidden_state)
        heads, width = module.num_attention_heads, module.key_dim
        k, v = (
            module.keys_values(hidden_state)
            .unflatten(-1, (heads, -1))
            .transpose(1, 2)
            .split([width, module.attention_ratio * width], dim=3)
        )
        q = module.queries(module.queries_subsample(hidden_state)).unflatten(-1, (heads, width)).transpose(1, 2)
        out = self.attend(q, k, v, position=self.terms((edge, edge), stride), scale=module.scale)
        return module.projection(module.activation(out.transpose(1, 2).flatten(2)))


class TimmLevit(Distances):
    """timm's `Attention` of LeViT, on tokens or channels-first cells."""

    def forward(self, x: Tensor) -> Any:
        """Attention between cells `[B, N, E]`, or `[B, E, rows, columns]`."""
        module: Any = self
        tokens = math.prod(module.resolution)
        if not self.takes(tokens, tokens):
            return super().forward(x)
        sizes = [module.key_dim, module.key_dim, module.val_dim]
        q, k, v = _of_heads(module.qkv(x), module.num_heads, module.use_conv).split(sizes, dim=3)
        out = self.attend(q, k, v, position=self.terms(module.resolution), scale=module.scale)
        return module.proj(_together(out, x, module.resolution, module.use_conv))


class TimmLevitDownsample(Distances):
    """timm's `AttentionDownsample` of LeViT."""

    def forward(self, x: Tensor) -> Any:
        """Attention of a subsampled grid to all cells."""
        module: Any = self
        grid, stride = module.resolution, module.stride
        if not self.takes(_asking(grid, stride), math.prod(grid)):
            return super().forward(x)
        heads = module.num_heads
        k, v = _of_heads(module.kv(x), heads, module.use_conv).split([module.key_dim, module.val_dim], dim=3)
        q = _of_heads(module.q(x), heads, module.use_conv)
        out = self.attend(q, k, v, position=self.terms(grid, stride), scale=module.scale)
        smaller = tuple(-(-size // stride) for size in grid)
        return module.proj(_together(out, x, smaller, module.use_conv))


def _of_heads(x: Tensor, heads: int, channels_first: bool) -> Tensor:
    """Projections as `[B, H, N, D]`."""
    if channels_first:
        return torch.unflatten(x.flatten(2), 1, (heads, -1)).transpose(2, 3)
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def _together(out: Tensor, x: Tensor, grid: tuple[int, ...], channels_first: bool) -> Tensor:
    """Concatenate the heads' outputs in the layout of the output projection."""
    if channels_first:
        return out.transpose(2, 3).reshape(x.shape[0], -1, *grid)
    return out.transpose(1, 2).flatten(2)


class TinyVit(Distances):
    """timm's `Attention` of TinyViT."""

    border = 256
    training_border = 256

    def forward(self, x: Tensor) -> Any:
        """Attention between cells `[B, N, E]`."""
        module: Any = self
        tokens = x.shape[1]
        if not (tokens == math.prod(module.resolution) and self.takes(tokens, tokens)):
            return super().forward(x)
        sizes = [module.key_dim, module.key_dim, module.val_dim]
        q, k, v = _of_heads(module.qkv(module.norm(x)), module.num_heads, False).split(sizes, dim=3)
        out = self.attend(q, k, v, position=self.terms(module.resolution), scale=module.scale)
        return module.proj(out.transpose(1, 2).flatten(2))


class EfficientFormer(Distances):
    """timm's `Attention` of EfficientFormer."""

    def forward(self, x: Tensor) -> Any:
        """Attention between cells `[B, N, E]`."""
        module: Any = self
        tokens, edge = x.shape[1], math.isqrt(x.shape[1])
        if not self.takes(tokens, tokens):
            return super().forward(x)
        sizes = [module.key_dim, module.key_dim, module.val_dim]
        q, k, v = _of_heads(module.qkv(x), module.num_heads, False).split(sizes, dim=3)
        out = self.attend(q, k, v, position=self.terms((edge, edge)), scale=module.scale)
        return module.proj(out.transpose(1, 2).flatten(2))


class EfficientFormerDownsample(Distances):
    """timm's `Attention2dDownsample` of EfficientFormer V2."""

    def forward(self, x: Tensor) -> Any:
        """Attention of every second cell to all, `[B, E, rows, columns]`."""
        module: Any = self
        if not self.takes(module.N2, module.N):
            return super().forward(x)
        v = module.v(x)
        q, k, values = (_of_heads(one, module.num_heads, True) for one in (module.q(x), module.k(x), v))
        out = self.attend(q, k, values, position=self.terms(module.resolution, 2), scale=module.scale)
        out = _together(out, x, module.resolution2, True) + module.v_local(v)
        return module.proj(module.act(out))


class EfficientVit(Distances):
    """timm's `CascadedGroupAttention` of EfficientViT: one head after another."""

    def forward(self, x: Tensor) -> Any:
        """Attention between the cells of a window, `[B, E, rows, columns]`."""
        module: Any = self
        grid = (module.resolution, module.resolution)
        if not (tuple(x.shape[2:]) == grid and self.takes(math.prod(grid), math.prod(grid))):
            return super().forward(x)
        parts = x.chunk(len(module.qkvs), dim=1)
        outputs: list[Tensor] = []
        for head, (project, convolve) in enumerate(zip(module.qkvs, module.dws, strict=True)):
            part = parts[0] if head == 0 else outputs[-1] + parts[head]
            q, k, v = project(part).split([module.key_dim, module.key_dim, module.val_dim], dim=1)
            q, k, v = (one.flatten(2).transpose(1, 2)[:, None] for one in (convolve(q), k, v))
            out = self.attend(q, k, v, position=self.terms(grid, head=head), scale=module.scale)
            outputs.append(out[:, 0].transpose(1, 2).reshape(x.shape[0], module.val_dim, *grid))
        return module.proj(torch.cat(outputs, dim=1))


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on a whole grid, in the layout of the class."""
    first = next(one for one in module.modules() if isinstance(one, nn.Linear | nn.Conv2d))
    count = module.attention_biases.shape[1]
    if isinstance(first, nn.Linear):
        return (module(draws.normal(draws.batch, count, first.in_features)),)
    grid = module.resolution if isinstance(module.resolution, tuple) else (module.resolution,) * 2
    parts = len(module.qkvs) if isinstance(getattr(module, "qkvs", None), nn.ModuleList) else 1
    return (module(draws.normal(draws.batch, parts * first.in_channels, *grid)),)


def _cells(module: Any) -> int:
    """The geometric mean of the numbers of queries and keys."""
    asking, asked = module.attention_bias_idxs.shape
    return math.isqrt(asking * asked)


_LEVIT = "transformers.models.levit.modeling_levit."
_TIMM: tuple[tuple[str, str, type[Distances], tuple[str, ...]], ...] = (
    ("levit", "Attention", TimmLevit, ("_compute_attention_bias_idxs",)),
    ("levit", "AttentionDownsample", TimmLevitDownsample, ("_compute_attention_bias_idxs",)),
    ("tiny_vit", "Attention", TinyVit, ("_init_buffers",)),
    ("efficientformer", "Attention", EfficientFormer, ("__init__",)),
    ("efficientformer_v2", "Attention2dDownsample", EfficientFormerDownsample, ("_compute_attention_bias_idxs",)),
    ("efficientvit_msra", "CascadedGroupAttention", EfficientVit, ("_init_buffers",)),
)
_READS = ("forward", "get_attention_biases")
_TABLE = ("attention_biases",)

KINDS = (
    PositionKind(
        name="distances",
        library="transformers",
        replaced=tuple(
            Replaced("levit", _LEVIT + name, mixin, (*_READS, "__init__"), tokens=_cells)
            for name, mixin in (("LevitAttention", LevitAttention), ("LevitAttentionSubsample", LevitSubsample))
        ),
        verified=tuple(Verified(_LEVIT + name, _run, _TABLE) for name in ("LevitAttention", "LevitAttentionSubsample")),
    ),
    PositionKind(
        name="distances",
        library="timm",
        replaced=tuple(
            Replaced(file, f"timm.models.{file}.{name}", mixin, (*_READS, *reads), tokens=_cells)
            for file, name, mixin, reads in _TIMM
        ),
        verified=tuple(Verified(f"timm.models.{file}.{name}", _run, _TABLE) for file, name, _, _ in _TIMM),
        refused=(
            Refused(
                "efficientformer_v2",
                "timm.models.efficientformer_v2.Attention2d",
                "it mixes the scores and the weights of its heads (talking heads)",
            ),
        ),
    ),
)
