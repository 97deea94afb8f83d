"""Where an engine is tested: Triton's on the GPU where there is one, every other on the CPU, with inputs made there."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import relpos

ON_GPU = ("triton",) if torch.cuda.is_available() else ()
"""Engines that want tensors on a GPU here."""


def attention(*tensors: torch.Tensor, **arguments: Any) -> Any:
    """`relpos.attention` with all it is given on the engine's device, and what it gives on the CPU.

    A mechanism is moved in place, so the gradients of its parameters are where it was used last.
    """
    if not ON_GPU:
        return relpos.attention(*tensors, **arguments)
    device = "cuda" if arguments.get("backend") in ON_GPU else "cpu"
    moved = {name: value.to(device) if hasattr(value, "to") else value for name, value in arguments.items()}
    output = relpos.attention(*(x.to(device) for x in tensors), **moved)
    return pytree.tree_map(lambda x: x.cpu(), output)
