"""`--detach`: a coordinator in the background, found by the same command, and jobs that go on by themselves."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import call

from relpos.cli import main
from relpos.comparison import cluster as clusters
from relpos.comparison import detached

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.filterwarnings("ignore:::submitit", "ignore:::distributed", "ignore:::tornado")


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes `relpos` a program that is given, in the background."""

    def make(program: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable} -IS\n{program}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return make


def test_a_process_in_the_background_is_found_while_it_lives(says: Callable[[str], None], tmp_path: Path) -> None:
    about = tmp_path / detached.ABOUT
    says(
        f"import json, os, sys\nprint(*sys.argv[1:], flush=True)\nwith open({str(tmp_path / 'new')!r}, 'w') as about:\n"
        f"    json.dump({{'process': os.getpid(), 'host': 'here'}}, about)\nos.rename(about.name, {str(about)!r})\n"
        "os.read(os.open(sys.argv[-1], 0), 1)\nprint('end')"
    )
    os.mkfifo(tmp_path / "end")
    assert detached.running(tmp_path) is None
    line = detached.start(tmp_path, ["compare", str(tmp_path / "end")])
    number = json.loads(about.read_text())["process"]
    assert line.startswith(f"In the background: process {number} on ")
    assert (detached.running(tmp_path) or "").startswith(f"process {number} on ")
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        if len(heard) == 1:
            (tmp_path / "end").write_text("x")

    detached.follow(tmp_path, hear)
    assert heard == [f"-m relpos compare {tmp_path / 'end'}", "end"]
    assert detached.running(tmp_path) is None
    os.waitpid(number, 0)


def test_one_that_ends_at_once_is_an_error(says: Callable[[str], None], tmp_path: Path) -> None:
    says("import sys, time; print('relpos: error: no', file=sys.stderr, flush=True); time.sleep(0.5); sys.exit(2)")
    with pytest.raises(
        ValueError, match=r"^expected a coordinator in .*; got one that ended with: relpos: error: no\."
    ):
        detached.start(tmp_path, [])
    assert detached.running(tmp_path) is None


def test_whoever_looks_disturbs_nobody(says: Callable[[str], None], tmp_path: Path, monkeypatch: Any) -> None:
    """Two look at once, by shared locks: on NFS, a file that is only read takes no other. And two begin at once."""
    log = tmp_path / detached.LOG
    log.write_text("words of an earlier one\n")
    with log.open("rb") as another:
        fcntl.flock(another, fcntl.LOCK_SH)
        assert detached.running(tmp_path) is None
    says("raise SystemExit('relpos: error: no')")
    monkeypatch.setattr(detached, "_POLL", 0.0)
    with log.open("ab") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"^expected one coordinator in the background; got another that has "):
            detached.start(tmp_path, [])
    assert log.read_text() == "words of an earlier one\n"


def test_a_disk_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (tmp_path / detached.LOG).touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert detached.running(tmp_path) is None
    with pytest.raises(ValueError, match=r"^expected a disk with locks of files for --detach; got .*not implemented\."):
        detached.start(tmp_path, [])


def test_jobs_of_slurm_are_submitted_and_attached_to(
    made: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Slurm is told; answers are there for the first questions only."""
    from test_elsewhere import answer

    from relpos.comparison.settings import environment
    from relpos.results import plain

    sent: list[tuple[str, Any]] = []

    def refused(why: str) -> None:
        raise RuntimeError(why)

    class Jobs:
        def __init__(self, more: dict[str, Any]) -> None:
            self.more = more

        def submit(self, _: Any, parcel: Path, shared: Path, there: Path) -> Any:
            from relpos.comparison.trial import head_of

            head = head_of(parcel.read_bytes())
            sent.append((head["name"], self.more.get("additional_parameters", {}).get("dependency")))
            if head["name"] == "environment":
                record = {"device": "cpu", "environment": plain(environment("cpu"))}
                there.write_bytes(answer(parcel.read_bytes(), record=record))
            return type("Job", (), {"job_id": str(len(sent)), "state": "RUNNING"})()

    executor = made()
    monkeypatch.setattr(executor, "_executor", Jobs)
    monkeypatch.setattr(executor, "_cluster", "slurm")
    monkeypatch.setattr(executor, "_ask", lambda **_: None)
    monkeypatch.setattr(clusters, "_executor", lambda _: executor)
    command = [*call(tmp_path / "out"), "--cluster", "slurm", "--shared", str(tmp_path), "--detach"]
    with monkeypatch.context() as kept:
        kept.setattr(executor, "shutdown", lambda **_: None)  # one executor for both commands
        main(command)
        said = capsys.readouterr().out
        assert said.startswith("A first, short job says what a node computes with; this waits until it has run.\n")
        assert "Submitted 5 jobs. " in said
        main(command)
        assert "Submitted 0 jobs, and 5 before. " in capsys.readouterr().out
        assert len(sent) == 6, "the same jobs"
        executor._queue, executor._asked = dict.fromkeys("23456", "RUNNING") | {"3": "TIMEOUT"}, math.inf
        main(command)
        assert "Submitted 1 job, and 4 before. " in capsys.readouterr().out, "for one that ended without an answer"
        executor._queue["4"] = "FAILED"
        monkeypatch.setattr(Jobs, "submit", lambda *_: refused("sbatch: error"))
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("relpos: error: expected to submit all jobs; got Slurm does not take its job: ")
        assert error.endswith(" The others go on; the same command submits the rest.\n")
    assert [name for name, _ in sent][1:3] == ["none--recipe--seed0", "relative_2d--recipe--seed0"]
    assert [after for _, after in sent[:6]] == [None, None, None, *["afterany:2:3"] * 2, "afterany:2:3:4:5"]
    assert [name for name, _ in sent[6:]] == ["relative_2d--recipe--seed0"]
