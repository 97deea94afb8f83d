"""Argument checks: one clear line that says what was expected, what came, and what to do."""

from __future__ import annotations

import math
from typing import Literal, NoReturn

import torch
from torch import Tensor


def fail(expected: str, came: str, remedy: str) -> NoReturn:
    """Raise a `ValueError` that names what was expected, what came, and the remedy."""
    raise ValueError(f"expected {expected}; got {came}. {remedy}")


def shape_of(x: object) -> str:
    """A short description of an argument for a message: shape and dtype of a tensor, type and value of the rest."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    text, kind = " ".join(repr(x).split()), type(x).__name__
    text = text if len(text) <= 100 else text[:97] + "..."
    return text if text.startswith(f"{kind}(") else f"{kind} {text}"


def require_tensor(x: object, name: str, *, dims: int | tuple[int, ...]) -> None:
    """Raise unless `x` is a tensor with one of `dims` dimensions."""
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(x, Tensor) or x.dim() not in allowed:
        words = " or ".join(str(d) for d in allowed)
        fail(f"{name} to be a tensor with {words} dimensions", shape_of(x), f"Reshape {name} before the call.")


def require_int(x: object, name: str, *, at_least: int) -> None:
    """Raise unless `x` is a plain integer of at least `at_least` (a bool is not)."""
    if not isinstance(x, int) or isinstance(x, bool) or x < at_least:
        small = isinstance(x, int) and not isinstance(x, bool)
        remedy = f"Its smallest value is {at_least}." if small else f"Pass {name} as a Python int."
        fail(f"{name} to be an integer of at least {at_least}", shape_of(x), remedy)


def require_choice(x: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise unless `x` is one of the names in `choices`."""
    if x not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        fail(f"{name} to be one of {listed}", shape_of(x), f"Choose one of them for {name}.")


def require_probability(x: object, name: str) -> None:
    """Raise unless `x` is a number in [0, 1)."""
    if not isinstance(x, int | float) or isinstance(x, bool) or not 0.0 <= x < 1.0:
        fail(f"{name} to be a number in [0, 1)", shape_of(x), f"Pass {name}=0.0 to switch it off.")


def require_number(x: object, name: str, bound: Literal["above 0", "of at least 0"], remedy: str) -> None:
    """Raise unless `x` is a finite number within the bound (a bool is none)."""
    number = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    if not number or x < 0 or (x == 0 and bound == "above 0"):  # type: ignore[operator]
        fail(f"{name} to be a number {bound}", shape_of(x), remedy)


def require_floating(x: object, name: str, *, dims: int) -> None:
    """Raise unless `x` is a floating-point tensor of `dims` dimensions."""
    require_tensor(x, name, dims=dims)
    assert isinstance(x, Tensor)
    if not x.is_floating_point():
        fail(f"{name} to be floating point", shape_of(x), "Convert it with .float().")


def require_device(x: Tensor, name: str, device: torch.device, remedy: str) -> None:
    """Raise unless `x` is on `device`."""
    if x.device != device:
        fail(f"{name} on {device}", str(x.device), remedy)


def require_tokens(x: object, width: int, device: torch.device) -> None:
    """Raise unless `x` holds floating-point tokens `[B, N, width]` on `device`."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():
        fail(f"floating-point tokens of shape [B, N, {width}]", shape_of(x), "Layout is [batch, tokens, width].")
    require_device(x, "tokens", device, "Move the tokens or the module with .to(device).")
