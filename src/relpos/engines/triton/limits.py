"""What the kernels support: shared memory of devices, and lines whose bias gradient has a fixed order."""

from __future__ import annotations

import os
from typing import Any

import torch

from relpos.core import LineBias, Lines

MOST_AXES = 3
"""Maximum axes of regular lines whose bias needs a gradient."""
MOST_RANK = 8
"""Maximum rank of low-rank biases, of all together: each takes registers, and a multiplication a pair. Forget gates
have ranks of 4 and 2, CABLE of 4 and 3."""
FEW = 256
"""Up to this many tokens, the gradient of a bias is summed pair by pair, for any lines."""
HOPPERS = 227 * 1024
"""Bytes of shared memory per program on Hopper GPUs, which tiles are sized for."""
LEAST, AMPLE = 99 * 1024, 160 * 1024
"""The bytes that any call needs, and those that wide heads and float64 need."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program."""
    if device.type != "cuda" or not torch.cuda.is_available():  # the interpreter; a fake tensor
        return HOPPERS
    properties: Any = torch.cuda.get_device_properties(device)
    known = (
        HOPPERS if properties.major in (9, 10) else LEAST if properties.major >= 8 else 0
    )  # for a PyTorch without the property
    return int(getattr(properties, "shared_memory_per_block_optin", known))


def cdiv(count: int, size: int) -> int:
    """How many tiles of `size` tokens hold `count` tokens. Triton's own function takes microseconds."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels on CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def lacks_order(term: LineBias) -> bool:
    """Whether a gradient is wanted that the kernels cannot sum in a fixed order."""
    if not (torch.is_grad_enabled() and term.values.requires_grad) or are_few(term.lines):
        return False
    query, key = term.lines.layout.query, term.lines.layout.key
    if query is None or key is None:
        return True
    return query.strides != key.strides or len(query.sizes) > MOST_AXES


def are_few(lines: Lines) -> bool:
    """Whether there are at most `FEW` queries and keys, and all of the batch shares their lines."""
    return all(x.shape[-1] <= FEW and (x.dim() == 1 or x.shape[0] == 1) for x in (lines.query, lines.key))
