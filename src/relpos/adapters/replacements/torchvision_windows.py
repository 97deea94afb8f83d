"""torchvision's Swin, Swin V2, Swin3D and MaxViT. Own position: a table of offsets, or a network, in each layer.

Each stage is a stack, since it has its own heads. A stage of Swin is an `nn.Sequential`: the mechanisms are a child of
it that it does not call. Nothing can be added to tokens: where a window is in the image is unknown. Windows are of the
size they were built with in images of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from relpos.adapters.common.kinds import path_of
from relpos.adapters.replacements.repositioned import CHILD, Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack
from relpos.adapters.retrofits.maxvit import Partitions
from relpos.adapters.retrofits.shifted_windows import CosineMapOfWindows, MapOfWindows, is_smaller
from relpos.core import Coordinates, Grid, Mask
from relpos.core.checks import fail
from relpos.position import Site


class _FixedWindows(Repositioned):
    """Common base of these mixins."""

    def resized(self, tokens: Coordinates) -> NoReturn:
        """Windows do not follow an image's size."""
        came = f"torchvision's, whose windows stay {self.layer_position.coordinates!r}"
        fail("a model whose windows follow the size of its images", came, "Swin takes other images as it is.")


class RepositionedShiftedWindow(MapOfWindows, _FixedWindows):
    """`ShiftedWindowAttention`, of two axes and of three."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention within the windows of a feature map `[B, sizes, C]`."""
        if len(self.window_size) == 3 and is_smaller(x, self.window_size):
            came = f"one of {tuple(x.shape[1:-1])}"
            fail(f"a map of at least a window, {tuple(self.window_size)}", came, "Give more frames or larger images.")
        return self.attend_map(x)

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, scale: float, dropout: float
    ) -> Tensor:
        """Attention with the layer's mechanism."""
        return self.attend_repositioned(q, k, v, mask, scale=scale, dropout=dropout)


class RepositionedCosineWindow(CosineMapOfWindows, RepositionedShiftedWindow):
    """`ShiftedWindowAttentionV2`."""


class RepositionedPartitions(Partitions, _FixedWindows):
    """`RelativePositionalMultiHeadAttention` of MaxViT."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention within partitions `[B, G, N, E]`."""
        return self.attend_partitions(x)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with the layer's mechanism."""
        return self.attend_repositioned(q, k, v, scale=self.scale_factor)


class RepositionedStage(_FixedWindows):
    """A stage, which calls its children one after the other, but not its mechanisms."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (child for name, child in self._modules.items() if name != CHILD and child is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _swin(name: str, model: Any, given: Given) -> Iterator[Stack]:
    for number, stage in enumerate(model.features):
        attentions = (block.attn for block in stage.children() if hasattr(block, "attn"))
        layers = tuple(one for one in attentions if path_of(type(one)) in _LAYERS)
        if layers:
            where = f"{name}.features.{number}" if name else f"features.{number}"
            first = layers[0]
            site = _site(first.num_heads, first.qkv, Grid(*first.window_size), given)
            mixin = _LAYERS[path_of(type(first))]
            yield Stack(where, stage, site, layers, mixin, (_own(stage, layers),), others=((stage, RepositionedStage),))


def _maxvit(name: str, block: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(one for one in block.modules() if path_of(type(one)) == _PARTITIONS)
    first: Any = layers[0]
    site = _site(first.n_heads, first.to_qkv, Grid(first.size, first.size), given)
    yield Stack(name, block, site, layers, RepositionedPartitions, (_own(block, layers),))


def _site(heads: int, projection: nn.Linear, window: Grid, given: Given) -> Site:
    return Site(heads, projection.out_features // 3 // heads, projection.in_features, given.grid(window))


def _own(holder: nn.Module, layers: tuple[Any, ...]) -> Own:
    """The tables, or networks, of all layers."""
    names = {id(one): name for name, one in holder.named_modules()}
    parameters = tuple(
        f"{names[id(layer)]}.{name}"
        for layer in layers
        for name, _ in layer.named_parameters()
        if name.startswith(("relative_position_bias_table", "cpb_mlp"))
    )
    is_network = hasattr(layers[0], "cpb_mlp")
    what = "networks" if is_network else f"tables of {len(layers[0].relative_position_bias_table)} offsets"
    return Own(parameters[0], f"{what}, {len(layers)} layers", parameters)


_IMAGES, _VIDEO = "torchvision.models.swin_transformer", "torchvision.models.video.swin_transformer"
_PARTITIONS = "torchvision.models.maxvit.RelativePositionalMultiHeadAttention"
_LAYERS: dict[str, type[RepositionedShiftedWindow]] = {
    f"{_IMAGES}.ShiftedWindowAttention": RepositionedShiftedWindow,
    f"{_IMAGES}.ShiftedWindowAttentionV2": RepositionedCosineWindow,
    f"{_VIDEO}.ShiftedWindowAttention3d": RepositionedShiftedWindow,
}
STACKS = {
    f"{_IMAGES}.SwinTransformer": _swin,
    f"{_VIDEO}.SwinTransformer3d": _swin,
    "torchvision.models.maxvit.MaxVitBlock": _maxvit,
}
READS: dict[str, tuple[str, ...]] = {
    f"{_IMAGES}.ShiftedWindowAttention": ("forward", "shifted_window_attention"),
    f"{_IMAGES}.ShiftedWindowAttentionV2": ("forward", "shifted_window_attention"),
    f"{_VIDEO}.ShiftedWindowAttention3d": ("forward", "shifted_window_attention_3d"),
    _PARTITIONS: ("forward",),
}
