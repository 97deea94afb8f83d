"""What only a GPU can show: real sizes, the same bits twice, captured graphs, 65,536 tokens, a clean sanitizer.

    python -m pytest -m gpu -n 8 --dist worksteal

The cheapest and most telling come first, and eight processes compile side by side.
The other tests run Triton's kernels there too, on small calls (`relpos.testing.devices`).
"""

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_unseen as cases
import torch
from engine_steps import assert_as_reference, step, with_gradients
from test_streaming import MASKS, B, H, N
from without_gpu import DEVICE, ON_CPU, no_sanitizer, size, stand_in

from patience import PATIENCE
from relpos import (
    ALiBi,
    ForgetGate,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    Mechanism,
    MultimodalRotary,
    RelativePositionBias,
    RotaryEmbedding,
    Sequence,
    T5Bias,
    Terms,
    XPos,
    attention,
    explain,
    lines,
)
from relpos.bench import engines
from relpos.bench.cases import Case
from relpos.bench.check import faults
from relpos.bench.peers import engine_peer
from relpos.engines.self_check import verdicts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a CUDA device"),
]
DTYPES = ("float64", "float32", "bfloat16", "float16")
REAL = (
    Case("line", (4096,), "step", head_dim=128),
    Case("line", (2047,), "step", batch=2, causal=True),
    Case("line", (1000,), "step", prefix=3, head_dim=80),
    Case("grid", (33, 57), "step", prefix=1),
    Case("grid", (7, 7), "step", batch=64, head_dim=32),
)


