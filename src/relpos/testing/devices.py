"""The device of an engine's tests: a GPU for Triton, if there is one, else the CPU, where inputs are made."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from relpos import engines

ON_GPU = ("triton",) if torch.cuda.is_available() else ()
"""Engines whose tensors are moved to the GPU here."""


def attention(*tensors: torch.Tensor, **arguments: Any) -> Any:
    """`relpos.attention` with its arguments on the engine's device and its output on the CPU.

    A mechanism is moved in place: its parameters stay on the device of the last call.
    """
    if not ON_GPU:
        return engines.attention(*tensors, **arguments)
    device = "cuda" if arguments.get("backend") in ON_GPU else "cpu"
    moved = {name: value.to(device) if hasattr(value, "to") else value for name, value in arguments.items()}
    if isinstance(states := arguments.get("states"), tuple):
        moved["states"] = tuple(x.to(device) for x in states)
    output = engines.attention(*(x.to(device) for x in tensors), **moved)
    return pytree.tree_map(lambda x: x.cpu(), output)
