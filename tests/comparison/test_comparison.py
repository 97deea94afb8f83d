"""A whole comparison through the command: what it writes, how it goes on, and that kill -9 loses nothing."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from calls import Compared, call, snapshot
from schema import check, written

import relpos.comparison.experiment as experiment
from loaded import Loaded
from patience import PATIENCE
from relpos.cli import main
from relpos.files.writing import PART

pytestmark = pytest.mark.slow


@pytest.fixture
def finished(digits: Compared) -> Path:
    return digits[0].folder


@pytest.fixture
def results(finished: Path) -> dict[str, Any]:
    return written(finished)


def test_everything_asked_is_there(results: dict[str, Any]) -> None:
    check(results)
    assert [record["id"] for record in results["records"]] == ["none--recipe--seed0", "relative_2d--recipe--seed0"]
    assert [(cost["position"], cost["tokens"]) for cost in results["costs"]] == [("none", 64), ("relative_2d", 64)]
    assert results["costs"][0]["ratio"] == 1
    assert results["settings"]["recipe"]["steps"] == 3
    assert results["settings"]["quick"] is True
    parameters = {record["position"]: record["parameters"]["position"] for record in results["records"]}
    assert parameters == {"none": 0, "relative_2d": 15 * 15 * 4}


def test_the_schema_check_sees_faults(results: dict[str, Any]) -> None:
    results["records"][0]["metrics"][0]["accuracy"] = 0.999  # which the counts do not say
    with pytest.raises(AssertionError):
        check(results)


def test_the_same_call_again_does_no_work(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the command, too, where Python's began it."""

    def no_work(tasks: list[Any], at_once: int, **_: Any) -> list[Any]:
        assert not tasks, f"{[task.name for task in tasks]} were finished"
        return []

    monkeypatch.setattr(experiment, "run_tasks", no_work)
    before, gathered = snapshot(finished / "records"), (finished / "results.json").read_bytes()
    main(call(finished))
    assert snapshot(finished / "records") == before
    assert (finished / "results.json").read_bytes() == gathered
    assert "This comparison is finished. Its results, from" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recipe": ["--steps", "4"]}, "recipe.steps was 3, now 4"),
        ({"positions": "none"}, "positions was ['none', 'relative_2d'], now ['none']"),
    ],
)
def test_others_are_refused_by_name(
    changed: dict[str, Any], said: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {**snapshot(finished), **snapshot(finished / "records")}
    with pytest.raises(SystemExit) as caught:
        main(call(finished, **changed))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("relpos: error: ")
    assert said in line
    assert {**snapshot(finished), **snapshot(finished / "records")} == before


def alive(group: int) -> list[int]:
    """The processes of a group that are not over (a zombie is)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


COMPARE = """
import os, sys
os.setsid()
from relpos.cli import main
main(sys.argv[1:])
"""
"""`relpos` in a group of its own."""


def kill_in_the_middle(loaded: Loaded, program: list[str], out: Path, log: Path) -> None:
    """Start the command, SIGKILL its main process after the first record, and see its workers stop by themselves."""
    process, deadline = loaded.begin(program, log, needs=["train"]), time.monotonic() + PATIENCE
    try:
        while not list((out / "records").glob("*.json")):
            assert Path(f"/proc/{process}").exists(), "it ended before it could be killed"
            assert time.monotonic() < deadline, "no record"
            time.sleep(0.02)
        os.kill(process, signal.SIGKILL)
        assert loaded.end() == -signal.SIGKILL
        while alive(process):
            assert time.monotonic() < deadline, "workers without a parent stop at their next report"
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def test_killed_in_the_middle_it_goes_on(tmp_path: Path, loaded: Loaded) -> None:
    out = tmp_path / "out"
    program = ["-c", COMPARE, *call(out, recipe=["--steps", "20", "--set", "recipe.depth=1"])]
    kill_in_the_middle(loaded, program, out, tmp_path / "log")
    kept = snapshot(out / "records")
    assert 1 <= len(kept) < 4, "killed in the middle of training"
    for content, _ in kept.values():
        json.loads(content)
    half = out / "records" / f"{PART}0123.part"
    half.write_text('[{"position": "no')
    os.utime(half, (0, 0))

    done = loaded.run(*program, needs=["train"])
    assert done.returncode == 0, done.stderr
    after = snapshot(out / "records")
    assert len(after) == 2 + 2 + 1, "two runs, memory of two mechanisms, the timing"
    for name, content in kept.items():
        assert after[name] == content, f"{name} was written again"
    assert not list((out / "records").glob("*.part"))
    check(written(out))
    assert (out / "report.html").exists()
