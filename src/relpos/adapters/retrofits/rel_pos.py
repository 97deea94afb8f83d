"""timm's three relative position modules, and the attentions that contain one: ViT relpos, MaxxViT, GC ViT.

    RelPosBias      table[row(i - j), h], and BEiT's three numbers with a class token
    RelPosBiasTf    table[h, d_row, d_column], from the lowest offset, key - query
    RelPosMlp       a network of the logarithms of offsets, 0 with a class token

These modules stay; the attentions read their weights. A model that shares one among its layers passes its table on as
an image of offsets (`grids`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from relpos.adapters.common.borders import GRID_ON_GPU
from relpos.adapters.common.grids import (
    EXTRAS,
    cached_lines,
    dense_of_image,
    is_image,
    terms_of_image,
    values,
    with_extras,
)
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, path_of
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped
from relpos.core import Grid, LineBias, Terms

_LAYERS = "timm.layers.pos_embed_rel."


def _cells(own: Any) -> tuple[Tensor, Tensor | None]:
    """The table, `[H, L]`, and the class token's three numbers from one of timm's relative position modules."""
    name = type(own).__name__
    if name == "RelPosBias":
        table: Tensor = own.relative_position_bias_table
        rows, columns = own.window_size
        count = (2 * rows - 1) * (2 * columns - 1)
        return table[:count].T, table[count:].T if own.prefix_tokens else None
    if name == "RelPosBiasTf":
        return own.relative_position_bias_table.flip(1, 2).flatten(1), None  # its offsets are key - query
    made: Tensor = own.bias_act(own.mlp(own.rel_coords_log)).flatten(0, 1).T
    cells = made if own.bias_gain is None else own.bias_gain * made
    return cells, cells.new_zeros(cells.shape[0], EXTRAS) if own.prefix_tokens else None


def rel_pos_terms(module: Retrofitted, own: Any) -> Terms:
    """The position terms of one of timm's relative position modules."""
    cells, extras = _cells(own)
    prefix = 0 if extras is None else own.prefix_tokens
    line = cached_lines(module, Grid(*own.window_size, prefix=prefix), cells.device)
    return Terms(LineBias(values(cells, extras), line))


