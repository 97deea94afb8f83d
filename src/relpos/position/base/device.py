"""The device of a mechanism: that of its weights; without weights, the one it was moved to, or that of its tokens.

An empty buffer `_device_marker`, which is not saved, moves with `.to(device)` and so records moves without weights. It
is None while a module was built on the meta device (as large models are, before they get their weights) and not moved
from there: without weights it has no number to lose, and `settle` gives it the device of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

META = torch.device("meta")


class HasDevice(nn.Module):
    """Base of modules that make tensors on their device, `device`, whether or not they have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_device_marker", torch.empty(0), persistent=False)
        self._drop_meta_marker()

    def _drop_meta_marker(self) -> None:
        marker = self._buffers["_device_marker"]
        if marker is not None and marker.is_meta:
            self._buffers["_device_marker"] = None

    @property
    def device(self) -> torch.device:
        """The device its terms are built on."""
        found = _device_of_weights(self)
        if found is not None:
            return found
        marker = self._buffers["_device_marker"]  # attribute access is slower
        return META if marker is None else marker.device

    def settle(self, device: torch.device) -> None:
        """Take the device of these tokens, unless weights or a move determine it."""
        if self._buffers["_device_marker"] is None and device != META:
            for part in self.modules():
                if isinstance(part, HasDevice) and part._buffers["_device_marker"] is None:
                    part._buffers["_device_marker"] = torch.empty(0, device=device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._buffers["_device_marker"] is None:
            self._buffers["_device_marker"] = _moved(fn)
        self._drop_meta_marker()
        return applied


def settle(module: nn.Module, device: torch.device) -> None:
    """`HasDevice.settle` for every part of any module, such as a wrapper of a mechanism."""
    if isinstance(module, HasDevice):
        module.settle(device)
    else:
        for part in module.children():
            settle(part, device)


def _device_of_weights(module: nn.Module) -> torch.device | None:
    """The device of the first parameter or saved buffer that has numbers; meta if none has, None if there is none."""
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
            below = _device_of_weights(part)
            if below is not None:
                if below != META:
                    return below
                found = META
    return found


def _moved(fn: Callable[..., Any]) -> Tensor | None:
    """An empty tensor where `Module._apply` moves a module; None if it does not move it, but casts it, say."""
    try:
        moved: Tensor = fn(torch.empty(0, device=META))
    except RuntimeError:  # it wants to copy numbers, and meta has none
        moved = fn(torch.empty(0, device="cpu"))
    return None if moved.is_meta else moved
