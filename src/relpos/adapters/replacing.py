"""`relpos.replace_position(model, position)`: models of other libraries with another position mechanism.

report = relpos.replace_position(model, "relative_2d")    in place; the report says what was switched off
relpos.restore(model)                                     as before

Retrofit keeps a model's results. This changes them: the model's own position is switched off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relpos.adapters.common import interface, switching
from relpos.adapters.common.above import Above
from relpos.adapters.common.retrofitted import route
from relpos.adapters.replacements.finding import require_known_source, stacks_of
from relpos.adapters.replacements.frozen import FrozenWarning
from relpos.adapters.replacements.repositioned import (
    CHILD,
    LayerPosition,
    ReplacedPositions,
    Repositioned,
    is_growing,
    put_in_front,
)
from relpos.adapters.replacements.stacks import Given, Stack
from relpos.adapters.replacements.states import LayerStates
from relpos.adapters.reporting import OwnPosition, ReplacementReport
from relpos.adapters.retrofitting import undone_on_error, without_retrofit
from relpos.core import Coordinates, Sequence, require_coordinates
from relpos.core.checks import fail, require_flag, shape_of
from relpos.models.positions import PositionChoice, canonical
from relpos.position import find
from relpos.position.base.states import terms_at_rest
from relpos.position.base.wrapped import acts_on_tokens

OWN = "own"


def replace_position(
    model: nn.Module,
    position: PositionChoice,
    *,
    coordinates: Coordinates | None = None,
    causal: bool | None = None,
    shared: bool = False,
    trainable: bool = True,
    init_std: float = 0.0,
    force: bool = False,
) -> ReplacementReport:
    """Replace the position of a model of timm, torchvision, transformers or PyTorch by a mechanism, in place.

    The model's own absolute embedding, tables, rotation or slopes are switched off; they stay in its state dict and
    require no gradient. The mechanisms are a child named `positions` of the module that holds the layers, so they are
    saved, moved and trained with it. To load a saved model, replace in a fresh one and call `load_state_dict`. Prefix
    tokens, grids, causal and padding masks, caches and grouped heads are read from the model.

    PEFT freezes every parameter it is not told to train. With `modules_to_save=["positions"]` in its configuration the
    mechanisms are trained, saved and loaded with an adapter. Training with a learned position frozen at its initial
    values warns once.

    Args:
        model: changed in place; `relpos.restore` undoes it. A retrofit is undone first, and the report says so.
            `relpos.retrofit` may follow and leaves replaced modules as they are.
        position: a mechanism's name ("relative_2d"), several joined with "+", a function from a `relpos.Site` to a
            mechanism, None for no position, or "own" to keep the model's. Names joined with "~", or a tuple of choices,
            are a schedule over the layers of each stack: layer i takes entry i modulo their number. The model's own
            masks (sliding windows) stay as they are.
        coordinates: of the tokens, for modules without any: `nn.MultiheadAttention`, `nn.TransformerEncoder`. For a
            text model, the longest text, if it differs from the model's configuration.
        causal: for the same modules, whether a query attends only to itself and earlier tokens. Masks stay arguments of
            calls.
        shared: True for one mechanism for all layers of a stack (in a schedule, of an entry), False for one per layer.
        trainable: False freezes the mechanisms' parameters, without a warning.
        init_std: standard deviation of initial learned positions. With 0, tables start at 0, and a model with trained
            weights first computes the same as without position.
        force: also serve a version of the library that was not tested.

    Returns:
        What was switched off, and what replaces it. Print it.

    Raises:
        ValueError: no known attention is found, or its tokens cannot have this position. Nothing was changed.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> print(relpos.replace_position(encoder, "alibi", coordinates=relpos.Sequence(64)))
        TransformerEncoder
          off       nothing: the model has no position of its own
          position  alibi, one per layer: 2 layers of the model itself, texts of at most 64 tokens
    """
    if not isinstance(model, nn.Module):
        fail("a model, an nn.Module", shape_of(model), "Pass the model itself.")
    if coordinates is not None:
        require_coordinates(coordinates, "coordinates")
    if causal is not None:
        require_flag(causal, "causal")
    require_flag(shared, "shared")
    require_flag(trainable, "trainable")
    require_flag(force, "force")
    if torch.is_inference_mode_enabled():
        fail(
            "a replacement outside torch.inference_mode()", "one inside", "Parameters created there cannot be trained."
        )
    if any(isinstance(module, Repositioned) for module in model.modules()):
        fail("an unchanged model", "one that relpos has already changed", "Call relpos.restore(model) first.")
    stacks = stacks_of(model, Given(coordinates, causal))
    rows = tuple(
        OwnPosition(stack.path(own.name), own.what, tuple(map(stack.path, own.parameters)))
        for stack in stacks
        for own in stack.own
    )
    if position == OWN:
        return ReplacementReport(type(model).__name__, OWN, rows, (), shared, kept=True)
    _require_axes(position, stacks)
    with without_retrofit(model) as restored:
        _require_implementation(stacks)
        if not force:
            require_known_source(model)
        built = [_built(stack, position, shared, trainable, init_std) for stack in stacks]
        warning = FrozenWarning(Above(model))
        with undone_on_error(model):
            for stack, positions in zip(stacks, built, strict=True):
                _put_in(stack, positions)
                positions.begin(warning)
            switching.follow(model)
    layers = tuple(map(_layers_of, stacks))
    learns = any(x.requires_grad for positions in built for x in positions.parameters())
    adapted = any(type(module).__module__.startswith("peft.") for module in model.modules())
    name = _name_of(position, stacks)
    return ReplacementReport(type(model).__name__, name, rows, layers, shared, False, restored, learns, adapted)


def _layers_of(stack: Stack) -> str:
    tokens = stack.site.queries
    where = f"texts of at most {tokens.count} tokens" if is_growing(tokens) else str(tokens)
    count = len(stack.layers)
    return f"{count} layer{'s' if count > 1 else ''} of {stack.name or 'the model itself'}, {where}"


def _name_of(position: PositionChoice, stacks: list[Stack]) -> str:
    position = canonical(position, axes=stacks[0].site.queries.axes)
    if isinstance(position, str):
        return position
    return (
        "none" if position is None else f"{'mechanisms' if isinstance(position, tuple) else 'a mechanism'} of your own"
    )


def _require_axes(position: PositionChoice, stacks: list[Stack]) -> None:
    """Raise if a preset does not fit a model's axes."""
    for entry in position if isinstance(position, tuple | list) else ():
        _require_axes(entry, stacks)
    if not isinstance(position, str):
        return
    for stack in stacks:
        axes = find(position, stack.site.queries.axes).token_axes
        if stack.site.queries.axes not in axes:
            came = f"{position!r}, which is for {' or '.join(map(str, axes))}"
            tokens = f"tokens of {type(stack.holder).__name__}, which have {stack.site.queries.axes}"
            fail(f"a position with the axes of the {tokens}", came, "Choose another: relpos list positions.")


