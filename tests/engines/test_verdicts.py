"""Kernels that `auto` takes only after they agreed with the reference; the CPU's engines stand for those of a GPU."""

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engine_steps import with_gradients
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from patience import PATIENCE
from relpos import (
    Grid,
    LineBias,
    LineVectors,
    Mask,
    RotaryEmbedding,
    Sequence,
    Softcap,
    T5Bias,
    attention,
    explain,
    lines,
)
from relpos.core import Rows
from relpos.engines.flex import FLEX as flex
from relpos.engines.selection import SLOWER
from relpos.engines.self_check import verdicts
from relpos.engines.streaming import STREAMING as streaming
from relpos.engines.triton import TRITON as triton

FAST_SHARE = 3  # of its tests, in the fast part

launch = importlib.import_module("relpos.engines.triton.launch")
kernels = importlib.import_module("relpos.engines.triton.kernels")
table_kernels = importlib.import_module("relpos.engines.triton.table_kernels")
vector_kernels = importlib.import_module("relpos.engines.triton.vector_kernels")
window_kernels = importlib.import_module("relpos.engines.triton.window_kernels")
spans = importlib.import_module("relpos.engines.triton.spans")
variant = importlib.import_module("relpos.engines.self_check.variant")

N = 12


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is known yet, small calls are smaller; the calls that are made of both engines."""
    for name in ("_agreed", "_faults"):
        monkeypatch.setattr(verdicts, name, {})
    tokens = {("odd", False): 37, ("full", False): 32, ("odd", True): 13, ("full", True): 16}
    monkeypatch.setattr(variant, "TOKENS", tokens)
    monkeypatch.setattr(variant, "_CUT", {"odd": 4, "full": 8})
    monkeypatch.setattr(variant, "_FULL", 16)
    made: list[Any] = []

    class Counted(verdicts.Expected):  # type: ignore[name-defined,misc]
        def difference(self, *arguments: Any) -> Any:
            made.append(arguments)
            return super().difference(*arguments)

    monkeypatch.setattr(verdicts, "Expected", Counted)
    return made


Change = Callable[[Callable[[Tensor], Tensor]], None]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Changes what the streaming engine gives, from its right output."""
    right = streaming.run

    def changed(change: Callable[[Tensor], Tensor]) -> None:
        def run(call: Any) -> tuple[Tensor, Tensor]:
            out, lse = right(call)
            return change(out), lse

        monkeypatch.setattr(streaming, "run", run)
        monkeypatch.setattr(streaming, "plan", lambda call: run)

    return changed


