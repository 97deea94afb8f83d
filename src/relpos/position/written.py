"""A module whose repr is, in one line, the constructor that makes it.

An argument is read from the attribute of its name, or from what `_arguments` says instead.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class WrittenOut(nn.Module):
    """Base of modules that print the call that makes them, whatever modules they hold."""

    def _arguments(self) -> dict[str, Any]:
        """The arguments that make it, by name; its parameters then start anew. `...` for one it does not keep."""
        return {name: getattr(self, name, ...) for name in inspect.signature(type(self)).parameters}

    def extra_repr(self) -> str:
        """The arguments of the constructor that are not what they are by default."""
        defaults = inspect.signature(type(self)).parameters
        own = self._arguments().items()
        said = ((name, "..." if value is ... else repr(value)) for name, value in own)
        return ", ".join(f"{name}={text}" for name, text in said if text != repr(defaults[name].default))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
