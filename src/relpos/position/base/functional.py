"""A module in functional form: its twin has other tensors as its parameters, and the module stays as it is.

`torch.func.functional_call` swaps the tensors of the module itself and swaps them back, which another thread sees. A
twin is a second object instead. It has its own dictionaries of parameters, buffers and submodules and shares all else,
so it costs a few Python objects and copies no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from relpos.core.checks import fail, require_device, require_name, shape_of

M = TypeVar("M", bound=nn.Module)


def twin(module: M, tensors: Mapping[str, Tensor]) -> M:
    """`module` with some of its parameters and persistent buffers replaced; it may only be read.

    Args:
        module: stays as it is.
        tensors: by the names of `named_parameters()`, and of the buffers in its state dict. A tensor that several
            modules share has one name and is replaced in all of them.

    Raises:
        ValueError: no such name, or a tensor of another shape, device or kind (floating point or not). A module on the
            meta device takes tensors of any device.
    """
    given = checked(module, tensors)
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return _twin(module, {id(named[name]): x for name, x in given.items()})


def checked(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a dictionary, checked as replacements for a module's; raises as `twin` does."""
    named = dict(module.named_parameters()) | _persistent_buffers(module)
    if not isinstance(tensors, Mapping):
        remedy = 'Write {"name": tensor}, with the names of named_parameters().'
        fail("tensors by the names of parameters", shape_of(tensors), remedy)
    own = type(module).__name__
    for name, x in tensors.items():
        if not named:
            fail(f"no tensors for {own}, which has no parameters", repr(name), "Pass an empty dictionary.")
        require_name(name, named, f"the name of a parameter of {own}")
        _require_fit(x, f"{name} of {own}", named[name])
    return dict(tensors)


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers in its state dict."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, x in part._buffers.items():
            if x is not None and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = x
    return found


def _require_fit(x: object, name: str, own: Tensor) -> None:
    """Raise unless `x` can replace a tensor of a module. Its precision may differ."""
    if not isinstance(x, Tensor) or x.shape != own.shape or x.is_floating_point() != own.is_floating_point():
        kind = "floating-point" if own.is_floating_point() else str(own.dtype).removeprefix("torch.")
        fail(f"{name} as a {kind} tensor of shape {tuple(own.shape)}", shape_of(x), "Shape it like the parameter.")
    if not own.is_meta:  # a module on the meta device takes tensors of any device
        require_device(x, name, own.device, "Move it, or the mechanism, with .to(device).")


def _twin(module: M, given: dict[int, Tensor]) -> M:
    """The twin, with tensors by the identity of those they replace."""
    other = object.__new__(type(module))  # not `copy.copy`, which a compiler cannot trace
    state = other.__dict__
    state.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: given.get(id(x), x) for name, x in state[kind].items()}
    state["_modules"] = {name: None if part is None else _twin(part, given) for name, part in state["_modules"].items()}
    return other