class _Shared:
    """Stands in for a model's shared module: returns an image in place of `[1, H, N, N]`."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def get_bias(self) -> Tensor:
        cells, extras = _cells(self.own)
        extents = [2 * size - 1 for size in self.own.window_size]
        last = cells.new_zeros(cells.shape[0], EXTRAS) if extras is None else extras
        return with_extras(cells.unflatten(1, extents), last.T)[None]


class RelPosModel(Retrofitted):
    """`VisionTransformerRelPos` with one module for all layers."""

    border = 512
    training_border = 512
    on_gpu = GRID_ON_GPU

    @property
    def shared_rel_pos(self) -> Any:
        """The module that all layers share; during a call of the model, a stand-in that makes its image."""
        own = self._modules.get("shared_rel_pos")
        if own is None or not self.__dict__.get(_CALLED):
            return own
        tokens = _tokens_of(own)
        return _Shared(own) if self.takes(tokens, tokens) else own

    def forward_features(self, *args: Any, **kwargs: Any) -> Any:
        """The published method."""
        with _called(self):
            return super().forward_features(*args, **kwargs)  # type: ignore[misc]

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> Any:
        """The published method."""
        with _called(self):
            return super().forward_intermediates(*args, **kwargs)  # type: ignore[misc]


_CALLED = "_relpos_called"


@contextmanager
def _called(model: RelPosModel) -> Iterator[None]:
    """Mark a model as called. Outside a call, code that reads its modules (PEFT's adapters) finds the module itself."""
    model.__dict__[_CALLED] = True
    try:
        yield
    finally:
        del model.__dict__[_CALLED]


class RelPosAttention(Retrofitted):
    """`RelPosAttention` of ViT relpos, tokens `[B, N, E]`."""

    border = 512
    training_border = 192
    on_gpu = GRID_ON_GPU

    def takes_rel_pos(self, tokens: int, shared: Tensor | None = None) -> bool:
        """Whether relpos computes a call of this many tokens, with the module's own table or a shared one."""
        module: Any = self
        return is_image(shared, tokens) if module.rel_pos is None else self.takes(tokens, tokens)

    def attend_rel_pos(self, q: Tensor, k: Tensor, v: Tensor, shared: Tensor | None = None) -> Tensor:
        """Attention with the module's own position or the shared one."""
        module: Any = self
        if module.rel_pos is not None:
            terms = rel_pos_terms(self, module.rel_pos)
        else:
            assert shared is not None
            terms = terms_of_image(self, shared, q.shape[2])
        dropout = module.attn_drop.p if self.training else 0.0
        return self.attend(q, k, v, position=terms, scale=module.scale, dropout=dropout)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
        """The published forward."""
        module: Any = self
        if not self.takes_rel_pos(x.shape[1], shared_rel_pos):
            return super().forward(x, shared_rel_pos)
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend_rel_pos(module.q_norm(q), module.k_norm(k), v, shared_rel_pos)
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
    """`WindowAttentionGlobal` of GC ViT: the window's own queries, or the whole image's for all windows."""

    border = 192
    training_border = 512

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
    known = {_LAYERS + name for name in ("RelPosBias", "RelPosBiasTf", "RelPosMlp")}
    if module.rel_pos is not None and path_of(type(module.rel_pos)) not in known:
        return f"its position is {type(module.rel_pos).__name__}, which is not known"
    return None


def _unfit_alone(module: Any) -> str | None:
    return "it has no relative position" if module.rel_pos is None else _unfit(module)


def _unfit_model(module: Any) -> str | None:
    return "each layer has its own table" if module.shared_rel_pos is None else None


def _tokens_of(own: Any) -> int:
    rows, columns = own.window_size
    return int(rows * columns) + int(getattr(own, "prefix_tokens", 0))


def _tokens(module: Any) -> int | None:
    return None if module.rel_pos is None else _tokens_of(module.rel_pos)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on tokens `[B, N, E]`, with the whole image's queries if the module takes them."""
    width = module.qkv.in_features
    if module.rel_pos is None:
        x = draws.normal(draws.batch, 25, width)
        image = draws.normal(1, module.num_heads, 7, 11 + EXTRAS)
        return (module(x, image if is_swapped(module) else dense_of_image(image, 25)),)
    tokens = _tokens_of(module.rel_pos)
    if getattr(module, "use_global", False):
        query = draws.normal(draws.batch, tokens, width)
        return (module(draws.normal(2 * draws.batch, tokens, width), query),)
    return (module(draws.normal(draws.batch, tokens, width)),)


def _run_cells(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on cells, channels last."""
    return (module(draws.normal(draws.batch, *module.rel_pos.window_size, module.qkv.in_features)),)


def _run_channels(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on cells, channels first."""
    return (module(draws.normal(draws.batch, module.qkv.in_channels, *module.rel_pos.window_size)),)


def _run_model(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the model with its first layer on images of its own size."""
    embedding = module.patch_embed
    pixels = draws.normal(draws.batch, embedding.proj.in_channels, *embedding.img_size)
    return (module.forward_features(pixels),)


_ALL = ("RelPosBias", "RelPosBiasTf", "RelPosMlp")
_SERVED: tuple[tuple[str, str, type[RelPosAttention], Any, tuple[str, ...], Any], ...] = (
    ("vision_transformer_relpos", "RelPosAttention", RelPosAttention, _run, ("RelPosBias", "RelPosMlp"), _unfit),
    ("maxxvit", "AttentionCl", MaxxAttention, _run_cells, _ALL, _unfit_alone),
    ("maxxvit", "Attention2d", MaxxAttention2d, _run_channels, _ALL, _unfit_alone),
    ("gcvit", "WindowAttentionGlobal", GlobalAttention, _run, ("RelPosBias",), _unfit),
)
_MODEL = "timm.models.vision_transformer_relpos.VisionTransformerRelPos"
_TABLES = ("relative_position_bias_table", "mlp.fc2.weight")
_GATED = "its gate mixes the weights of content with those of position, two softmaxes"
_CONVOLVED = "its position is a convolution of values, with attention that has no scores of pairs"

KINDS = (
    PositionKind(
        name="tables of timm's layers",
        library="timm",
        replaced=(
            *(
                Replaced(file, f"timm.models.{file}.{name}", mixin, ("forward", *modules), unfit, _tokens)
                for file, name, mixin, _, modules, unfit in _SERVED
            ),
            Replaced(
                "vision_transformer_relpos",
                _MODEL,
                RelPosModel,
                ("forward_features", "forward_intermediates", "RelPosBias", "RelPosMlp"),
                _unfit_model,
            ),
        ),
        verified=(
            *(Verified(f"timm.models.{file}.{name}", run, _TABLES) for file, name, _, run, _, _ in _SERVED),
            Verified(_MODEL, _run_model, (*_TABLES, "gamma"), first=("blocks",)),  # layer scale 1e-5 hides position
        ),
        refused=(
            Refused("convit", "timm.models.convit.GPSA", _GATED),
            Refused("coat", "timm.models.coat.ConvRelPosEnc", _CONVOLVED),
        ),
    ),
)
