"""Argument checks: one clear line that says what was expected, what came, and what to do."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def fail(expected: str, came: str, remedy: str) -> NoReturn:
    """Raise a `ValueError` that names what was expected, what came, and the remedy."""
    raise ValueError(f"expected {expected}; got {came}. {remedy}")


def shape_of(x: object) -> str:
    """A short description of an argument for a message: shape and dtype of a tensor, type and value of the rest."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"
    return f"{type(x).__name__} {x!r}"


def require_tensor(x: object, name: str, *, dims: int | tuple[int, ...]) -> None:
    """Raise unless `x` is a tensor with one of `dims` dimensions."""
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(x, Tensor) or x.dim() not in allowed:
        words = " or ".join(str(d) for d in allowed)
        fail(f"{name} to be a tensor with {words} dimensions", shape_of(x), f"Reshape {name} before the call.")


def require_int(x: object, name: str, *, at_least: int) -> None:
    """Raise unless `x` is a plain integer of at least `at_least` (a bool is not)."""
    if not isinstance(x, int) or isinstance(x, bool) or x < at_least:
        fail(f"{name} to be an integer of at least {at_least}", shape_of(x), f"Pass {name} as a Python int.")


def require_choice(x: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise unless `x` is one of the names in `choices`."""
    if x not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        fail(f"{name} to be one of {listed}", shape_of(x), f"Choose one of them for {name}.")


def require_probability(x: object, name: str) -> None:
    """Raise unless `x` is a number in [0, 1)."""
    if not isinstance(x, int | float) or isinstance(x, bool) or not 0.0 <= x < 1.0:
        fail(f"{name} to be a number in [0, 1)", shape_of(x), f"Pass {name}=0.0 to switch it off.")
