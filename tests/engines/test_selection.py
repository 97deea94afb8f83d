"""What `auto` chooses where, and the ways that an engine has."""

import importlib
import pathlib
import sys
from typing import Any

import pytest
import torch
from engine_steps import call_of

import relpos
from relpos import (
    ALiBi,
    CoPE,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    RelativePositionBias,
    Sequence,
    T5Bias,
    TransformerXLPosition,
    lines,
)
from relpos.engines import selection
from relpos.engines.selection import ENGINES, SLOWER, TOKENS_OF_TRITON, choose

HEADS, WIDTH = 2, 8
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
BORDERS: Any = importlib.import_module("borders")


def given(n: int, position: Any = None, **more: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    tensors = tuple(torch.randn(1, HEADS, n, WIDTH) for _ in range(3))
    where = {} if position is None or isinstance(position, LineBias) else {"queries": Sequence(n)}
    return tensors, {"position": position, **where, **more}


WAYS = [
    ("sdpa", TransformerXLPosition(HEADS, WIDTH, HEADS * WIDTH), {}, "products with each row"),
    ("sdpa", ALiBi(HEADS), {}, "read as a strided view"),
    (
        "sdpa",
        RelativePositionBias(HEADS, (2, 16)).requires_grad_(False),
        {"queries": Grid(2, 16)},
        "expanded to all pairs",
    ),
    ("sdpa", T5Bias(HEADS), {}, "a learned bias on lines"),
    ("sdpa", T5Bias(HEADS), {"mask": Mask.causal()}, "a mask of all pairs"),
    ("sdpa", None, {}, "without a tensor of pairs"),
    ("sdpa", None, {"mask": Mask.causal()}, "without a tensor of pairs"),
    ("sdpa", None, {"mask": Mask.window(2, 2)}, "a mask of all pairs"),
    ("streaming", T5Bias(HEADS), {"mask": Mask.causal()}, "by PyTorch's flash kernel"),
    ("streaming", TransformerXLPosition(HEADS, WIDTH, HEADS * WIDTH), {}, "blocks of rows"),
    ("streaming", None, {"mask": Mask.packed(torch.arange(32) % 4)}, "groups of segments"),
    ("streaming", CoPE(WIDTH, 8), {}, "a row rule"),
    ("reference", T5Bias(HEADS), {}, None),
]


@pytest.mark.parametrize(("backend", "position", "more", "words"), WAYS, ids=[f"{one[0]}, {one[3]}" for one in WAYS])
def test_explain_says_in_which_way(backend: str, position: Any, more: dict[str, Any], words: str | None) -> None:
    tensors, named = given(32, position, backend=backend, **more)
    said = relpos.explain(*tensors, **named)
    if words is None:
        assert said.way is None
        assert str(said).startswith(f"backend: {backend}\n")
    else:
        assert said.way is not None
        assert words in said.way
        assert str(said).startswith(f"backend: {backend}, {said.way}\n")


def test_an_engine_without_a_rule_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(*given(4)[0])
    assert choose(call, "auto").engine.name == "sdpa"
    monkeypatch.delitem(SLOWER, "streaming")
    assert choose(call, "auto").engine.name == "streaming"


@pytest.mark.parametrize("name", BORDERS.BORDERS)
def test_a_benchmark_of_a_border_is_of_calls_that_it_decides(name: str) -> None:
    border = BORDERS.BORDERS[name]
    n = BORDERS.tokens(border, border.pairs)
    q = torch.empty(border.batch, BORDERS.HEADS, 1, BORDERS.WIDTH).expand(-1, -1, n, -1)
    with torch.set_grad_enabled(border.step):
        call = call_of(*(q.detach().requires_grad_(border.step) for _ in range(3)), **border.given(n))
        assert selection._border(call)[0] == border.pairs


def test_the_last_way_of_an_engine_serves_every_call() -> None:
    assert set(SLOWER) <= {engine.name for engine in ENGINES}
    calls = [
        call_of(*tensors, **named) for tensors, named in (given(5), given(5, ALiBi(HEADS)), given(5, CoPE(WIDTH, 3)))
    ]
    for engine in ENGINES:
        for call in calls:
            assert (engine.way(call) is not None) == bool(engine.ways)
        assert not engine.ways or engine.ways[-1].serves(calls[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
@pytest.mark.parametrize("kind", ["line", "low rank", "vectors"])
@pytest.mark.parametrize("tokens", [TOKENS_OF_TRITON - 1, TOKENS_OF_TRITON])
def test_a_call_is_planned_as_on_another_kind_of_device(tokens: int, kind: str) -> None:
    """Whose times count is a value: what a GPU would be given is seen without one."""
    line = lines(Sequence(tokens))
    position = {
        "line": LineBias(torch.zeros(HEADS, line.length, requires_grad=True), line),
        "low rank": LowRank(*torch.zeros(2, HEADS, tokens, 2)),
        "vectors": LineVectors(torch.zeros(1, line.length, WIDTH, requires_grad=True), None, line, "query"),
    }[kind]
    call = call_of(*(torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3)), position=position)
    assert choose(call, "auto").engine.name != "triton"
    there = choose(call, "auto", "cuda")
    assert there.engine.name == ("triton" if tokens == TOKENS_OF_TRITON else "sdpa")
    assert "triton" in there.passed_over or there.engine.name == "triton"
