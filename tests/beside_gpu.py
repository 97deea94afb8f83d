"""`python -m pytest -p tests.beside_gpu tests/engines`: the tests as beside a GPU, to find what is not moved there.

A move is a copy on the CPU. Triton's engine takes it, and refuses tensors that `relpos.testing.devices` has not moved.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

MOVED: list[bool] = []
"""Not empty while a call runs whose tensors were moved."""


class Copies(TorchFunctionMode):
    """Copies what is moved to a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and any(str(x) == "cuda" for x in (*args[1:], *(kwargs or {}).values())):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def pytest_configure() -> None:
    from relpos import engines
    from relpos.engines.triton import TRITON
    from relpos.testing import devices
    from relpos.testing import engines as tested

    def attention(*tensors: Any, **arguments: Any) -> Any:
        if arguments.get("backend") != "triton":
            return engines.attention(*tensors, **arguments)
        with Copies():
            given = {name: x.to("cuda") if hasattr(x, "to") else x for name, x in arguments.items()}
            if isinstance(states := arguments.get("states"), tuple):
                given["states"] = tuple(x.to("cuda") for x in states)
            tensors = tuple(x.to("cuda") for x in tensors)
        MOVED.append(True)
        try:
            return pytree.tree_map(torch.clone, engines.attention(*tensors, **given))
        finally:
            MOVED.pop()

    devices.attention, devices.ON_GPU, tested.INTERPRETED = attention, ("triton",), ()
    kind: Any = type(TRITON)
    kind.unsupported, kind.run = _if_moved(kind.unsupported), _if_moved(kind.run)


def _if_moved(method: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(engine: Any, call: Any) -> Any:
        if MOVED or call.q.device.type != "cpu":
            return method(engine, call)
        if method.__name__ == "unsupported":
            return "a CUDA device (q is on cpu)"
        raise ValueError("expected tensors on a GPU")

    return refusing


MADE_THERE = (
    "test_what_a_forward_leaves_to_its_backward_is_no_part_of_a_call",
    "test_a_part_of_a_mask_that_kernels_do_not_know_is_refused",
)
"""Make their tensors on a GPU themselves."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Without the tests that a machine with a GPU leaves out."""

    def runs(item: Any) -> bool:
        reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
        return not ("interpreted" in item.fixturenames or item.originalname in MADE_THERE or "GPU" in " ".join(reasons))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)
