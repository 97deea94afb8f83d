"""What was written down before a rebuilding is still so: numbers of calls and models, signatures, graphs, an export."""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import relpos
from frozen.freeze import HERE, call, cases, differing, model, signatures
from loaded import Loaded


def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / name).read_text())
    return found


CALLS = kept("calls.json")
CASES = [case for case in cases() if case[2] != ("triton",) or not torch.cuda.is_available()]
PART = 28


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("first", "threads"),
    [
        pytest.param(first, threads, marks=[pytest.mark.slow] if first else [])
        for number, first in enumerate(range(0, len(CASES), PART))
        for threads in ([1] if number % 3 else [1, 4])
    ],
)
def test_calls(first: int, threads: int, with_threads: Callable[[int], None]) -> None:
    with_threads(threads)
    for name, seed, engines in CASES[first : first + PART]:
        found = call(seed, engines)
        assert list(found) == list(CALLS[name]), f"the engines that serve {name}"
        for engine, tensors in found.items():
            wrong = differing(tensors, CALLS[name][engine])
            assert not wrong, f"{name}, {engine}: {wrong}"


@pytest.mark.parametrize(
    ("factor", "least"), [(0.0, 0.01), (-1.0, 0.01), (1.01, 0.5)], ids=["zero", "of the other sign", "1 % more"]
)
def test_a_change_in_half_precision_is_noticed(factor: float, least: float) -> None:
    """Of tensors that are no rounding of a larger one: at least so large a part of the largest of their call."""
    asked = noticed = 0
    for tensors in (own for engines in CALLS.values() for own in engines.values()):
        largest = max(norm for _, norm, _ in tensors.values())
        for name, (dtype, norm, mixture) in tensors.items():
            if dtype in ("bfloat16", "float16") and 0 < norm >= least * largest:
                asked += 1
                changed = {**tensors, name: (dtype, abs(factor) * norm, factor * mixture)}
                noticed += differing(changed, tensors) == [name]
    assert asked > 200
    assert noticed >= 0.99 * asked  # of few is the mixture so near 0 that its sign says nothing


def test_models() -> None:
    before = kept("models.json")
    for name, tensors in before.items():
        assert not differing(model(name), tensors), name


def test_public_names_and_signatures() -> None:
    assert signatures() == kept("signatures.json"), "python tests/frozen/freeze.py signatures, where a change is meant"


SERIALIZED = (
    "algebra.Terms", "gather.Rows", "lines.Lines", "mask.Blocks", "mask.Mask", "terms.AxisVectors", "terms.DenseBias",
    "terms.IndexedBias", "terms.LineBias", "terms.LineVectors", "terms.LowRank", "terms.PairRotations", "terms.Polar",
    "terms.QueryBias", "terms.QueryScale", "terms.Rotation", "terms.RowRule", "terms.Scale", "terms.Sinks",
    "terms.Softcap", "terms.TableLookup",
)  # fmt: skip
"""The names by which files know trees, whatever module they are in by now; rows and their lookup come into none."""


def test_names_in_files() -> None:
    known = {name for name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE if name.startswith("relpos.")}
    assert known == {f"relpos.core.{name}" for name in SERIALIZED}
    for name in ("streaming", "streaming_backward", "triton", "triton_backward"):
        assert hasattr(torch.ops.relpos, name)


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = relpos.T5Bias(num_heads=2) + relpos.RotaryEmbedding(8)

    def forward(self, q: torch.Tensor) -> Any:
        given = {"position": self.bias, "queries": relpos.Sequence(9), "mask": relpos.Mask.causal()}
        return relpos.attention(q, q, q, **given, backend="streaming")


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_an_exported_program_is_written_and_read() -> None:
    module, q, file = Exported(), torch.randn(1, 2, 9, 8), io.BytesIO()
    program = torch.export.export(module, (q,))
    parts = [one for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    assert any("relpos.streaming" in str(node.target) for part in parts for node in part.graph.nodes)
    torch.export.save(program, file)
    file.seek(0)
    # called as it is, a rotation is one complex product; in a graph it is the same in several
    torch.testing.assert_close(torch.export.load(file).module()(q), module(q), rtol=0, atol=1e-6)


GRAPHS = """
import sys, torch, relpos
from torch._dynamo.testing import CompileCounter
torch.set_num_threads(1)
bias = relpos.T5Bias(num_heads=2) + relpos.RotaryEmbedding(8)
for backend in ("auto", "streaming"):
    def run(q):
        tokens = relpos.Sequence(q.shape[2])
        return relpos.attention(q, q, q, position=bias, queries=tokens, mask=relpos.Mask.causal(), backend=backend)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for length in (6, 9, 14, 9):
        q = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(compiled(q), run(q), rtol=1e-4, atol=1e-5)
    print(backend, counter.frame_count)
"""


@pytest.mark.traced
@pytest.mark.slow
def test_graphs_of_four_lengths(loaded: Loaded) -> None:
    """In a process of its own, without the shape checks. `compile_terms.py` has symbols from the start: one graph."""
    found = loaded.run("-c", GRAPHS, needs=["compiler"])
    assert found.stdout.splitlines() == ["auto 2", "streaming 2"], found.stdout + found.stderr
