"""Windows of one tile in the Triton engine: all gradients by one kernel, which walks over the batch."""

import importlib
from typing import Any

import pytest
import test_streaming
import torch
from engine_steps import assert_as_reference, launches_of
from test_streaming import biased, check

from relpos import Grid, LineBias, Mask, Sequence, Sinks, Terms, lines
from relpos.core import Coordinates
from relpos.engines.call import Call
from relpos.engines.operators import Gradients

launch = importlib.import_module("relpos.engines.triton.launch")
table = importlib.import_module("relpos.engines.triton.table")
windows = importlib.import_module("relpos.engines.triton.windows")
window_kernels = importlib.import_module("relpos.engines.triton.window_kernels")

CASES: dict[str, tuple[Coordinates, Coordinates | None, dict[str, Any]]] = {
    "odd": (Grid(3, 5), None, {"dtypes": (torch.bfloat16,)}),
    "full": (Grid(4, 4), None, {"dtypes": (torch.float32,)}),
    "causal": (Grid(4, 4), None, {"mask": Mask.causal(), "dtypes": (torch.float32,)}),
    "documents of each element": (
        Sequence(13, prefix=2),
        None,
        {"mask": Mask.packed((torch.arange(15) + torch.arange(5)[:, None]) // 6), "dtypes": (torch.float32,)},
    ),
    "more keys": (Grid(2, 3), Grid(3, 5, prefix=1), {"dtypes": (torch.float32,)}),
    "rows that see nothing": (
        Sequence(9),
        None,
        {"mask": Mask.padding(torch.arange(9) > 4) & Mask.causal(), "dtypes": (torch.float32,)},
    ),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of each launch of the kernel; programs of two heads take two windows of five, the last ones one."""
    for module, name, value in ((test_streaming, "H", 2), (test_streaming, "B", 5), (table, "PROGRAMS", 6)):
        monkeypatch.setattr(module, name, value)
    return launches_of(window_kernels, "backward_windows", monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, launched: list[tuple[int, ...]]) -> None:
    queries, keys, given = CASES[name]
    position, shapes = biased(queries, keys)
    check(position, shapes, queries.count, (queries if keys is None else keys).count, backend="triton", **given)
    assert launched == [(2, 3, 1)] * len(given["dtypes"])


def test_dropout_drops_the_same_pairs(launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda *_, device: torch.tensor(12345, device=device))
    position, shapes = biased(Grid(3, 4))
    leaves = [*torch.randn(3, 3, 2, 12, 8), torch.randn(shapes[0])]
    assert_as_reference("triton", leaves, position, dropout=0.3, rtol=1e-4, atol=1e-5)
    assert launched


def test_which_calls_are_served() -> None:
    line = lines(Grid(7, 7))
    bias = Terms(LineBias(torch.zeros(2, line.length, requires_grad=True), line))

    def served(terms: Terms = bias, width: int = 32, heads: int = 2, dtype: Any = torch.bfloat16) -> bool:
        q = torch.zeros(1, 2, 49, width, dtype=dtype)
        k, v = torch.zeros(2, 1, heads, 49, width, dtype=dtype)
        call = Call(q, k, v, terms, None, 1.0)
        wanted = Gradients([q, k, v, *(term.values for term in terms.of(LineBias))])
        return bool(windows.serves(launch.Launches(call), call, wanted))

    assert served()
    assert not served(width=64), "registers"
    assert not served(heads=1), "the sum over query heads"
    assert not served(bias + Sinks(torch.zeros(2))), "a gradient more"
    assert not served(Terms()), "no bias to hold"
    assert not served(dtype=torch.float32), "tiles of 32 tokens"
