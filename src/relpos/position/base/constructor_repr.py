"""A module whose repr is its constructor call, in one line.

An argument is read from the attribute of its name, unless `_arguments` returns something else.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class ConstructorRepr(nn.Module):
    """Base of modules that print their constructor call, without their submodules."""

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
