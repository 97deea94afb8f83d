"""Numbers that a host knows, as a tensor on a device: bucket edges, slopes, frequencies.

A copy from the host makes a GPU wait, and a CUDA graph refuses it while it is captured. So on other devices than the
CPU the tensor is kept, by its numbers, dtype and device, and is there from the second call on: it is never written to.
A compiled graph copies them in every call: its numbers may be symbols, of which nothing can be kept.

What is kept is kept for good, so nothing that depends on a length goes through `constant`: `passing` is for that.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def constant(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Shaped[Tensor, " n"]:
    """A tensor of `numbers`, for reading only."""
    return _kept(numbers, dtype, device) if keeps(device) else torch.tensor(numbers, dtype=dtype, device=device)


def passing(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Shaped[Tensor, " n"]:
    """The same of numbers that change from call to call: nothing is kept, and still nothing copied from the host.

    A kernel a number, each with its number as an argument: where there is a formula, compute on the device instead.
    """
    if keeps(device):
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=dtype, device=device)


def keeps(device: torch.device) -> bool:
    """Whether a tensor of the host's numbers on `device` is worth keeping, and can be kept."""
    return not (device.type == "cpu" or torch.compiler.is_compiling() or is_in_torch_dispatch_mode())


@cache  # and never dropped: a captured graph may read any of them, at any time
def _kept(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whoever asks first, autograd may save it later
        return torch.tensor(numbers, dtype=dtype, device=device)