def of_auto(**given: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A call that `auto` takes Triton's kernels for, if it may."""
    n = size(600, 40)
    line = lines(Sequence(n), device=DEVICE)
    values = torch.randn(4, line.length, device=DEVICE, requires_grad=True)
    return [torch.randn(1, 4, n, 64, device=DEVICE) for _ in range(3)], {"position": LineBias(values, line), **given}


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_CPU:
        stand_in(monkeypatch)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_agreed", "_faults"):
        monkeypatch.setattr(verdicts, name, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_the_kernels_once_they_agree(nothing_known: None, dtype: torch.dtype) -> None:
    tensors, given = of_auto()
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert explain(*(x.to(dtype) for x in tensors), **given).backend == "triton"
    assert len(verdicts._agreed) == 1
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


def test_autocast_is_a_cast() -> None:
    n = size(512, 40)
    bias = RelativePositionBias(4, seq_len=n, init_std=0.5).to(DEVICE)
    q = torch.randn(1, 4, n, 64, device=DEVICE)
    given: dict[str, Any] = {"position": bias, "queries": Sequence(n), "backend": "triton"}
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        cast = attention(q, q, q, **given)
    half = q.bfloat16()
    assert torch.equal(cast, attention(half, half, half, **given))


def test_many_windows_against_the_definition() -> None:
    """So many that a program sums several of them."""
    line = lines(Grid(7, 7))
    values = torch.linspace(-1, 1, 2 * line.length, dtype=torch.float64).view(2, -1)
    leaves = [*torch.randn(3, size(1200, 3), 2, 49, 32, dtype=torch.float64), values]
    assert_as_reference("triton", leaves, lambda x: LineBias(x, line), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("workspace", [2**29, 2**24], ids=["one chunk", "rows"])
def test_vectors_against_the_definition_and_the_same_bits(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys and values."""
    sets = importlib.import_module("relpos.engines.triton.vector_sets")
    monkeypatch.setattr(sets, "WORKSPACE", workspace)
    heads, n = size(4, 2), size(1100, 20)
    line = lines(Sequence(n))
    index = (torch.arange(line.length) - n + 1).clamp(-128, 127) + 128
    leaves = [
        *torch.randn(3, 2, heads, n, 64, dtype=torch.float64),
        *torch.randn(3, heads, 256, 64, dtype=torch.float64),
    ]

    def position(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Terms:
        by_query, by_key = LineVectors(q, index, line, "query"), LineVectors(k, index, line, "key")
        return by_query + by_key + LineVectors(v, index, line, "value")

    assert_as_reference("triton", leaves, position, mask=Mask.causal(), rtol=1e-8, atol=1e-8)
    half = [x.bfloat16() for x in leaves]
    once, again = (step("triton", half, position) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_real_sizes_against_the_definition(case: Case, dtype: Any) -> None:
    """Output and gradients by the rule of the benchmark, which is that of the tests."""
    case = replace(case.shrunk(40) if ON_CPU else case, dtype=dtype, device=DEVICE.type, heads=size(8, 2))
    assert faults(case, [engine_peer("triton")], ["triton"]) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("ranks", [(), (4, 2)], ids=["line", "low rank"])
def test_two_runs_give_the_same_bits(ranks: tuple[int, ...], mask: Mask | None, dtype: torch.dtype) -> None:
    heads, n = size(8, 2), size(4096, 70)
    line = lines(Sequence(n))
    sides = [torch.randn(1, heads, n, rank) / rank for rank in ranks for _ in range(2)]
    leaves = [*torch.randn(3, 2, heads, n, 64).to(dtype), torch.randn(heads, line.length), *sides]

    def terms(values: torch.Tensor, *sides: torch.Tensor) -> Terms:
        return Terms(LineBias(values, line), *map(LowRank, sides[::2], sides[1::2]))

    once, again = (step("triton", leaves, terms, mask=mask) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)


def test_a_forget_gate_of_many_tokens_against_the_definition() -> None:
    """Of real sums, in float32: rows at the end, where they are largest."""
    gate, n = ForgetGate(2, 8), size(8192, 70)
    q, k, v, states = *torch.randn(3, 1, 2, n, 80), torch.randn(1, n, 8) - 2
    rows, every = slice(n - 64, n), slice(0, n)
    with torch.no_grad():
        ours = attention(
            *(x.to(DEVICE) for x in (q, k, v)), position=gate.terms(Sequence(n), states=states).to(DEVICE),
            mask=Mask.causal(), backend="triton",
        )  # fmt: skip
        exact = attention(
            *(x.double() for x in (q[:, :, rows], k, v)), backend="reference",
            position=gate.double().terms(Sequence(n), states=states.double()).narrow(rows, every),
            mask=Mask.causal().narrow(rows, every),
        )  # fmt: skip
    torch.testing.assert_close(ours[:, :, rows].cpu().double(), exact, rtol=0, atol=1e-4)


def test_auto_passes_over_kernels_that_forget_the_mask(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = importlib.import_module("relpos.engines.triton.spans")
    right = spans.allowed
    monkeypatch.setattr(spans, "allowed", lambda mask, *rest: right(None, *rest))
    tensors, given = of_auto(mask=Mask.causal())
    with pytest.warns(RuntimeWarning, match="'triton' failed its check"):
        output = attention(*tensors, **given)
    torch.testing.assert_close(output, attention(*tensors, **given, backend="reference"), rtol=1e-3, atol=1e-4)
    said = f"failed its check against the reference on {output.device}"
    assert said in explain(*tensors, **given).passed_over["triton"]


def test_nothing_is_checked_while_a_graph_is_captured(nothing_known: None) -> None:
    tensors, given = of_auto()
    attention(*tensors, **given, backend="sdpa")
    torch.cuda.synchronize()
    said = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said.append(explain(*tensors, **given))
        tensors[0] + 1  # a graph of nothing warns
    assert "cannot be checked under the capture of a CUDA graph" in said[0].passed_over["triton"]
    assert not verdicts._agreed
    assert explain(*tensors, **given).backend == "triton"


def training(length: int, dtype: torch.dtype, position: Mechanism | None = None) -> tuple[list[torch.Tensor], Any]:
    """The leaves of a training step, and what computes their gradients."""
    bias = (RelativePositionBias(8, seq_len=length, init_std=0.5) if position is None else position).to(DEVICE)
    q, k, v = (torch.randn(1, 8, length, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    leaves = [q, k, v, *bias.parameters()]

    def gradients() -> list[torch.Tensor]:
        output = attention(q, k, v, position=bias, queries=Sequence(length), mask=Mask.causal(), backend="triton")
        assert isinstance(output, torch.Tensor)
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    return leaves, gradients


@pytest.mark.parametrize(
    "position",
    [
        RelativePositionBias(8, seq_len=size(1024, 40), init_std=0.5),
        T5Bias(8) + RotaryEmbedding(64),
        ALiBi(8) + XPos(64),
        MultimodalRotary(64, (8, 12, 12)),
    ],
    ids=lambda position: type(position).__name__,
)
def test_a_captured_graph_gives_the_same_bits(position: Mechanism) -> None:
    leaves, gradients = training(size(1024, 40), torch.bfloat16, position)
    wanted = gradients()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for x in found:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    assert not torch.equal(found[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(), strict=True))


def test_a_step_of_65536_tokens_in_linear_memory() -> None:
    _, gradients = training(size(65_536, 70), torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gradients()
    assert all(bool(x.isfinite().all()) for x in found)
    assert torch.cuda.max_memory_allocated() - before < 2**30, "one head's scores would be 8 GiB"


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_in_one_graph(mode: str | None, unchecked: None) -> None:
    bias = (T5Bias(4, init_std=0.5, scaled=True) + RotaryEmbedding(64)).to(DEVICE)
    n = size(600, 40)
    q = torch.randn(1, 4, n, 64, device=DEVICE, requires_grad=True)

    def attend(x: torch.Tensor) -> Any:
        return attention(x, x, x, position=bias, queries=Sequence(n), backend="triton")

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    leaves = [q, *bias.parameters()]
    for _ in range(3):
        torch.testing.assert_close(with_gradients(compiled(q).clone(), leaves), with_gradients(attend(q), leaves))


@pytest.mark.filterwarnings("ignore")  # of FlexAttention's compiler
@pytest.mark.parametrize("backend", ["triton", "flex"])
@pytest.mark.parametrize("mask", ["padding", "padded keys alone", "an unused cache", "segments and intervals"])
def test_what_is_hidden_may_hold_anything(mask: str, backend: str, unchecked: None) -> None:
    torch._dynamo.reset()
    line, seen = lines(Sequence(cases.N)).to(DEVICE), cases.MASKS[mask].to(DEVICE)
    clean = [torch.randn(cases.B, cases.H, cases.N, 16, device=DEVICE) for _ in range(3)]
    blank, unseen = (x.to(DEVICE)[..., None] for x in cases.reach(cases.MASKS[mask], cases.H))
    bias, found = LineBias(torch.ones(cases.H, line.length, device=DEVICE), line), []
    for filling in (0.0, torch.nan):
        own = [x.masked_fill(at, filling) for x, at in zip(clean, (blank, unseen, unseen), strict=True)]
        leaves = [x.requires_grad_() for x in own]
        found.append(with_gradients(attention(*leaves, position=bias, mask=seen, backend=backend), leaves))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of FlexAttention's compiler
@pytest.mark.parametrize("mask", [None, *(name for name in MASKS if MASKS[name].blocks is None)])
def test_flex_compiled_is_what_the_definition_says(mask: str | None, unchecked: None) -> None:
    torch._dynamo.reset()  # a function that it compiled in eight ways it would not compile again
    line = lines(Sequence(N)).to(DEVICE)
    leaves = [x.to(DEVICE).requires_grad_() for x in (*torch.randn(3, B, H, N, 16), torch.randn(H, line.length))]
    given = {"position": LineBias(leaves[3], line), "mask": None if mask is None else MASKS[mask].to(DEVICE)}
    outs = (attention(*leaves[:3], **given, backend=name) for name in ("flex", "reference"))
    found, wanted = (with_gradients(out, leaves) for out in outs)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", engines.DTYPES)
@pytest.mark.parametrize("third", range(3))
def test_engines_agree_in_every_kind_of_call(third: int, dtype: torch.dtype, unchecked: None) -> None:
    """`relpos check` on this GPU, but for FlexAttention, which compiles for minutes and has tests of its own."""
    asked, only = ("triton", "streaming", "sdpa"), [torch.empty(0, device=DEVICE).device]
    rows = list(engines.check(asked, only=only, dtypes=[dtype], part=slice(third, None, 3)))
    assert [(row.engine, row.dtype, row.kind, row.fault) for row in rows if row.fault] == []
    assert {row.engine for row in rows if row.found is not None} == set(asked)


@pytest.mark.parametrize(("tool", "calls"), [("memcheck", ()), ("initcheck", ("--half",)), ("racecheck", ("--half",))])
def test_the_sanitizer_finds_nothing(tool: str, calls: tuple[str, ...], tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if ON_CPU:
        sanitizer = no_sanitizer(tmp_path)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).with_name("smallest_kernels.py")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, str(script), *calls],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else what lies beyond a tensor is allocated too
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
