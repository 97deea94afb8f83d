"""timm's three modules of relative position, and the attentions that hold one: ViT relpos, MaxxViT, GC ViT.

    RelPosBias      table[row(i - j), h], and BEiT's three numbers with a class token
    RelPosBiasTf    table[h, d_row, d_column], from the lowest offset, key - query
    RelPosMlp       a network of the logarithms of offsets, 0 with a class token

The modules stay as they are; the attentions read their weights. A module that the whole model shares gives a dense
bias, and attentions that have none of their own run as published.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos.adapters.grids import EXTRAS, kept_lines, terms_of_table, values
from relpos.adapters.kinds import PositionKind, Refused, Replaced, Verified, path_of
from relpos.adapters.random_inputs import RandomInputs
from relpos.adapters.retrofitted import Retrofitted
from relpos.core import Grid, LineBias, Terms

_LAYERS = "timm.layers.pos_embed_rel."


def rel_pos_terms(module: Retrofitted, own: Any) -> Terms:
    """The terms of one of timm's modules of relative position."""
    name = type(own).__name__
    if name == "RelPosBias":
        return terms_of_table(module, own.relative_position_bias_table, own.window_size)
    if name == "RelPosBiasTf":
        cells = own.relative_position_bias_table.flip(1, 2).flatten(1)  # of key - query
        prefix = 0
    else:
        made = own.bias_act(own.mlp(own.rel_coords_log)).flatten(0, 1).T
        cells = made if own.bias_gain is None else own.bias_gain * made
        prefix = own.prefix_tokens
    extras = cells.new_zeros(cells.shape[0], EXTRAS) if prefix else None
    line = kept_lines(module, Grid(*own.window_size, prefix=prefix), cells.device)
    return Terms(LineBias(values(cells, extras), line))


