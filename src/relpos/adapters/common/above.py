"""A weak reference from a module to one above it: a strong reference would be a cycle and keep both in memory.

copied with the module above    refers to the copy
copied alone                    refers to the same module
pickled                         takes the module above along
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Above:
    """Called, it returns the module, or None once the module is gone."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Above:
        module = self()
        return Above(memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return Above, (self(),)
