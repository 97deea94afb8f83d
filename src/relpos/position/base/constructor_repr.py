"""A module whose repr is its constructor call, in one line.

An argument is read from the attribute of its name, unless `_arguments` returns something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from relpos.core.checks import unknown_argument


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that says which argument it does not have, and the nearest that it has."""

    @wraps(init)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            init(self, *arguments, **named)
        except TypeError as error:
            parameters = inspect.signature(init).parameters
            open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            unknown = [] if open_ended else [name for name in named if name not in parameters]
            if not unknown:
                raise
            known = [name for name in parameters if name != "self"]
            raise TypeError(unknown_argument(type(self).__name__, unknown[0], known)) from error

    return construct


class ConstructorRepr(nn.Module):
    """Base of modules that print their constructor call, without their submodules."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments by name, without parameter values. `...` for one that is not stored."""
        return {name: getattr(self, name, ...) for name in inspect.signature(type(self)).parameters}

    def extra_repr(self) -> str:
        """The constructor's arguments that differ from their defaults."""
        defaults = inspect.signature(type(self)).parameters
        arguments = self._arguments().items()
        texts = ((name, "..." if value is ... else repr(value)) for name, value in arguments)
        return ", ".join(f"{name}={text}" for name, text in texts if text != repr(defaults[name].default))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
