"""The script that chooses tiles: its candidates, what it drops, and the line that it prints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relpos import LineBias, Sequence, Terms, lines
from relpos.engines.call import Call

FAST_SHARE = 3  # of its tests, in the fast part

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tune_triton.py"
launch = importlib.import_module("relpos.engines.triton.launch")


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("tune_triton", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPU")
@pytest.mark.parametrize("kind", ["forward", "table"])
def test_the_fastest_tiles_that_are_right(kind: str, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(script, "interleaved", timed)
    monkeypatch.setattr(script, "candidates", lambda kind: [(16, 16, 4, 1), (32, 32, 8, 2), (0, 0, 4, 1)])
    line = lines(Sequence(20))
    q, k, v = torch.randn(3, 1, 1, 20, 8)
    call = Call(q, k, v, Terms(LineBias(torch.randn(1, line.length), line)), None, 0.3)
    said = script.tune(kind, call, key, launch)
    assert seen == ["16, 16, 4, 1", "32, 32, 8, 2", "now"], "the third fails"
    assert said.startswith(f"    {key!r}: _shape(16, 16, 4, 1),")
    assert "2.00 times as fast" in said
    assert launch.SHAPES[key] is now


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_it_wants_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "expected a CUDA device; got none. Tiles are measured on the GPU that they are for.\n"
