"""Python numbers as a tensor on a device: bucket edges, slopes, frequencies.

A copy from the host makes a GPU wait, and is forbidden while a CUDA graph is captured. So on devices other than the CPU
the tensor is cached by its numbers, dtype and device, and never written to. A compiled graph copies the numbers in
every call: they may be symbols, which cannot be cached.

Cached tensors are never freed, so nothing that depends on a length goes through `constant`:
`uncached_constant` is for that.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def constant(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Shaped[Tensor, " n"]:
    """A tensor of `numbers`, for reading only."""
    if caches_constants(device):
        return _cached(numbers, dtype, device)
    return torch.tensor(numbers, dtype=dtype, device=device)


def uncached_constant(
    numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device
) -> Shaped[Tensor, " n"]:
    """The same for numbers that change from call to call: not cached, and still not copied from the host.

    It launches one kernel per number, with the number as an argument. If there is a formula, compute on the device.
    """
    if caches_constants(device):
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=dtype, device=device)


def caches_constants(device: torch.device) -> bool:
    """Whether a tensor of Python numbers on `device` is worth caching, and can be cached."""
    return not (device.type == "cpu" or torch.compiler.is_compiling() or is_in_torch_dispatch_mode())


@cache  # never dropped: a captured graph may read any of them at any time
def _cached(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # autograd may save it later
        return torch.tensor(numbers, dtype=dtype, device=device)
