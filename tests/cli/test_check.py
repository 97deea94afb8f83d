"""`relpos check`: what it prints, and its exit status."""

import re
from typing import Any

import pytest
import torch

import relpos
from relpos.bench import engines
from relpos.cli import main
from relpos.core import Scale, Softcap, Term
from relpos.engines.sdpa.engine import SDPA as sdpa
from relpos.engines.streaming import STREAMING as streaming

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, one dtype, three kinds of calls, no GPU."""
    some = [kind for kind in engines.kinds(20) if kind.name in ("1-D bias", "sinks, soft cap", "1-D bias, dropout")]
    monkeypatch.setattr(engines, "kinds", lambda n: some)
    monkeypatch.setattr(engines, "DTYPES", (torch.float32,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("_small")
def test_a_table_to_report(capsys: Captured) -> None:
    main(["check"])
    printed = capsys.readouterr().out
    assert re.match(r"relpos \S+, torch \S+, triton \S+, python 3\.\d+\.\d+\n\S+\ncpu: .+, \d+ cores, \S+\n\n", printed)
    assert re.search(r"\| streaming \| cpu +\| float32 \| 3 +\| \S+e-0\d \| \S+e-0\d +\| agrees +\| \d", printed)
    assert re.search(r"\| sdpa +\| cpu +\| float32 \| 1 +\|", printed)
    for engine in ("triton", "flex"):
        assert f"- {engine}, cpu, not run, not supported: a CUDA device (q is on cpu)\n" in printed
    assert re.search(r"- sdpa, cpu, left out, not supported: dropout with .*;\s+Softcap\n", printed, flags=re.DOTALL)
    assert all(len(line) <= 80 for line in printed.splitlines()[3:])


@pytest.mark.usefixtures("_small")
def test_a_line_for_every_kind_of_call(capsys: Captured) -> None:
    main(["check", "--all", "--engines", "sdpa,streaming"])
    printed = capsys.readouterr().out
    assert "\nstreaming, cpu, float32\n\n| call" in printed
    assert len(re.findall(r"\| 1-D bias +\|", printed)) == 2
    assert len(re.findall(r"\| sinks, soft cap +\|", printed)) == 1
    assert "triton, cpu" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines()[3:])


@pytest.mark.usefixtures("_small")
def test_an_engine_that_differs_or_raises_is_named_and_the_exit_status_is_1(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = streaming.run

    def wrong(call: Any) -> Any:
        out, lse = right(call)
        return (out * 1.1 if call.terms.of(Softcap) else out), lse

    def raising(call: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(streaming, "run", wrong)
    monkeypatch.setattr(sdpa, "run", raising)
    with pytest.raises(SystemExit) as caught:
        main(["check"])
    assert caught.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "| 1 differ |" in printed
    assert "- streaming, cpu, float32, sinks, soft cap: output: root mean square error 0.0" in printed
    assert "- sdpa, cpu, float32, 1-D bias: RuntimeError: no kernel image" in printed


@pytest.mark.slow
def test_the_kinds_of_calls_hold_every_term_and_every_engine_is_right_in_them() -> None:
    found: set[type] = set()
    before = torch.get_rng_state()
    for kind in engines.kinds(20):
        call = engines.make(kind, torch.float32)
        found |= {type(term) for term in call.terms}
        assert torch.equal(call.q, engines.make(kind, torch.float32).q)
        assert (call.seed is None) == (kind.dropout == 0)
        wanted = engines.expected(lambda kind=kind: engines.make(kind, torch.float32))
        ran = 0
        for name in ("streaming",) if kind.dropout else ("streaming", "sdpa"):
            try:
                differs = engines.difference(name, wanted, torch.device("cpu"))
            except NotImplementedError:
                continue
            ran += 1
            row = engines.EngineRow("cpu", name, "float32", kind.name, differs)
            assert row.fault is None, row
        assert ran
    assert torch.equal(torch.get_rng_state(), before)
    public = (getattr(relpos, name) for name in relpos.__all__)
    assert found | {Scale} == {x for x in public if isinstance(x, type) and issubclass(x, Term)}, (
        "a scale is the call's"
    )


def test_rows_are_counted_before() -> None:
    assert engines.count(("sdpa",), only=[torch.device("cpu")]) == len(engines.kinds(engines.TOKENS["cpu"])) * 4