class RelPosAttention(Retrofitted):
    """`RelPosAttention` of ViT relpos, tokens `[B, N, E]`."""

    border = 256
    training_border = 192

    def takes_rel_pos(self, tokens: int) -> bool:
        """Whether relpos computes a call of this many tokens."""
        module: Any = self
        return module.rel_pos is not None and self.takes(tokens, tokens)

    def attend_rel_pos(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention under the position of the module."""
        module: Any = self
        dropout = module.attn_drop.p if self.training else 0.0
        return self.attend(q, k, v, position=rel_pos_terms(self, module.rel_pos), scale=module.scale, dropout=dropout)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
        """The published forward."""
        module: Any = self
        if not self.takes_rel_pos(x.shape[1]):
            return super().forward(x, shared_rel_pos)
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend_rel_pos(module.q_norm(q), module.k_norm(k), v)
        return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))


class MaxxAttention(RelPosAttention):
    """`AttentionCl` of MaxxViT, cells `[B, rows, columns, E]`."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
        """The published forward."""
        module: Any = self
        if not self.takes_rel_pos(x.shape[1:-1].numel()):
            return super().forward(x, shared_rel_pos)
        flat = module.qkv(x).flatten(1, -2)
        if module.head_first:
            q, k, v = flat.unflatten(-1, (module.num_heads, -1)).transpose(1, 2).chunk(3, dim=3)
        else:
            q, k, v = flat.unflatten(-1, (3, module.num_heads, -1)).transpose(1, 3).unbind(2)
        out = self.attend_rel_pos(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1)
        return module.proj_drop(module.proj(out))


class MaxxAttention2d(RelPosAttention):
    """`Attention2d` of MaxxViT, cells `[B, E, rows, columns]`."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
        """The published forward."""
        module: Any = self
        if not self.takes_rel_pos(x.shape[2] * x.shape[3]):
            return super().forward(x, shared_rel_pos)
        flat = module.qkv(x).flatten(2)
        if module.head_first:
            q, k, v = flat.unflatten(1, (module.num_heads, -1)).chunk(3, dim=2)
        else:
            q, k, v = flat.unflatten(1, (3, module.num_heads, -1)).unbind(1)
        out = self.attend_rel_pos(*(one.transpose(-1, -2).contiguous() for one in (q, k, v)))
        out = out.transpose(-1, -2).reshape(x.shape[0], -1, *x.shape[2:])
        return module.proj_drop(module.proj(out))


class GlobalAttention(RelPosAttention):
    """`WindowAttentionGlobal` of GC ViT: queries of the window, or those of the whole image for all windows."""

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Any:
        """The published forward."""
        module: Any = self
        if not self.takes_rel_pos(x.shape[1]):
            return super().forward(x, q_global)
        if module.use_global and q_global is not None:
            k, v = module.qkv(x).unflatten(-1, (2, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            q = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)
            q = q.reshape(*x.shape[:2], module.num_heads, -1).transpose(1, 2)
        else:
            q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend_rel_pos(q, k, v)
        return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))


def _unfit(module: Any) -> str | None:
    if module.rel_pos is None:
        return "it has no table of its own (none, or one that all layers share)"
    if path_of(type(module.rel_pos)) not in {_LAYERS + name for name in ("RelPosBias", "RelPosBiasTf", "RelPosMlp")}:
        return f"its position is {type(module.rel_pos).__name__}, which is not known"
    return None


def _tokens(module: Any) -> int | None:
    if module.rel_pos is None:
        return None
    rows, columns = module.rel_pos.window_size
    return int(rows * columns) + getattr(module.rel_pos, "prefix_tokens", 0)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Tokens of a sequence, and where there are some the queries of the whole image."""
    tokens = _tokens(module)
    assert tokens is not None
    width = module.qkv.in_features
    if getattr(module, "use_global", False):
        query = draws.normal(draws.batch, tokens, width)
        return (module(draws.normal(2 * draws.batch, tokens, width), query),)
    return (module(draws.normal(draws.batch, tokens, width)),)


def _run_cells(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Cells, channels last."""
    return (module(draws.normal(draws.batch, *module.rel_pos.window_size, module.qkv.in_features)),)


def _run_channels(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Cells, channels first."""
    return (module(draws.normal(draws.batch, module.qkv.in_channels, *module.rel_pos.window_size)),)


_SERVED: tuple[tuple[str, str, type[RelPosAttention], Any, tuple[str, ...]], ...] = (
    ("vision_transformer_relpos", "RelPosAttention", RelPosAttention, _run, ("RelPosBias", "RelPosMlp")),
    ("maxxvit", "AttentionCl", MaxxAttention, _run_cells, ("RelPosBias", "RelPosBiasTf", "RelPosMlp")),
    ("maxxvit", "Attention2d", MaxxAttention2d, _run_channels, ("RelPosBias", "RelPosBiasTf", "RelPosMlp")),
    ("gcvit", "WindowAttentionGlobal", GlobalAttention, _run, ("RelPosBias",)),
)
_GATED = "its gate mixes the weights of content with those of position, two softmaxes"
_CONVOLVED = "its position is a convolution of values beside attention without scores of pairs"
_QUERIES = "its position are vectors of rows and of columns that meet the query, and no table"

KINDS = (
    PositionKind(
        name="tables of timm's layers",
        library="timm",
        replaced=tuple(
            Replaced(file, f"timm.models.{file}.{name}", mixin, ("forward", *modules), _unfit, _tokens)
            for file, name, mixin, _, modules in _SERVED
        ),
        verified=tuple(
            Verified(f"timm.models.{file}.{name}", run, ("relative_position_bias_table", "mlp.fc2.weight"))
            for file, name, _, run, _ in _SERVED
        ),
        refused=(
            Refused("convit", "timm.models.convit.GPSA", _GATED),
            Refused("coat", "timm.models.coat.ConvRelPosEnc", _CONVOLVED),
            Refused("bottleneck", "timm.layers.bottleneck_attn.BottleneckAttn", _QUERIES),
        ),
    ),
)