def _require_implementation(stacks: list[Stack]) -> None:
    """Raise if a transformers model uses an attention implementation that cannot be switched."""
    for config in (config for config in map(_config_of, stacks) if config is not None):
        if interface.is_shared(config):
            came = "one that shares its configuration with a model that relpos has changed"
            fail("a model with its own configuration", came, "Build it with copy.deepcopy(config).")
        own = interface.implementation(config)
        if own not in interface.SERVED:
            fail("attn_implementation sdpa or eager", own, 'Load the model with attn_implementation="sdpa".')
        if getattr(config, "output_attentions", False):
            fail("a model that returns no attention weights", "config.output_attentions=True", "Set it to False.")


def _config_of(stack: Stack) -> Any:
    """The configuration of a stack's layers, which selects their attention function; None outside transformers."""
    return getattr(stack.layers[0], "config", None)


def _built(stack: Stack, position: PositionChoice, shared: bool, trainable: bool, init_std: float) -> ReplacedPositions:
    """The mechanisms of a stack, tested on its coordinates before anything changes."""
    site = stack.site
    site = type(site)(**{**vars(site), "init_std": init_std})
    with_states = stack.mixin.hands_on_states
    positions = ReplacedPositions.of_layers(
        position, site, len(stack.layers), shared=shared, trainable=trainable, with_states=with_states
    )
    first = positions.sums()[0]
    if acts_on_tokens(first) and not stack.tokens:
        remedy = "Choose one that acts in attention, such as a bias or a rotation."
        came = f"{_name_of(position, [stack])}, which is added to tokens"
        fail(f"a position that acts in attention for {type(stack.holder).__name__}", came, remedy)
    weight = next(stack.holder.parameters())
    positions.to(device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        count = min(site.queries.count, 8) if is_growing(site.queries) else site.queries.count
        x = weight.new_zeros(1, site.num_heads, count, site.head_dim)
        for number in range(len(positions)):
            layer, states = LayerPosition(positions, number, site.queries), weight.new_zeros(1, count, site.embed_dim)
            layer.terms(count, count, LayerStates(states, layer.remembered(states))).check(x, x, x)
        for one in (
            positions.sums()[: positions.period] if is_growing(site.queries) and site.causal and count > 1 else ()
        ):
            terms_at_rest(one, Sequence(1, start=count - 1), Sequence(count))
        LayerPosition(positions, 0, site.queries).embed(weight.new_zeros(1, count, site.embed_dim))
    return positions


def _put_in(stack: Stack, positions: ReplacedPositions) -> None:
    """Switch off a stack's own position and insert the mechanisms."""
    names = (name for own in stack.own for name in own.parameters)
    positions.frozen = tuple(name for name in names if stack.holder.get_parameter(name).requires_grad)
    stack.holder.add_module(CHILD, positions)
    holder = Above(stack.holder)
    for name in positions.frozen:
        stack.holder.get_parameter(name).requires_grad_(False)
    for number, layer in enumerate(stack.layers):
        put_in_front(layer, stack.mixin, LayerPosition(positions, number, stack.site.queries, holder))
    for module, mixin in (*stack.tokens, *stack.others):
        put_in_front(module, mixin, LayerPosition(positions, 0, stack.site.queries, holder))
    config = _config_of(stack)
    if config is not None:
        interface.switch(config)
        for layer in stack.layers:
            route(layer).switched = True
