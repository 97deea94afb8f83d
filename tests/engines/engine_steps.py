"""What tests of the engines share: a step of training, held to the reference's, and the sizes of what it makes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from relpos.engines.arguments import Arguments
from relpos.engines.call import Call
from relpos.testing.devices import attention
from relpos.testing.tolerance import assert_close, rms


def call_of(*tensors: Tensor, **given: Any) -> Call:
    """What engines are given, once the arguments of `attention` are checked."""
    return Arguments(*tensors, **given).call()


def launches_of(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of each launch of a kernel of Triton's from now on, until the test ends."""
    kernel, grids = getattr(module, name), []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, name, Counted())
    return grids


def with_gradients(out: Tensor, leaves: Sequence[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    """An output and the gradient of each leaf, by the output's gradient; without one, of the sum of squares."""
    return [out.detach(), *torch.autograd.grad(out, leaves, 2 * out.detach() if upstream is None else upstream)]


def step(
    backend: str,
    leaves: Sequence[Tensor],
    position: Callable[..., Any] = lambda: None,
    upstream: Tensor | None = None,
    **given: Any,
) -> list[Tensor]:
    """The same of a call: of q, k, v and of the tensors that `position` makes terms from. Dropout has one seed."""
    own = [x.detach().requires_grad_() for x in leaves]
    torch.manual_seed(3)
    out = attention(*own[:3], position=position(*own[3:]), backend=backend, **given)
    return with_gradients(out, own, upstream)


def assert_as_reference(
    backend: str,
    leaves: Sequence[Tensor],
    position: Callable[..., Any] = lambda: None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    **given: Any,
) -> None:
    """An engine's step is the reference's, within PyTorch's tolerances of the dtype where none are given."""
    found, wanted = (step(name, leaves, position, **given) for name in (backend, "reference"))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


class Sizes(TorchDispatchMode):
    """How many numbers each tensor has that an operator returns, and how many its memory holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.stored: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.numbers.append(x.numel())
                self.stored.append(x.untyped_storage().size() // x.element_size())
        return out


def assert_accurate(
    found: list[Tensor],
    exact: list[Tensor],
    cost: Any,
    dtype: torch.dtype,
    *,
    outputs: int = 1,
    terms: float = 0.0,
    what: str = "",
) -> None:
    """Outputs and gradients are as near to float64's as `relpos.testing.tolerance` allows.

    Args:
        found: the outputs, and behind them the gradients of leaves.
        exact: the same in float64.
        cost: the same by the oracle in `dtype`, in several orders.
        dtype: of the call.
        outputs: how many there are.
        terms: how large what they are summed from is; of gradients it is the largest one.
        what: is tried.
    """
    size = max(rms(x) for x in exact[outputs:])
    for number, (a, e, c) in enumerate(zip(found, exact, cost, strict=True)):
        name = f"output {number}" if number < outputs else f"gradient of leaf {number - outputs}"
        assert_close(a, e, c, what=f"{what} {name}, {dtype}", terms=terms if number < outputs else size, dtype=dtype)