@pytest.fixture
def gated(checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streaming engine is `auto`'s first choice, and must be checked."""
    monkeypatch.setattr(streaming, "checked_on", ("cpu",))
    monkeypatch.setitem(SLOWER, "streaming", lambda call, kind: None)
    return checks


@pytest.fixture
def interpreted(checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Triton's kernels are, in its interpreter and in the smallest tiles."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setattr(triton, "checked_on", ("cpu",))
    monkeypatch.setitem(SLOWER, "triton", lambda call, kind: None)
    for key in launch.SHAPES:
        monkeypatch.setitem(launch.SHAPES, key, launch._shape(16, 16, 4, 1))
    monkeypatch.setattr(spans, "COARSE", 16)
    return checks


def inputs(n: int = N, dtype: torch.dtype = torch.float32, width: int = 8) -> list[Tensor]:
    return [torch.randn(1, 2, n, width, dtype=dtype) for _ in range(3)]


def bias(n: int = N) -> LineBias:
    line = lines(Sequence(n))
    return LineBias(torch.randn(2, line.length), line)


class HalfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def raising(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


BROKEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "output": (lambda x: x * 1.01, "output: root mean square error"),
    "one number": (lambda x: x + 0.1 * (torch.arange(x.numel()) == 20).view(x.shape), "output: "),
    "gradients": (lambda x: HalfTheGradient.apply(x), "gradient of q: root mean square error"),  # type: ignore[no-any-return]
    "NaN": (lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 3, torch.nan, x), "output: NaN"),
    "an exception": (raising, "RuntimeError: no kernel image is available"),
    "another shape": (lambda x: x[:, :, :-1], "output: shape (2, 2, 12, 8) instead of (2, 2, 13, 8), and"),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_wrong_kernel_is_passed_over_with_one_warning(
    what: str, gated: list[Any], wrong: Change, unchecked: None
) -> None:
    change, says = BROKEN[what]
    wrong(change)
    tensors, position = inputs(), bias()
    with pytest.warns(
        RuntimeWarning, match=r"'streaming' failed its check .* on cpu.*relpos check.*prints details"
    ) as all_:
        ours = attention(*tensors, position=position)
    assert len(all_) == 1
    torch.testing.assert_close(ours, attention(*tensors, position=position, backend="reference"))
    made = len(gated)
    attention(*tensors, position=position)  # warnings are errors here
    said = explain(*tensors, position=position)
    assert len(gated) == made, "once is enough"
    assert said.backend != "streaming"
    assert "failed its check against the reference on cpu: " in said.passed_over["streaming"]
    assert says in said.passed_over["streaming"]


def test_an_engine_asked_for_by_name_is_not_checked(gated: list[Any], wrong: Change) -> None:
    wrong(lambda x: x + 1)
    tensors = inputs()
    out, right = (attention(*tensors, backend=name) for name in ("streaming", "reference"))
    torch.testing.assert_close(out, right + 1)
    assert not gated


def test_a_right_kernel_is_checked_once_a_variant(gated: list[Any]) -> None:
    q, k, v = inputs()
    assert explain(q, k, v, position=bias()).backend == "streaming"
    assert len(gated) == 2, "a cut tile and full ones"
    attention(q, k, v, position=bias())
    with torch.no_grad():
        attention(*inputs(N + 3), position=bias(N + 3))
    attention(*(x.requires_grad_() for x in inputs()), position=bias())
    assert len(gated) == 2
    segments, grid = torch.arange(N) // 5, lines(Grid(3, 4))
    others: list[dict[str, Any]] = [
        {"position": bias(), "mask": Mask.causal()},
        {"position": bias(), "mask": Mask.window(3, 2)},
        {"position": bias(), "mask": Mask.packed(segments)},
        {"position": bias(), "mask": Mask.packed(segments.int())},
        {"position": bias() + RotaryEmbedding(8).terms(Sequence(N))},
        {"position": bias(), "dropout": 0.1},
        {"position": LineBias(torch.randn(2, grid.length), grid)},
        {"position": Softcap(3.0)},
        {},
        *({"tensors": x} for x in (inputs(dtype=torch.bfloat16), inputs(width=16), [q, k[:, :1], v[:, :1]])),
        {"tensors": inputs(300)},
    ]
    for number, given in enumerate(others):
        assert explain(*given.pop("tensors", (q, k, v)), **given).backend == "streaming"
        assert len(gated) == 2 * (number + 2), f"another variant: {given}"


def test_no_random_stream_moves(gated: list[Any], unchecked: None) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002

    tensors, position = inputs(), bias()
    before = states()
    explain(*tensors, position=position, dropout=0.2)
    assert gated
    assert states() == before


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
}


def refuse(x: Any) -> Any:
    raise AssertionError("a tensor of the check was saved by its caller")


@pytest.mark.parametrize("name", list(CALLERS))
def test_it_is_checked_whatever_the_caller_has_on(name: str, gated: list[Any], wrong: Change) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    wrong(look)
    tensors, position = inputs(), bias()
    with CALLERS[name]():
        assert explain(*tensors, position=position).backend == "streaming"
    assert seen == [(True, False, False)] * 2


def test_the_first_call_may_stand_in_a_checkpoint(gated: list[Any]) -> None:
    leaves, position = [x.requires_grad_() for x in inputs()], bias()
    out = checkpoint(lambda *x: attention(*x, position=position), *leaves, use_reentrant=False)
    plain = attention(*leaves, position=position, backend="reference")
    torch.testing.assert_close(with_gradients(out, leaves), with_gradients(plain, leaves))
    assert len(gated) == 2


@pytest.mark.parametrize("mode", [FakeTensorMode(), FlopCounterMode(display=False)], ids=["fake tensors", "counted"])
def test_nothing_is_run_under_a_dispatch_mode(mode: Any, gated: list[Any]) -> None:
    with mode:
        tensors = inputs()
        said = explain(*tensors)
    assert said.backend != "streaming"
    assert "is unchecked on cpu, and cannot be checked under fake tensors" in said.passed_over["streaming"]
    if isinstance(mode, FakeTensorMode):
        assert explain(*tensors).backend != "streaming", "a fake tensor outside of its mode"
    assert not gated
    assert explain(*inputs()).backend == "streaming"
    with mode:
        assert explain(*inputs()).backend == "streaming", "the last verdict counts"


def test_nothing_is_run_under_transforms(gated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "unsupported", lambda call: None)
    said = []

    def asks(x: Tensor) -> Tensor:
        said.append(explain(x, x, x))
        return x

    torch.func.vmap(asks)(torch.randn(2, 1, 2, N, 8))
    assert "cannot be checked under torch.func" in said[0].passed_over["streaming"]
    assert not gated


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_memory_that_runs_out_is_no_verdict(error: Exception, gated: list[Any]) -> None:
    with mock.patch.object(streaming, "run", side_effect=error):
        assert "memory ran out" in explain(*inputs()).passed_over["streaming"]
    assert explain(*inputs()).backend == "streaming"


def test_a_wrong_kernel_whose_warning_is_an_error_is_known_all_the_same(gated: list[Any], wrong: Change) -> None:
    wrong(lambda x: x + 1)
    with pytest.raises(RuntimeWarning):
        attention(*inputs())
    attention(*inputs())


def test_threads_share_one_verdict_and_one_warning(
    gated: list[Any], wrong: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(lambda x: x + 1)
    both = threading.Barrier(2, timeout=PATIENCE)

    def asks(_: int) -> str:
        both.wait()
        return explain(*inputs()).passed_over["streaming"]

    said: list[Any] = []  # not recorded by Python, whose filters another thread may change meanwhile
    monkeypatch.setattr(verdicts, "warnings", SimpleNamespace(warn=lambda *words, **_: said.append(words)))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(asks, range(2))
    assert one == other
    assert len(said) == 1


def test_no_check_is_asked_for_where_an_engine_needs_none(checks: list[Any]) -> None:
    assert triton.checked_on == flex.checked_on == ("cuda",)
    attention(*inputs(), position=bias())
    assert not checks


def test_tritons_kernels_agree_in_the_interpreter(interpreted: list[Any]) -> None:
    assert explain(*inputs(), position=bias()).backend == "triton"
    assert explain(*inputs(), position=bias(), mask=Mask.causal(), dropout=0.1).backend == "triton"
    assert len(interpreted) == 6, "two sizes each, and a table that is read"


def test_a_kernel_that_reads_tables_wrongly_is_passed_over(
    interpreted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Rows.in_32_bits.func
    monkeypatch.setattr(Rows, "in_32_bits", property(lambda rows: real(rows) * 0))  # all entries from one row
    tensors, given = inputs(), {"position": T5Bias(2, init_std=1.0), "queries": Sequence(N)}
    with pytest.warns(RuntimeWarning, match="failed its check .* output: root mean square error"):
        found = attention(*tensors, **given)
    torch.testing.assert_close(found, attention(*tensors, **given, backend="reference"))


def test_tritons_kernels_that_forget_the_mask_are_passed_over_under_one(
    interpreted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = spans.allowed
    monkeypatch.setattr(spans, "allowed", lambda mask, *rest: real(None, *rest))
    tensors, given = inputs(), {"position": bias(), "mask": Mask.causal()}
    assert explain(*tensors, position=bias()).backend == "triton"
    with pytest.warns(RuntimeWarning, match="a mask of right"):
        found = attention(*tensors, **given)
    torch.testing.assert_close(found, attention(*tensors, **given, backend="reference"))
    assert explain(*tensors, position=bias()).backend == "triton"


@pytest.mark.slow
def test_tritons_kernels_of_vectors_are_checked(interpreted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    line = lines(Sequence(N))
    index, few = torch.arange(line.length) % 5, torch.randn(2, 5, 8)
    tensors, position = inputs(), LineVectors(few, index, line, "query") + LineVectors(few, index, line, "key")
    assert explain(*tensors, position=position).backend == "triton"
    real = vector_kernels.sum_by_column

    class Late:
        """Leaves out the first run of each column."""

        def __getitem__(self, grid: Any) -> Any:
            def run(out: Any, pairs: Any, others: Any, runs: Any, *rest: Any, **options: Any) -> None:
                real[grid](out, pairs, others, runs._replace(begins=runs.begins + runs.ahead[0]), *rest, **options)

            return run

    monkeypatch.setattr(vector_kernels, "sum_by_column", Late())
    with pytest.warns(RuntimeWarning, match="gradient of"):
        assert explain(*tensors, position=position, mask=Mask.causal()).backend != "triton"


@pytest.mark.parametrize(
    ("kernel", "count"),
    [
        ("backward_keys", 20),
        ("backward_queries", 20),
        ("backward_rows", 20),
        ("backward_pairs", 20),
        ("backward_windows", N),
    ],
)
def test_a_kernel_of_tritons_that_writes_nothing_is_found(
    kernel: str, count: int, interpreted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: [x.fill_(0.5) for x in written(*arguments[:4])]

    def written(*first: Any) -> list[torch.Tensor]:
        """What the kernel should have written: of memory that nobody wrote numpy may warn."""
        if kernel == "backward_rows":
            return [first[1].sums]
        return [x for x in first[: 4 if kernel == "backward_windows" else 2] if isinstance(x, torch.Tensor)]

    module = next(module for module in (kernels, table_kernels, window_kernels) if hasattr(module, kernel))
    monkeypatch.setattr(module, kernel, Idle())
    with pytest.warns(RuntimeWarning, match="gradient of"):
        assert explain(*inputs(count), position=bias(count)).backend != "triton"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    known = dict(verdicts._agreed), dict(verdicts._faults)
    yield
    assert known == (verdicts._agreed, verdicts._faults), "a test left something known"
