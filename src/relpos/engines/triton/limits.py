"""What the kernels support: devices, and the lines for which the gradient of a bias has a fixed order."""

from __future__ import annotations

import os
from typing import Any

import torch

from relpos.core import LineBias, Lines

MOST_AXES = 3
"""Of regular lines, for the gradient of their bias."""
FEW = 256
"""Tokens up to which the gradient of a bias is summed pair by pair, so that any lines are supported."""
HOPPERS = 227 * 1024
"""Bytes of shared memory that a program may have on the GPUs that tiles are sized for."""
LEAST, AMPLE = 99 * 1024, 160 * 1024
"""The least that any call takes, and what wide heads and float64 take."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if not torch.cuda.is_available():  # a tensor that only says it is there
        return HOPPERS
    properties: Any = torch.cuda.get_device_properties(device)
    known = HOPPERS if properties.major in (9, 10) else LEAST if properties.major >= 8 else 0  # if PyTorch is silent
    return int(getattr(properties, "shared_memory_per_block_optin", known))


def interpreting() -> bool:
    """Whether Triton runs kernels on CPU, step by step."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def lacks_order(term: LineBias) -> bool:
    """Whether a gradient is wanted that the kernel has no order for."""
    if not (torch.is_grad_enabled() and term.values.requires_grad):
        return False
    if are_few(term.lines):
        return False
    query, key = term.lines.layout.query, term.lines.layout.key
    if query is None or key is None:
        return True
    return query.strides != key.strides or len(query.sizes) > MOST_AXES


def are_few(lines: Lines) -> bool:
    """Whether no side has more than a few tokens, at the same places throughout the batch."""
    sides = lines.query, lines.key
    return all(x.shape[-1] <= FEW and (x.dim() == 1 or x.shape[0] == 1) for x in sides)
