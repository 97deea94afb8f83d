"""`relpos.retrofit(model)`: the same numbers from other libraries' models, in less time and memory from some length on.

report = relpos.retrofit(model)         in place; the report says what was replaced, what was left and why
relpos.restore(model)                   as before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from relpos.adapters.common import interface, switching
from relpos.adapters.common.borders import NEVER, kind_of
from relpos.adapters.common.kinds import PositionKind, Replaced, path_of, refused_classes, replaced_classes
from relpos.adapters.common.libraries import require_importable, strange, version_of
from relpos.adapters.common.retrofitted import is_swapped, published_class, route, swap, swap_again, unswap
from relpos.adapters.common.verification import Verdict, verify_model
from relpos.adapters.replacements.repositioned import Repositioned, is_retrofitted
from relpos.adapters.replacements.stacks import holders, require_unwrapped, take_out
from relpos.adapters.reporting import Left, RetrofitReport, Swapped
from relpos.core.checks import fail, require_flag, require_int, shape_of


def retrofit(
    model: nn.Module,
    *,
    verify: bool = True,
    force: bool = False,
    border: int | None = None,
    progress: Callable[[str], object] | None = None,
) -> RetrofitReport:
    """Let a model of another library compute its own relative position with relpos, in place.

    Outputs and gradients equal the published ones up to rounding, without N x N numbers. Weights, their names, hooks,
    configuration files and the random state stay. These calls run as published: calls below a number of tokens (which
    is measured on CPUs and estimated for GPUs), a single query of a cached decoder, and calls with attention weights, a
    static cache or a mask of pairs. A traced, scripted or exported program is the published one. Dropout inside
    attention draws other numbers of the same probability.

    Args:
        model: changed in place; `relpos.restore` undoes it. Retrofitting it again is an error. Modules that
            `relpos.replace_position` has changed stay as they are.
        verify: run a copy of one module of each kind, published and retrofitted, and compare outputs and gradients.
        force: also serve a version of the library that was not tested. The retrofit is then always verified.
        border: number of tokens from which relpos computes, instead of the device's; 0 for always.
        progress: called with the name of each module to be verified.

    Returns:
        What was replaced, what was left and why, and how it was verified. Print it.

    Raises:
        ValueError: there is nothing to replace, or something cannot be served. Nothing was changed.
        RuntimeError: the verification found a difference. Everything was restored.

    Examples:
        >>> from transformers import T5Config, T5EncoderModel
        >>> config = T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
        >>> model = T5EncoderModel(config)
        >>> report = relpos.retrofit(model)  # print(report)
        >>> type(report).__name__
        'RetrofitReport'
    """
    if not isinstance(model, nn.Module):
        fail("a model, an nn.Module", shape_of(model), "Pass the model itself.")
    for name, flag in (("verify", verify), ("force", force)):
        require_flag(flag, name)
    if border is not None:
        require_int(border, "border", at_least=0)
    if any(map(is_retrofitted, model.modules())):
        fail("an unchanged model", "one that relpos has already changed", "Call relpos.restore(model) first.")
    found, left = _found(model, border)
    _require_served(model, found, left, force)
    if verify or force:
        _require_whole(model)
    chosen = [(name, module, replaced) for name, module, _, replaced in found]
    if getattr(getattr(model, "config", None), "output_attentions", False):
        left += [Left(name, path_of(type(module)), _WEIGHTS_REQUESTED) for name, module, _, _ in found]
    with undone_on_error(model):
        _swap(found, border)
        switching.follow(model)
        verdicts = verify_model(model, progress) if verify or force else []
        if not verdicts and (verify or force):
            kinds = sorted({path_of(published_class(module)).rpartition(".")[2] for _, module, _, _ in found})
            fail(
                "a module that can be verified", f"parts of one ({', '.join(kinds)})", "Pass the encoder or the model."
            )
        _require_agreement(verdicts)
    versions = {kind.library: version_of(kind.library) for _, _, kind, _ in found}
    rows = tuple(Swapped(name, path_of(published_class(module)), one.architecture) for name, module, one in chosen)
    found_on = kind_of(model)
    return RetrofitReport(type(model).__name__, versions, rows, tuple(left), tuple(verdicts), border, found_on)


def restore(model: nn.Module) -> None:
    """Undo `relpos.retrofit` or `relpos.replace_position`, bit for bit; any other model stays as it is.

    Args:
        model: changed in place.

    Raises:
        ValueError: it is not a module, or accelerate has set `forward` on a retrofitted module.

    Examples:
        >>> encoder = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
        >>> report = relpos.replace_position(encoder, "alibi", coordinates=relpos.Sequence(64))
        >>> relpos.restore(encoder)
        >>> hasattr(encoder, "positions")
        False
    """
    if not isinstance(model, nn.Module):
        fail("a model, an nn.Module", shape_of(model), "Pass the model itself.")
    _require_own_forward(model)
    require_unwrapped(model)
    for module in model.modules():
        if is_swapped(module):
            unswap(module)
            interface.switch_back(getattr(module, "config", None))
    switching.follow(model)
    take_out(model)


def _require_own_forward(model: nn.Module) -> None:
    """Raise if a swapped module has its own `forward` attribute: it would still call the class that is removed."""
    for name, module in model.named_modules():
        if is_swapped(module) and "forward" in vars(module):
            fail(
                "modules whose forward is not overridden",
                f"{name or 'the model'}, whose forward is",
                "Take accelerate's off first: accelerator.unwrap_model(model, keep_fp32_wrapper=False).",
            )


def _found(
    model: nn.Module, border: int | None
) -> tuple[list[tuple[str, nn.Module, PositionKind, Replaced]], list[Left]]:
    """The modules to replace, and those that are left, with the reason."""
    found: list[tuple[str, nn.Module, PositionKind, Replaced]] = []
    left: list[Left] = []
    replaced_before = {id(module) for holder in holders(model) for module in holder.modules()}
    for name, module in model.named_modules():
        path = path_of(type(module))
        if id(module) in replaced_before or isinstance(module, Repositioned):
            if path in replaced_classes():
                left.append(Left(name, path, "its position is already relpos's, by replace_position"))
            continue
        if path in refused_classes():
            left.append(Left(name, path, refused_classes()[path][1].reason))
        if path not in replaced_classes():
            continue
        kind, replaced = replaced_classes()[path]
        reason = None if replaced.unfit is None else replaced.unfit(module)
        tokens = None if replaced.tokens is None else replaced.tokens(module)
        least = min(replaced.mixin.border, replaced.mixin.training_border) if border is None else border
        if reason is None and tokens == 1:
            reason = "windows of one token have no position"
        if reason is None and tokens is not None and tokens < least:
            pays = "nowhere that it was timed" if least >= NEVER else f"from {least} on"
            reason = f"windows of {tokens} tokens run as fast as published; relpos pays {pays}"
        if reason is not None:
            left.append(Left(name, path, reason))
        else:
            found.append((name, module, kind, replaced))
    return found, left


def _require_served(
    model: nn.Module, found: list[tuple[str, nn.Module, PositionKind, Replaced]], left: list[Left], force: bool
) -> None:
    """Raise if nothing can be replaced or something prevents it, before anything changes."""
    if not found:
        reasons = sorted({f"{one.path.rpartition('.')[2]}: {one.reason}" for one in left})
        served = sorted({one.architecture for _, one in replaced_classes().values()})
        if reasons:
            fail(
                "a position that relpos.retrofit supports",
                f"{type(model).__name__} ({'; '.join(reasons)})",
                _SEE_DOCUMENT,
            )
        fail(
            "a model of a known library with a relative position",
            f"{type(model).__name__}, which has no known relative position",
            f"Known: {', '.join(served)}; {_SEE_DOCUMENT}",
        )
    for library in sorted({kind.library for _, _, kind, _ in found}):
        require_importable(library)
    if torch.is_inference_mode_enabled():
        fail("a retrofit outside torch.inference_mode()", "one inside", "The verification needs gradients.")
    for name, module, kind, _ in found:
        if "forward" in vars(module):
            fail(
                "modules whose forward is not overridden",
                f"{name or 'the model'}, whose forward is",
                "Retrofit before accelerate adds hooks.",
            )
        if kind.switches and interface.is_shared(getattr(module, "config", None)):
            came = "one that shares its configuration with a retrofitted model"
            fail("a model with its own configuration", came, "Build it with copy.deepcopy(config).")
    for path in sorted({path_of(type(module)) for _, module, _, _ in found}):
        kind, replaced = replaced_classes()[path]
        reason = strange(path, replaced.reads, switches=kind.switches)
        if reason and not force:
            fail("a tested version of the library", reason, "Install that version, or pass force=True to verify it.")
    for _, module, kind, _ in found:
        own = interface.implementation(getattr(module, "config", None))
        if kind.switches and own not in interface.SERVED:
            fail("attn_implementation sdpa or eager", own, 'Load the model with attn_implementation="sdpa".')


_SEE_DOCUMENT = "docs/retrofit.md lists what is supported."
_WEIGHTS_REQUESTED = "config.output_attentions=True: all calls run as published; set it to False and retrofit again"


def _require_whole(model: nn.Module) -> None:
    """Raise if weights are on the meta device or sharded, so that a verification cannot copy them."""
    for name, x in model.named_parameters():
        if type(x.data).__name__ == "DTensor":
            remedy = "Retrofit before fully_shard, or pass verify=False."
            fail("unsharded weights to copy for the verification", f"{name}, which is sharded", remedy)
        if x.is_meta:
            remedy = "Load the weights first, or pass verify=False."
            fail("weights to copy for the verification", f"{name} on the meta device", remedy)


def _swap(found: list[tuple[str, nn.Module, PositionKind, Replaced]], border: int | None) -> None:
    configs: dict[int, Any] = {}
    for _, module, kind, replaced in found:
        swap(module, replaced.mixin, border)
        if kind.switches and hasattr(module, "config"):
            route(module).switched = True
            configs[id(module.config)] = module.config
    for config in configs.values():
        interface.switch(config)


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """If the block fails, undo its changes to the model; earlier changes stay."""
    before, had_holders = {id(module) for module in model.modules() if is_swapped(module)}, bool(holders(model))
    try:
        yield
    except BaseException:
        for module in model.modules():
            if is_swapped(module) and id(module) not in before:
                unswap(module)
                interface.switch_back(getattr(module, "config", None))
        switching.follow(model)
        if not had_holders:
            take_out(model)
        raise


@contextmanager
def without_retrofit(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Undo `retrofit` in a model, permanently unless the block raises. Yields the names of the modules."""
    swapped = {name: module for name, module in model.named_modules() if is_swapped(module)}
    before = [(module, type(module), route(module)) for module in swapped.values()]
    configs = [module.config for module in swapped.values() if interface.is_switched(getattr(module, "config", None))]
    restore(model)
    try:
        yield tuple(swapped)
    except BaseException:
        for module, kind, own in before:
            swap_again(module, kind, own)
        for config in configs:
            interface.switch(config)
        switching.follow(model)
        raise


def _require_agreement(verdicts: list[Verdict]) -> None:
    wrong = [verdict for verdict in verdicts if verdict.fault is not None]
    if wrong:
        lines = "; ".join(f"{verdict.module} ({verdict.path.rpartition('.')[2]}): {verdict.fault}" for verdict in wrong)
        remedy = "" if any(verdict.ran for verdict in wrong) else " verify=False retrofits it unverified."
        raise RuntimeError(
            f"expected a retrofit that computes the published numbers; got {lines}. The model is restored.{remedy}"
        )
