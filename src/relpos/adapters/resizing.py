"""Another size for the mechanisms of a model, in place: after `replace_position`, or in a model of one's own. And for
timm's own position, after `relpos.retrofit`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from relpos.adapters.common.kinds import path_of
from relpos.adapters.common.retrofitted import is_swapped, make_mechanism, published_class, route, swap_again, unswap
from relpos.adapters.replacements.repositioned import Repositioned, is_retrofitted
from relpos.adapters.replacements.stacks import holders, require_unwrapped
from relpos.adapters.replacements.swin import RepositionedWindowAttention
from relpos.adapters.replacements.torchvision_vit import RepositionedTorchvisionViT
from relpos.adapters.reporting import ResizeReport
from relpos.core import Coordinates, Grid, Sequence
from relpos.core.checks import fail, require_int, shape_of
from relpos.models.pretrained import PretrainedModel
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.sum import grow_part, growth_of_all


def resize_position(
    model: nn.Module, size: int | tuple[int, ...] | Coordinates, rule: str | None = None
) -> ResizeReport:
    """Take every position mechanism inside a model to another size, in place.

    It serves models after `relpos.replace_position` and models of one's own that hold mechanisms. In a vision model of
    timm, the image size and the windows follow (`set_input_size`), and its own position, which is switched off. After
    `relpos.retrofit` timm resamples its own position, and the model stays retrofitted. A mechanism that layers share
    stays shared. Resized tables are new parameters: make the optimizer afterwards.

    Weights saved after it load into a model that was built, replaced and resized in the same way.

    Args:
        model: changed in place.
        size: tokens of a text, or `(rows, columns)` of the image's patches (not of a window, not pixels); or the
            coordinates themselves.
        rule: one of the mechanisms' `growth`, such as "interpolated" or "yarn"; by default the first one of each. A
            mechanism without that rule takes its own first.

    Returns:
        What was done; print it. Mechanisms without rules are left out: they work only at the size they were built for.

    Raises:
        ValueError: no mechanism has a rule, or none has this one; a size that makes windows of one token, or is more
            than eight times the present one, for Swin at least four times; a model of relpos, which has `grow`; a model
            of another library than timm after `relpos.retrofit` alone; a rule for timm's own position. Nothing was
            changed.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> _ = relpos.replace_position(encoder, "relative_1d", coordinates=relpos.Sequence(16))
        >>> print(relpos.resize_position(encoder, 24))
        TransformerEncoder
          position  positions.0 and 1 more: interpolated, Sequence(length=24, start=0, prefix=0)
        >>> encoder(torch.randn(1, 24, 32)).shape
        torch.Size([1, 24, 32])
    """
    if not isinstance(model, nn.Module):
        fail("a model, an nn.Module", shape_of(model), "Pass the model itself.")
    tokens = _coordinates(size)
    if isinstance(model, PretrainedModel):
        fail("a model of another library, or your own", type(model).__name__, "Call model.grow(size, rule): a copy.")
    if not holders(model) and any(map(is_retrofitted, model.modules())):
        return _resized_retrofit(model, tokens, rule)
    require_unwrapped(model)
    found = dict(_mechanisms(model))
    if not found:
        remedy = "Call relpos.replace_position first."
        fail("a model with mechanisms of relpos", f"{type(model).__name__}, which has none", remedy)
    rules = {name: _rule_of(one, rule) for name, one in found.items() if one.growth}
    known = dict.fromkeys(own for one in found.values() for own in one.growth)
    if not rules or (rule is not None and rule not in known):
        wanted = f"a growth rule of its mechanisms ({', '.join(known) or 'none at all'})"
        fail(wanted, "none" if rule is None else repr(rule), "Build the model for that size.")
    image_size = _set_image_size(model, tokens)
    layers = [(one.layer_position, one.resized(tokens)) for one in model.modules() if isinstance(one, Repositioned)]
    of_stack = {id(layer.positions): there for layer, there in layers}
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in rules}
    coordinates = {name: of_stack.get(id(parent), tokens) for name, parent in parents.items()}
    grown: dict[int, Mechanism] = {}
    for name, own in rules.items():
        if id(found[name]) not in grown:
            grown[id(found[name])] = grow_part(found[name], coordinates[name], own)
    for name, parent in parents.items():
        parent._modules[name.rpartition(".")[2]] = grown[id(found[name])]
    for layer, there in layers:
        layer.coordinates = there
        layer.positions.grids = ()
    return ResizeReport(type(model).__name__, rules, coordinates, image_size)


def _resized_retrofit(model: nn.Module, tokens: Coordinates, rule: str | None) -> ResizeReport:
    """Let timm resample the own position of a retrofitted model."""
    if rule is not None:
        fail("no rule for a model's own position, which timm resamples", repr(rule), "Leave rule out.")
    image_size = _set_image_size(model, tokens)
    if image_size is None:
        came = f"{type(model).__name__}, which keeps its own position (relpos.retrofit)"
        remedy = "Other libraries' models take other sizes as they are, or are built for one."
        fail("a model of timm with set_input_size, or with mechanisms of relpos", came, remedy)
    return ResizeReport(type(model).__name__, {}, {}, image_size)


def rules_for_images(model: nn.Module) -> tuple[str, ...]:
    """The rules by which a model of timm or torchvision takes images of another size; () for all others.

    timm resamples its own position. torchvision's Swin takes any image as it is, since its windows stay.
    """
    if path_of(published_class(model)) == _TORCHVISION_SWIN:
        return (AS_IS,)
    if not holders(model):
        return ("interpolated",) if _has_image_size(model) else ()
    if _has_image_size(model) or isinstance(model, RepositionedTorchvisionViT):
        return growth_of_all(one for _, one in _mechanisms(model))
    return ()


def for_images(model: nn.Module, size: tuple[int, int], rule: str) -> nn.Module:
    """A copy of a model for images of so many pixels, by one of `rules_for_images`; the model itself if it stays."""
    if path_of(published_class(model)) == _TORCHVISION_SWIN:
        return model
    larger: Any = copy.deepcopy(model)
    own = larger.patch_embed.patch_size if _has_image_size(model) else (larger.patch_size,) * 2
    patches = Grid(*(pixels // patch for pixels, patch in zip(size, own, strict=True)))
    if not holders(model):
        _set_image_size(larger, patches)
    elif any(one.growth for _, one in _mechanisms(model)):
        resize_position(larger, patches, rule)
    copied: nn.Module = larger
    return copied


def _has_image_size(model: nn.Module) -> bool:
    return hasattr(model, "set_input_size") and hasattr(model, "patch_embed")


_TORCHVISION_SWIN = "torchvision.models.swin_transformer.SwinTransformer"


def _coordinates(size: object) -> Coordinates:
    if isinstance(size, Coordinates):
        return size
    if isinstance(size, tuple | list):
        return Grid(*size)
    require_int(size, "size", at_least=1)
    assert isinstance(size, int)
    return Sequence(size)


def _mechanisms(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Mechanism]]:
    """The outermost mechanisms in a model; one that is shared by each of its names."""
    for name, child in module._modules.items():
        if isinstance(child, Mechanism):
            yield prefix + name, child
        elif child is not None:
            yield from _mechanisms(child, f"{prefix}{name}.")


def _rule_of(mechanism: Mechanism, rule: str | None) -> str:
    return rule if rule in mechanism.growth else mechanism.growth[0]


def _set_image_size(model: nn.Module, patches: Coordinates) -> tuple[int, int] | None:
    """Let timm's models take images of so many patches, their own position with them. The size of the images in
    pixels, if there is such a model."""
    size = None
    for module in model.modules():
        own: Any = module
        if not _has_image_size(own) or not (holders(own) or not holders(model)):
            continue
        if not isinstance(patches, Grid):
            fail("a size in (rows, columns) of patches", repr(patches), f"{type(own).__name__} reads images.")
        _require_plausible(own, patches)
        swapped = [(one, type(one), route(one)) for one in own.modules() if is_swapped(one)]
        for one, _, _ in swapped:
            unswap(one)
        try:
            own.set_input_size(img_size=_pixels(own, patches))
            size = own.patch_embed.img_size
        finally:
            for one, kind, its_route in swapped:
                swap_again(one, kind, its_route)
                if is_retrofitted(one):
                    make_mechanism(one)
    return size


def _pixels(model: Any, patches: Grid) -> tuple[int, ...]:
    return tuple(count * pixels for count, pixels in zip(patches.sizes, model.patch_embed.patch_size, strict=True))


def _require_plausible(model: Any, patches: Grid) -> None:
    """Raise for pixels, or a window, in the place of patches: the tables would be lost, without a later error."""
    now = model.patch_embed.grid_size
    factors = [new / old for new, old in zip(patches.sizes, now, strict=True)]
    windows = [one.window_size for one in model.modules() if isinstance(one, RepositionedWindowAttention)]
    tiny = any(
        old > 1 and old * factor < 1.5 for window in windows for old, factor in zip(window, factors, strict=True)
    )
    if tiny or max(factors) > _MOST_TIMES or (windows and min(factors) >= _MOST_TIMES_OF_WINDOWS):
        came = f"{patches.sizes}, images of {' x '.join(f'{pixels:,}' for pixels in _pixels(model, patches))} pixels"
        wanted = f"(rows, columns) of the image's patches, of which it has {tuple(now)}"
        fail(wanted, came, "Divide the pixels by the patch size; timm then scales the windows.")


_MOST_TIMES, _MOST_TIMES_OF_WINDOWS = 8, 4
"""Pixels in the place of patches are more than the first, for patches of 16; for Swin's of 4 at least the second."""
