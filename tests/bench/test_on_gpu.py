"""The commands of `benchmarks/` for a GPU, without one: what a run says, which tiles are chosen, what is refused."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from loaded import Loaded
from relpos import LineBias, Sequence, Terms, lines
from relpos.bench.cases import find_cases
from relpos.bench.measure import quartiles
from relpos.engines.call import Call
from warm import warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASE = "line-8192-bfloat16-step-cuda"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(peer: str, milliseconds: float, **more: Any) -> dict[str, Any]:
    rounds = [milliseconds] * 3
    return {
        "part": "attention", "case": CASE, "peer": peer, "title": peer, "backend": None, "ms": quartiles(rounds, 3),
        "ratio": quartiles([milliseconds / 2.0] * 3, 3), "against": "sdpa-free", "rounds_ms": rounds, "extra_mib": 1.0,
        "reason": None, **more,
    }  # fmt: skip


def measured() -> list[dict[str, Any]]:
    failed = {"outcome": "failed", "seconds": 3.0, "said": "x = 1\nE   AssertionError: 2 is not 1\nE   more"}
    return [
        {"part": "tests", "test": "tests/engines/test_gpu.py::test_a", "outcome": "passed", "seconds": 1.0, "said": ""},
        {"part": "tests", "test": "tests/engines/test_gpu.py::test_b", **failed},
        {"part": "tests", "status": 1, "seconds": 90.0},
        {"part": "attention", "surroundings": {"device": "a card", "driver": "5", "torch": "2.11.0"}},
        entry("sdpa-free", 2.0),
        entry("relpos-auto", 2.5),
        *({"part": "tiles", "kind": "keys", "width": 64, "tile": [64, n, 4, 2], "ms": n / 32} for n in (64, 32, 128)),
        {"part": "tiles", "kind": "keys", "width": 64, "tile": [16, 16, 8, 4], "failed": "OutOfResources"},
        {"part": "check", "call": "triton, float16, causal", "lack": None, "fault": "NaN"},
        {"part": "check", "call": "triton, float16, blocks", "lack": "blocks", "fault": None},
        *(
            {
                "part": "retrofits", "model": "T5", "batch": 1, "tokens": 9, "train": True, "published_ms": 3.0,
                "retrofit_ms": 2.0, "ratio": 1.5,
            },
            {"part": "retrofits", "model": "T5", "train": True, "border": 9},
            {"part": "retrofits", "model": "T5", "train": False, "border": None},
            {"part": "retrofits", "model": "BEiT", "failed": "OutOfMemoryError()"},
        ),
        {"part": "flex", "causal": True, "learned": False, "train": True, "ms": {"flex": 4.0, "relpos": 2.0}},
        {"part": "flex", "ended": "its time was over"},
    ]  # fmt: skip


def test_a_report_says_what_failed_and_which_tiles_are_best() -> None:
    said = "\n".join(script("gpu_report").said(measured()))
    assert "tests: 1 of 2 passed, 90 s" in said
    assert "failed: tests/engines/test_gpu.py::test_b: AssertionError: 2 is not 1" in said
    assert "tiles: keys, width 64: [64, 32, 4, 2] 1.000 ms; [64, 64, 4, 2] 2.000 ms" in said
    assert '("keys", "half", 64): _shape(64, 32, 4, 2),' in said


def test_a_report_reads_what_a_run_left_that_was_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(line) for line in measured()]
    assert list(script("gpu_report").whole("\n".join(lines)[:-5])) == measured()[:-1]
    assert capsys.readouterr().out == f"not read: {lines[-1][:-5]}\n"


def test_a_report_says_which_borders_and_faults_were_found() -> None:
    report = script("gpu_report")
    assert list(report.said_of_models(measured())) == [
        "retrofits: T5, 1 x 9, step: 3.00 to 2.00 ms, 1.50 times as fast",
        "border: T5: Borders(NEVER, 9)",
        "flex: causal, train: flex 4.000 ms, relpos 2.000 ms",
    ]
    assert list(report.said_of_faults(measured())) == [
        "check: 2 calls, 1 of them served, 1 wrong",
        "  wrong: triton, float16, causal: NaN",
        "retrofits: BEiT: OutOfMemoryError()",
        "flex: the part: its time was over",
    ]


@pytest.mark.slow
def test_a_part_of_a_run_on_a_gpu_runs_on_a_cpu_too(tmp_path: Path, loaded: Loaded) -> None:
    """In a process of its own. `on_gpu.py FOLDER --dry` runs all, in ten minutes at most."""
    with warm_python(loaded, tmp_path, needs=["compiler"]) as python:
        command = [python, BENCHMARKS / "on_gpu.py", tmp_path, "--dry", "--parts", "flex", "--seconds", "40"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text("utf-8").splitlines()]
    assert [line["part"] for line in lines] == ["flex"] * 6
    assert not any(line["failed"] for line in lines)


def test_results_of_a_run_are_a_table_of_the_readme() -> None:
    found = script("gpu_report").results(measured())
    assert list(found["cases"]) == [CASE]
    assert found["cases"][CASE]["sizes"] == find_cases(CASE)[0].sizes
    assert ("bias-free SDPA, flash", 1.25) in [(target["against"], target["reached"]) for target in found["targets"]]
    table = script("readme").table(json.loads(json.dumps(found)), "cuda")
    assert "| case | relpos |" in table, "a peer that was not measured has no column"
    assert "| training step, relative bias, N = 8,192, D = 64 | 1.25 (1.25 to 1.25) |" in table


def test_every_outcome_is_a_line_as_soon_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pytest itself, in a process whose only plugin is the command's."""
    (tmp_path / "test_two.py").write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n", encoding="utf-8")
    written = tmp_path / "lines.jsonl"
    monkeypatch.setenv("RELPOS_GPU_LINES", str(written))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_gpu", "-p", "no:cacheprovider", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    right, wrong = map(json.loads, written.read_text(encoding="utf-8").splitlines())
    assert (right["outcome"], right["said"]) == ("passed", "")
    assert wrong["test"].endswith("test_wrong")
    assert "assert 1 == 2" in wrong["said"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPU")
@pytest.mark.parametrize("kind", ["forward", "table"])
def test_the_fastest_tiles_that_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = script("tune_triton")
    launch = importlib.import_module("relpos.engines.triton.launch")
    limits = importlib.import_module("relpos.engines.triton.limits")
    monkeypatch.setattr(limits, "FEW", 0)
    key = (kind, "full", 64)
    now = launch.SHAPES[key]
    seen: list[str] = []

    def timed(works: dict[str, Any], *_: Any) -> tuple[dict[str, list[float]], dict[str, str]]:
        for name, work in works.items():
            work.forward()
            assert launch.SHAPES[key] == (now if name == "now" else launch._shape(*map(int, name.split(", "))))
        seen.extend(works)
        return {name: [3.0, 1.0 if name.startswith("16") else 2.0, 0.5] for name in works}, {}

    monkeypatch.setattr(tune, "interleaved", timed)
    monkeypatch.setattr(tune, "candidates", lambda kind: [(16, 16, 4, 1), (32, 32, 8, 2), (0, 0, 4, 1)])
    line = lines(Sequence(20))
    q, k, v = torch.randn(3, 1, 1, 20, 8)
    call = Call(q, k, v, Terms(LineBias(torch.randn(1, line.length), line)), None, 0.3)
    said = tune.tune(kind, call, key, launch)
    assert seen == ["16, 16, 4, 1", "32, 32, 8, 2", "now"], "the third fails"
    assert said.startswith(f"    {key!r}: _shape(16, 16, 4, 1),")
    assert "2.00 times as fast" in said
    assert launch.SHAPES[key] is now


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("on_gpu", ["out"], "expected a CUDA device; got none. Run this on the GPU that is asked.\n"),
        (
            "on_gpu",
            ["out", "--parts", "speed"],
            "expected parts of tests, check, tiles, attention, short, retrofits, flex; got 'speed'. Leave it out.\n",
        ),
        ("tune_triton", [], "expected a CUDA device; got none. Tiles are measured on the GPU that they are for.\n"),
    ],
)
def test_what_it_cannot_do_is_a_line(
    name: str,
    arguments: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    assert script(name).main() == 2
    assert capsys.readouterr().err == line
    assert not list(tmp_path.iterdir())
