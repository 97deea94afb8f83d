"""Argument checks: one clear line that says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos_command.visible import visible

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The integers that all of PyTorch computes with."""


def fail(expected: str, came: str, remedy: str) -> NoReturn:
    """Raise a `ValueError` that names what was expected, what came, and the remedy."""
    error: Any = ValueError(visible(f"expected {expected}; got {came}. {remedy}", keep="\n"))
    error.fault = visible(f"expected {expected}; got {came}", keep="\n")
    raise error


def without_remedy(error: Exception) -> Exception:
    """The same error for readers of a file. The remedy for a caller, such as another name, would change what the file
    says about its weights."""
    fault = getattr(error, "fault", None)
    return error if fault is None else ValueError(fault)


def shape_of(x: object) -> str:
    """A short description of an argument for a message: shape and dtype of a tensor, type and value of the rest."""
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        if x.is_nested:
            return f"a nested tensor of dtype {dtype}"  # which has no shape
        layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.').strip('_')} "
        return f"a {layout}tensor of shape {tuple(x.shape)} and dtype {dtype}"
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    kind = type(x).__name__
    try:
        text = " ".join(repr(x).split())
    except ValueError:  # Python writes no integer of thousands of digits
        return f"{kind} of {x.bit_length()} bits" if isinstance(x, int) else f"{kind} with an integer too long to write"
    text = text if len(text) <= 100 else text[:97] + "..."
    return text if text.startswith(f"{kind}(") else f"{kind} {text}"


def known_value(x: Tensor, read: Callable[[Tensor], Tensor]) -> Any:
    """The value of `read(x)` as Python numbers, or None where it cannot be known at once: on a device other than
    the CPU, or while a compiler or a function transform traces."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None
    try:
        return read(x).tolist()
    except RuntimeError:  # a transform maps over it
        return None


def broadcasts(size: int, count: int) -> bool:
    """Whether an axis of this size broadcasts to `count`: it is 1 or `count`. `in` would misread symbolic sizes."""
    return size == 1 or size == count


def require_tensor(x: object, name: str, *, dims: int | tuple[int, ...]) -> None:
    """Raise unless `x` is a tensor with one of `dims` dimensions."""
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(x, Tensor) or x.dim() not in allowed:
        words = " or ".join(str(d) for d in allowed)
        fail(f"{name} to be a tensor with {words} dimensions", shape_of(x), f"Reshape {name} before the call.")
    if not is_dense(x):
        fail(f"{name} to be a dense tensor", shape_of(x), AS_DENSE)


AS_DENSE = "Convert it: x.to_dense(), or x.to_padded_tensor(0.0)."
"""What to do with a tensor that is not dense."""


def is_dense(x: Tensor) -> bool:
    """Whether a tensor has a number at every index: it is neither sparse nor nested, nor in a library's own layout."""
    return x.layout is torch.strided and not x.is_nested


COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes for computation. PyTorch has other floating-point dtypes (8 bits), which few of its operators support."""


def require_computed(x: Tensor, name: str, remedy: str) -> None:
    """Raise unless a tensor has a dtype in `COMPUTED`."""
    if x.dtype in COMPUTED:
        return
    if x.is_floating_point():
        fail(f"{name} in float32, float64, bfloat16 or float16", shape_of(x), remedy)
    fail(f"{name} to be floating point", shape_of(x), remedy)


def require_pairs(x: object, name: str, dims: tuple[int, ...]) -> None:
    """Raise unless `x` is a boolean tensor of pairs of query and key."""
    require_tensor(x, name, dims=dims)
    assert isinstance(x, Tensor)
    if x.is_floating_point():
        fail(f"a boolean tensor for {name}", shape_of(x), "To add numbers to scores, pass position=DenseBias(x).")
    if x.dtype != torch.bool:
        remedy = "Pass x.bool(); Mask.padding(x.bool()) for a tokenizer's, Mask.packed(x) for document numbers."
        fail(f"a boolean tensor for {name}, True where a pair may attend", shape_of(x), remedy)


def is_integer(x: object) -> TypeGuard[int]:
    """Whether `x` is an integer, and no bool: an int, or the symbol that stands for any length while a program is
    exported."""
    return isinstance(x, _INTEGERS) and not isinstance(x, bool)


_INTEGERS = (int, torch.SymInt)


def require_int(x: object, name: str, *, at_least: int | None, remedy: str | None = None) -> None:
    """Raise unless `x` is a plain integer (a bool is not) of at least `at_least`; of any sign where that is None."""
    if not is_integer(x) or (at_least is not None and x < at_least):
        usual = "Pass a larger one." if is_integer(x) else f"Pass {name} as a Python int."
        wanted = "an integer" if at_least is None else f"an integer of at least {at_least}"
        fail(f"{name} to be {wanted}", shape_of(x), remedy or usual)
    require_fits(x, name)


def require_fits(x: object, name: str) -> None:
    """Raise if an integer does not fit PyTorch's 64 bits. Not checked while a graph is traced, where a size may be a
    symbol, which the check would bound."""
    if isinstance(x, int) and not torch.compiler.is_compiling() and not -(2**63) <= x < 2**63:
        fail(f"{name} to be an integer of at most 64 bits", shape_of(x), f"Pass a smaller number for {name}.")


def consecutive(part: slice, count: int | None) -> tuple[int, int] | None:
    """Start and stop of a slice of at least one consecutive token out of `count`.

    None if `count` is not known and the slice alone does not determine them.
    """
    if count is None and part.stop is not None and min(part.start or 0, part.stop) >= 0:
        count = part.stop
    start, stop, step = part.indices(1 if count is None else count)
    if step != 1 or (count is not None and stop <= start):
        fail("a slice of consecutive tokens, at least one", str(part), "Use slice(start, stop) inside the length.")
    return None if count is None else (start, stop)


def require_flag(x: object, name: str, remedy: str = "Pass one of them.") -> None:
    """Raise unless `x` is True or False."""
    if not isinstance(x, bool):
        fail(f"{name} to be True or False", shape_of(x), remedy)


NO_OTHER = "No other is supported: trained weights would compute something else with these."
"""Replaces "Choose one of them" if weights of another choice have the same shapes."""


def require_choice(x: object, name: str, choices: tuple[str, ...], remedy: str = "") -> None:
    """Raise unless `x` is one of the names in `choices`.

    Args:
        remedy: what to do if trained weights determine the choice. Then "Choose one of them" would do harm, and so
            would a suggestion that is not very near.
    """
    if x not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        near = _nearest(x.lower() if remedy and isinstance(x, str) else x, choices, 0.8 if remedy else 0.5)
        remedy = f"{remedy or f'Choose one of them for {name}.'} {near}"
        fail(f"{name} to be one of {listed}", shape_of(x), remedy.strip())


def require_name(
    name: object, known: Iterable[str], what: str, aliases: Iterable[str] = (), *, listed_by: str | None = None
) -> None:
    """Raise unless `name` is one of the known ones; the message offers the nearest, aliases included.

    Args:
        what: a name of it, with its article.
        listed_by: where all names are listed, if they are too many for a message, which then has the nearest.
    """
    names = list(known)
    if isinstance(name, str) and name in names:
        return
    came = repr(name) if isinstance(name, str) else shape_of(name)
    asked = _nearest(name, [*names, *aliases])
    if listed_by is None:
        fail(f"{what} among {', '.join(names)}", came, asked or "Choose one of them.")
    near = difflib.get_close_matches(name, names, n=_NEAREST, cutoff=0.0) if isinstance(name, str) else names[:_NEAREST]
    fail(what, came, f"{asked} Such as {', '.join(near)}; {listed_by}".strip())


_NEAREST = 6
"""How many names a message has, of many."""


def _nearest(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The question whether the nearest of the known names was meant, or nothing where none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff) if isinstance(name, str) else []
    return f"Did you mean {near[0]!r}?" if near else ""


def unknown_argument(of: str, name: str, known: Sequence[str], remedy: str | None = None) -> str:
    """The message for an argument that a function or class does not have: for a `TypeError`, as Python's."""
    remedy = remedy or _nearest(name, known) or "Leave it out."
    return f"expected an argument of {of} ({', '.join(known)}); got {name}=. {remedy}"


def require_probability(x: object, name: str) -> None:
    """Raise unless `x` is a number in [0, 1)."""
    if not _is_number(x) or not 0.0 <= x < 1.0:  # type: ignore[operator]
        remedy = f"Pass {name}=0.0 to switch it off." if _is_number(x) else _AS_NUMBER.format(name)
        fail(f"{name} to be a number in [0, 1)", shape_of(x), remedy)


_LARGEST = sys.float_info.max  # a larger integer has no float


