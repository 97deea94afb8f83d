"""Work as jobs, by submitit's local executor: answers come by the spool, and jobs outlive whoever submitted them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import work
from dask_cluster import wait_for
from test_elsewhere import answer, parcel

from relpos.comparison.answer import opened
from relpos.comparison.executors import run_on
from relpos.comparison.trial import head_of, trial
from relpos.comparison.workers import Event, WorkerTask

slurm_jobs = pytest.importorskip("relpos.comparison.slurm_jobs")
pytest.importorskip("submitit")
pytestmark = pytest.mark.filterwarnings("ignore:::submitit")

DOUBLE = WorkerTask("double", work.double, (21,))
Made = Callable[..., slurm_jobs.SlurmExecutor]


def spool(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "spool").iterdir())


def events(executor: slurm_jobs.SlurmExecutor, task: WorkerTask, **options: Any) -> Iterator[Event]:
    return run_on(executor, [task], parcel, b"", lambda *_: None, **options)


@pytest.mark.slow
def test_a_job_answers_by_the_spool_and_outlives_its_submitter(
    made: Made, tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm))
    mark = tmp_path / "mark"
    task = WorkerTask("wait", work.wait_at_first, (mark,))
    first = events(made(), task)
    assert next(first).kind == "started"
    os.kill(int(wait_for(mark)), signal.SIGKILL)  # its answer is "lost", and it is submitted anew
    assert [(event.kind, event.value) for event in first] == [("finished", "done")]
    assert spool(tmp_path) == [".shared"]

    mark.unlink()
    left = events(made(), task)
    assert next(left).kind == "started"
    number = int(wait_for(mark))
    left.close()  # type: ignore[attr-defined]  # as a coordinator that dies
    second = made()
    later = second.submit(trial, parcel(task), b"")
    assert len(list((tmp_path / "submitit").glob("*_submitted.pkl"))) == 3, "the same job"
    os.kill(number, signal.SIGKILL)
    assert opened(later.result(), head_of(parcel(task))["key"]).kind == "lost"


def test_an_answer_in_the_spool_is_taken_and_a_forged_one_is_not(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    executor = made()

    def send(head: dict[str, Any], *files: Path) -> Any:
        """A job that answers at once."""
        sent.append(head["key"])
        files[-1].write_bytes(answer(files[0].read_bytes()))
        return type("Job", (), {"job_id": "1", "state": "DONE"})()

    monkeypatch.setattr(executor, "_send", send)
    here = parcel(DOUBLE)
    there = tmp_path / "spool" / f"{head_of(here)['key']}.answer"
    for content, times in ((answer(here), 0), (b"forged", 1), (answer(here, kind="failed", error="x"), 2)):
        there.write_bytes(content)
        there.with_suffix(".job").write_text('{"id": "1"}')  # the one that answered
        found = [(event.kind, event.value) for event in events(executor, DOUBLE)]
        assert found[-1] == ("finished", 42)
        assert len(sent) == times
        assert not there.exists(), "once stored, it is removed"
    there.write_bytes(answer(here))
    assert [event.value for event in events(executor, DOUBLE, keep=True)][-1] == 42
    assert there.exists()


@pytest.mark.parametrize(
    ("state", "said", "jobs"),
    [
        ("TIMEOUT", "its job 7 reached its time limit; allow more: --slurm timeout_min=MINUTES", 1),
        ("CANCELLED", "its job 7 was cancelled", 1),
        ("NODE_FAIL", "RuntimeError: its job 7 ended without an answer; /log may say why", 3),
    ],
)
def test_a_job_that_ends_without_an_answer(
    state: str, said: str, jobs: int, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, sent = made(patience=0.0), []
    paths = type("Paths", (), {"stderr": "/log"})
    job = type("Job", (), {"job_id": "7", "state": state, "paths": paths})()
    monkeypatch.setattr(executor, "_send", lambda *_: sent.append(1) or job)
    assert [event.value for event in events(executor, DOUBLE)][-1] == said
    assert len(sent) == jobs


def test_costs_are_measured_on_one_node(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executor = made({"additional_parameters": {"constraint": "a100"}}, cost_node="n7")
    seen: list[Any] = []

    def keep(more: dict[str, Any]) -> Any:
        seen.append(more)
        return type("Submitit", (), {"submit": lambda self, *_: None})()

    monkeypatch.setattr(executor, "_executor", keep)
    for cost, alone in ((False, False), (True, False), (True, True)):
        executor._send({"cost": cost, "alone": alone})
    node = {"additional_parameters": {"constraint": "a100", "nodelist": "n7"}}
    assert seen == [{}, node, {**node, "exclusive": True}]


def test_what_submitit_does_not_know_is_one_line(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^expected Slurm, with parameters .*; got Unknown argument 'gpu'"):
        made({"gpu": 1})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"^expected Slurm, .*; got .*sbatch"):
        made(cluster="slurm")
