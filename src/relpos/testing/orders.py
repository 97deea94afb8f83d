"""The same arithmetic with its sums in other orders: how far an error depends on the order.

A rounded sum depends on its order, and the order on the machine: how wide its vectors are, how many threads share the
terms. The error of one order is one draw of many (`relpos.testing.tolerance`). `in_orders` keeps a computation, to draw
it again:

    cost = in_orders(lambda: by_loops(torch.float32))     # computed at once, as it stands
    assert_close(actual, exact, cost)                     # and in other orders where the first does not decide
    assert_close(actual, exact, cost["k"])                # of a dict, list or tuple

The computation needs no change for that. While it is drawn, a dispatch mode gets each of its operations, including
those of the backward, and shuffles the terms of every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ORDERS = 16
"""The number of orders, including the original one."""

aten = torch.ops.aten
_SUMS = {aten.sum, aten.mean, aten.logsumexp}
"""Operations on terms and dimensions: all of these where none is given."""
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.dot: 0, aten.mv: 0, aten.addmm: 1, aten.addmv: 1, aten.baddbmm: 1}
"""Products of matrices or vectors, and where among the arguments the two begin."""
_SOFTMAX = {aten._softmax: 1, aten._log_softmax: 1, aten._softmax_backward_data: 2, aten._log_softmax_backward_data: 2}
"""Operations that sum along a dimension and keep it, and how many tensors stand before the dimension."""


class Shuffled(TorchDispatchMode):
    """While it is entered, the terms of every sum are added in an order drawn from the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chance = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = func.overloadpacket, kwargs or {}
        if kind in _SUMS and args[0].is_floating_point() and args[0].dim():
            x, *rest = args
            dims = rest[0] if rest and rest[0] else range(x.dim())
            for dim in dims:
                x = x.index_select(dim, self._order(x, dim))
            args = (x, *rest)
        elif kind in _PRODUCTS and args[_PRODUCTS[kind]].is_floating_point():
            index = _PRODUCTS[kind]
            left, right = args[index : index + 2]
            order = self._order(left, -1)
            pair = left.index_select(-1, order), right.index_select(-2 if right.dim() > 1 else 0, order)
            args = (*args[:index], *pair, *args[index + 2 :])
        elif kind in _SOFTMAX and args[0].dim():
            *tensors, dim = args[: _SOFTMAX[kind] + 1]
            order = self._order(tensors[0], dim)
            shuffled = (x.index_select(dim, order) for x in tensors)
            return func(*shuffled, *args[len(tensors) :], **kwargs).index_select(dim, order.argsort())
        return func(*args, **kwargs)

    def _order(self, x: Tensor, dim: int) -> Tensor:
        return torch.randperm(x.shape[dim], generator=self.chance).to(x.device)


class Draws:
    """The results of a computation, each computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute
        self.state = torch.default_generator.get_state()
        self.found = [compute()]

    def __getitem__(self, number: int) -> Any:
        """The result in the order of that number; 0 is the original order. Random numbers are the same in all."""
        while len(self.found) <= number:
            now = torch.default_generator.get_state()
            torch.default_generator.set_state(self.state)
            with Shuffled(seed=len(self.found)):
                self.found.append(self.compute())
            torch.default_generator.set_state(now)
        return self.found[number]


class Orders:
    """One result of a computation, or a dict, list or tuple of them, in `ORDERS` orders."""

    def __init__(self, draws: Draws, path: tuple[Any, ...] = ()) -> None:
        self.draws, self.path = draws, path

    def __getitem__(self, key: Any) -> Orders:
        return Orders(self.draws, (*self.path, key))

    def __iter__(self) -> Iterator[Orders]:
        """Of a list or tuple."""
        return (self[index] for index in range(len(self.drawn(0))))

    def drawn(self, number: int) -> Any:
        """The result in the order of that number."""
        result = self.draws[number]
        for key in self.path:
            result = result[key]
        return result


def in_orders(compute: Callable[[], Any]) -> Orders:
    """The result of `compute`, which can be drawn again; `compute` must compute the same in every call."""
    return Orders(Draws(compute))