def require_number(x: object, name: str, bound: Literal["above 0", "of at least 0"], remedy: str) -> None:
    """Raise unless `x` is a finite number within the bound (a bool is not a number).

    Args:
        remedy: for a number out of the bound. For anything else, such as a tensor, the message asks for a Python
            number.
    """
    if not _is_number(x):
        fail(f"{name} to be a number {bound}", shape_of(x), _AS_NUMBER.format(name))
    if not -_LARGEST <= x <= _LARGEST or x < 0 or (x == 0 and bound == "above 0"):  # type: ignore[operator]
        fail(f"{name} to be a number {bound}", shape_of(x), remedy)


_AS_NUMBER = "Pass {} as a Python number."


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def require_floating(x: object, name: str, *, dims: int | tuple[int, ...]) -> None:
    """Raise unless `x` is a floating-point tensor of `dims` dimensions."""
    require_tensor(x, name, dims=dims)
    assert isinstance(x, Tensor)
    require_computed(x, name, "Convert it with .float().")


def require_wide(x: Tensor, name: str, why: str) -> None:
    """Raise unless `x` is float32 or float64. FSDP casts what enters a sharded block, including terms."""
    if x.dtype not in (torch.float32, torch.float64):
        remedy = (
            f"{why} If FSDP casts the inputs of a sharded block, compute the terms inside it, or set "
            "cast_forward_inputs=False in its policy."
        )
        fail(f"{name} in float32 or float64", shape_of(x), remedy)


def require_device(x: Tensor, name: str, device: torch.device, remedy: str) -> None:
    """Raise unless `x` is on `device`."""
    if x.device != device:
        on_meta = x.is_meta or device.type == "meta"
        fail(f"{name} on {device}", str(x.device), f"{remedy} {_WITHOUT_NUMBERS}" if on_meta else remedy)


_WITHOUT_NUMBERS = (
    "Tensors on meta have no numbers, and .to(device) cannot move them. For parameters use "
    "load_state_dict(weights, assign=True)."
)


CPU = torch.device("cpu")
"""For comparing devices: `device.type` is slower, because it makes a string."""


_WITHOUT_AUTOCAST = ("meta", "vulkan", "lazy")
"""Types of devices that raise when asked whether autocast is on. `torch.amp.is_autocast_available` would tell, but
Dynamo of torch 2.10 and 2.11 cannot trace it."""


def _autocast(device: torch.device) -> str | None:
    """The type of a device if autocast is on there, else None."""
    kind = "cpu" if device == CPU else device.type
    return kind if kind not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind) else None


def under_autocast(x: Tensor) -> tuple[torch.dtype, bool]:
    """The dtype in which `x` is computed (autocast's if that is on, except for float64), and whether autocast is on."""
    kind = _autocast(x.device)
    return (x.dtype if kind is None or x.dtype == torch.float64 else torch.get_autocast_dtype(kind)), kind is not None


def dtype_under_autocast(x: Tensor) -> torch.dtype:
    """The dtype in which `x` is computed."""
    return under_autocast(x)[0]


_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context with autocast off on a device."""
    kind = _autocast(device)
    return _NOTHING if kind is None else torch.autocast(kind, enabled=False)


def require_like(x: Tensor, name: str, weight: Tensor) -> None:
    """Raise unless `x` fits a layer's `weight`: on its device, and in its dtype, possibly by autocast."""
    require_device(x, name, weight.device, f"Move the {name} or the module with .to(device).")
    if dtype_under_autocast(x) != dtype_under_autocast(weight):
        wanted = f"{name} in {str(weight.dtype).removeprefix('torch.')}, as the layer's weights are"
        fail(wanted, shape_of(x), "Convert one of them with .to(dtype), or use torch.autocast.")


def require_tokens(x: object, width: int, weight: Tensor, *, jagged: bool = False) -> None:
    """Raise unless `x` holds floating-point tokens `[B, N, width]` that fit a layer's `weight`.

    Args:
        jagged: whether lengths may differ within the batch, for layers that see one token at a time.
    """
    tensor = isinstance(x, Tensor) and (is_dense(x) or (jagged and x.layout is torch.jagged))
    if not tensor or x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():  # type: ignore[attr-defined]
        fail(f"floating-point tokens of shape [B, N, {width}]", shape_of(x), "Layout is [batch, tokens, width].")
    assert isinstance(x, Tensor)
    require_like(x, "tokens", weight)
