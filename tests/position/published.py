"""What tests of parity with transformers share, and the largest tensor that an attention makes."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relpos import Mechanism, Sequence, attention

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def model(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def config(name: str, **arguments: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    wanted = f"{name.replace('_', '')}config"
    (own,) = (value for key, value in vars(module).items() if key.lower() == wanted)
    return own(**arguments)


def heads(x: Tensor, count: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def largest_tensor(mechanism: Mechanism, backend: str, tokens: int = 256, width: int = 64) -> int:
    """The numbers of the largest tensor in attention and its gradient, of one head."""
    q, k, v = (torch.randn(1, 1, tokens, width, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        output = attention(q, k, v, position=mechanism, queries=Sequence(tokens), backend=backend)
        assert isinstance(output, Tensor)
        output.sum().backward()
    return largest.numbers
