"""What tests of parity with transformers and timm share, and the largest tensor that an attention makes."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from position.widened import in_float64
from relpos import Mechanism, Sequence, attention

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def model(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def config(name: str, **arguments: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    wanted = f"{name.replace('_', '')}config"
    (own,) = (value for key, value in vars(module).items() if key.lower() == wanted)
    return own(**arguments)


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


BOTH = pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("sdpa", torch.float32)], ids=["float64", "float32"]
)
"""Both dtypes, and both engines: each with one, for that engines agree is what the suites show."""


def running_in(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Their code as it is; for float64, with float64 wherever it says float32. Only theirs may run inside.

    Most of it forms angles, slopes or a softmax in float32 whatever the dtype of the weights. With those widened, what
    is left is the difference in what the two compute.
    """
    return in_float64() if dtype == torch.float64 else nullcontext()


def merged(x: Tensor) -> Tensor:
    """`[B, H, N, D]` as `[B, N, H D]`."""
    return x.transpose(1, 2).flatten(2)


def random(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter from a normal of deviation 0.5, the biases too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype)


def tokens(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random tokens, or q, k and v, that want a gradient."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def before(n: int, dtype: torch.dtype) -> Tensor:
    """The mask that is added: nothing up to the query, the lowest number after it."""
    return torch.full((n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)


def heads(x: Tensor, count: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attended(position: Mechanism, *qkv: Tensor, **arguments: Any) -> Tensor:
    """`relpos.attention` under a mechanism: the output."""
    output = attention(*qkv, position=position, **arguments)
    assert isinstance(output, Tensor)
    return output


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
        attended(mechanism, q, k, v, queries=Sequence(tokens), backend=backend).sum().backward()
    return largest.numbers
