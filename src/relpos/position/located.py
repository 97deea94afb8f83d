"""Where a mechanism is: where its weights are; without any, where it was moved, or where the tokens are that it serves.

A buffer that nobody saves tells of moves what no weight can: `_here`, empty, moves with `.to(device)`. There is none
while a module has been built on the meta device (as large models are, and then given their weights) and not moved from
there: without weights it has no number to lose, and makes its terms wherever `settle` says that the tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

META = torch.device("meta")


class Located(nn.Module):
    """Base of modules that make tensors on their device, whether or not they have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_here", torch.empty(0), persistent=False)
        self._forget_meta()

    def _forget_meta(self) -> None:
        here = self._buffers["_here"]
        if here is not None and here.is_meta:
            self._buffers["_here"] = None

    @property
    def device(self) -> torch.device:
        """The device its terms are built on."""
        found = _of_weights(self)
        if found is not None:
            return found
        here = self._buffers["_here"]  # an attribute is looked for in two other places first
        return META if here is None else here.device

    def settle(self, device: torch.device) -> None:
        """Be where these tokens are, if there is neither a weight that says where, nor has it been moved."""
        if self._buffers["_here"] is None and device != META:
            for part in self.modules():
                if isinstance(part, Located) and part._buffers["_here"] is None:
                    part._buffers["_here"] = torch.empty(0, device=device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._buffers["_here"] is None:
            self._buffers["_here"] = _moved(fn)
        self._forget_meta()
        return applied


def settle(module: nn.Module, device: torch.device) -> None:
    """`Located.settle` of all in a module that may be anything, such as a wrapper of a mechanism."""
    if isinstance(module, Located):
        module.settle(device)
    else:
        for part in module.children():
            settle(part, device)


def _of_weights(module: nn.Module) -> torch.device | None:
    """The device of the first parameter or saved buffer that has numbers; meta where none has, None where none is."""
    found = None
    x: Tensor | None
    for x in module._parameters.values():
        if x is not None:
            if not x.is_meta:
                return x.device
            found = META
    if len(module._buffers) > len(module._non_persistent_buffers_set):
        for name, x in module._buffers.items():
            if x is not None and name not in module._non_persistent_buffers_set:
                if not x.is_meta:
                    return x.device
                found = META
    for part in module._modules.values():
        if part is not None:
            below = _of_weights(part)
            if below is not None:
                if below != META:
                    return below
                found = META
    return found


def _moved(fn: Callable[..., Any]) -> Tensor | None:
    """Where `Module._apply` moves a module to; None where it does not, but casts, say."""
    try:
        moved: Tensor = fn(torch.empty(0, device=META))
    except RuntimeError:  # there is nothing to copy from there, and it wants a copy
        moved = fn(torch.empty(0, device="cpu"))
    return None if moved.is_meta else moved
