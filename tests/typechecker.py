"""beartype behind jaxtyping's import hook, as tests can afford it: each function's first calls in a test, then a part.

A check costs more than what many of our functions do: it binds the arguments and looks at them twice. So a function is
checked in its first `FIRST` calls in each test and in one of `EVERY` after them, and what checks it is made when it is
first checked: a function inside another, which is new in each call, would be compiled anew every time.
"""

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Self

import beartype
import jaxtyping
import torch

FIRST = 8
EVERY = 32

_CHECK = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_CHECKED_BY_JAXTYPING = jaxtyping.jaxtyped
_CONFIG = jaxtyping.config
_CALLS: dict[CodeType, int] = {}
"""Calls of each function in the test that runs."""


def new_test() -> None:
    """Calls are counted from 0."""
    _CALLS.clear()


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations enforced, as jaxtyping wants it: one method at a time, where `Self` has no class
    to mean. Those that say `Self` are left alone."""
    annotations = getattr(function, "__annotations__", {})
    for name in [name for name, annotation in annotations.items() if annotation in ("Self", Self)]:
        del annotations[name]
    return _CHECK(function)


def jaxtyped(fn: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """`jaxtyping.jaxtyped`, in the calls that are checked."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(fn, type):
        plain = vars(fn).get("__init__")
        _CHECKED_BY_JAXTYPING(fn, typechecker=typechecker)
        checked = vars(fn).get("__init__")
        if isinstance(plain, FunctionType) and checked is not plain:  # a dataclass's
            fn.__init__ = _in_part(plain, lambda: checked)  # type: ignore[misc]
        return fn
    if getattr(fn, "__name__", "") == "__torch_function__":  # of anything; a mode's is called for all that tensors do
        return fn
    if not isinstance(fn, FunctionType):
        return _CHECKED_BY_JAXTYPING(fn, typechecker=typechecker)
    return _in_part(fn, lambda: _CHECKED_BY_JAXTYPING(fn, typechecker=typechecker))


def _in_part(fn: FunctionType, check_it: Callable[[], Any]) -> Callable[..., Any]:
    code, checked = fn.__code__, None

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if _CONFIG.jaxtyping_disable or torch.compiler.is_compiling():  # a count would be a guard of its graphs
            return fn(*args, **kwargs)
        calls = _CALLS[code] = _CALLS.get(code, 0) + 1
        if calls > FIRST and calls % EVERY:
            return fn(*args, **kwargs)
        if checked is None:
            checked = check_it()
        return checked(*args, **kwargs)

    return called
