"""Work as jobs, by submitit's local executor: answers come by the spool, and jobs outlive whoever submitted them."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import work
from dask_cluster import wait_for
from test_elsewhere import answer, parcel

from relpos.comparison.answer import opened
from relpos.comparison.elsewhere import machine_of
from relpos.comparison.executors import run_on
from relpos.comparison.settings import environment
from relpos.comparison.trial import head_of, trial
from relpos.comparison.workers import Event, WorkerTask
from relpos.results import plain
from relpos.train import OURS

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
    monkeypatch.setattr(slurm_jobs.SlurmExecutor, "_executor", lambda *_: [] + "module load cuda")
    with pytest.raises(ValueError, match=r"^expected Slurm, .*; got can only concatenate list"):
        made({"setup": "module load cuda"})


def test_a_shared_folder_that_cannot_be_written_is_one_line(made: Made, tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    with pytest.raises(
        ValueError, match=r"^expected a folder for --shared that can be written; got .*: Not a dir.*ed\."
    ):
        slurm_jobs.SlurmExecutor(tmp_path / "spool" / "x", {})


def test_an_answer_that_comes_while_slurm_is_asked_is_kept(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job has ended, and no answer was there before."""
    executor, here = made(), parcel(DOUBLE)
    key = head_of(here)["key"]
    there = tmp_path / "spool" / f"{key}.answer"
    there.with_suffix(".job").write_text('{"id": "1"}')
    monkeypatch.setattr(executor, "_cluster", "slurm")
    executor._queue, executor._asked = {"1": "COMPLETED"}, math.inf
    monkeypatch.setattr(executor, "_ask", lambda **_: there.write_bytes(answer(here)))
    executor.drop_ended([key])
    assert there.exists()
    monkeypatch.setattr(executor, "_ask", lambda **_: None)
    there.unlink()
    executor.drop_ended([key])
    assert not there.with_suffix(".job").exists()


@pytest.mark.parametrize(
    ("changes", "node"),
    [({"worker": "n7"}, "n7"), ({"worker": "n7", "kind": "refused"}, None), ({"worker": "n7\nrm -r ~"}, None)],
)
def test_the_node_of_measurements_is_one_that_did_its_work(
    changes: dict[str, Any], node: str | None, made: Made, tmp_path: Path
) -> None:
    """Its name goes into the script of a job."""
    executor, here = made(), parcel(DOUBLE)
    one = slurm_jobs._SpooledWork(head_of(here)["key"], Future())
    (tmp_path / "spool" / f"{one.key}.answer").write_bytes(answer(here, **changes))
    executor._look(one, {f"{one.key}.answer"})
    assert executor._cost_node == node


def test_a_folder_in_place_of_an_answer_holds_up_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, other = made(), WorkerTask("other", work.double, (1,))

    def send(_: Any, sent: Path, __: Path, there: Path) -> Any:
        if sent.read_bytes() == parcel(other):
            there.write_bytes(answer(sent.read_bytes()))
        else:
            there.mkdir(exist_ok=True)
        return type("Job", (), {"job_id": "1", "state": "DONE"})()

    monkeypatch.setattr(executor, "_send", send)
    found = list(run_on(executor, [DOUBLE, other], parcel, b"", lambda *_: None))
    assert {(event.task.name, event.value) for event in found if event.kind != "started"} == {
        ("double", "ValueError: its answer cannot be used: it is a folder"),
        ("other", 42),
    }


def test_what_machines_said_of_themselves_is_kept_for_the_same_machines(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other partitions have other cards."""
    sent = []

    def send(self: Any, head: dict[str, Any], here: Path, _: Path, there: Path) -> Any:
        sent.append(self.machines)
        record = {"device": "cpu", "environment": plain(environment("cpu"))}
        there.write_bytes(answer(here.read_bytes(), record=record))
        return type("Job", (), {"job_id": "1", "state": "DONE"})()

    monkeypatch.setattr(slurm_jobs.SlurmExecutor, "_send", send)
    for parameters, node in (
        ({"cpus_per_task": 1}, None),
        ({"cpus_per_task": 1}, None),
        ({"cpus_per_task": 2}, None),
        ({"cpus_per_task": 1}, "n7"),
    ):
        assert machine_of(made(parameters, cost_node=node), "auto", OURS)[0] == "cpu"
    assert sent == [
        "(None, [('cpus_per_task', 1)])",
        "(None, [('cpus_per_task', 2)])",
        "('n7', [('cpus_per_task', 1)])",
    ]


def test_a_job_that_slurm_does_not_take_is_one_line(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full:
        def submit(self, *_: Any) -> None:
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed")

    executor = made()
    monkeypatch.setattr(executor, "_executor", lambda _: Full())
    said = "Slurm does not take its job: sbatch: error: QOSMaxSubmitJobPerUserLimit sbatch: error: Batch job submission"
    assert [event.value for event in events(executor, DOUBLE)] == ["", f"{said} failed"]
    assert not list((tmp_path / "spool").glob("*.claim"))


def _submits(executor: slurm_jobs.SlurmExecutor, monkeypatch: pytest.MonkeyPatch, number: str = "1") -> list[str]:
    """Lets an executor submit jobs that do nothing, and keeps their numbers."""
    sent: list[str] = []

    def send(*_: Any) -> Any:
        sent.append(number)
        return type("Job", (), {"job_id": number, "state": "RUNNING"})()

    monkeypatch.setattr(executor, "_send", send)
    return sent


def test_two_that_submit_at_once_submit_one_job(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = made(), made()
    others = _submits(other, monkeypatch, "8")
    begun = threading.Thread(target=other.submit, args=(trial, parcel(DOUBLE), b""))

    def send(*_: Any) -> Any:
        """It takes as long as the other needs to begin."""
        begun.start()
        begun.join(0.2)
        return type("Job", (), {"job_id": "7", "state": "RUNNING"})()

    monkeypatch.setattr(one, "_send", send)
    one.submit(trial, parcel(DOUBLE), b"")
    begun.join()
    assert others == []
    assert [executor._work[head_of(parcel(DOUBLE))["key"]].job.job_id for executor in (one, other)] == ["7", "7"]


def test_what_one_began_to_submit_that_has_died_is_submitted(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = made(patience=0.1)
    (tmp_path / "spool" / f"{head_of(parcel(DOUBLE))['key']}.claim").touch()
    sent = _submits(executor, monkeypatch)
    executor.submit(trial, parcel(DOUBLE), b"")
    assert sent == ["1"]


def test_a_job_of_just_now_has_not_ended(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue that is known is older."""
    executor, key = made(), head_of(parcel(DOUBLE))["key"]
    there = tmp_path / "spool" / f"{key}.job"
    there.write_text('{"id": "5"}')
    monkeypatch.setattr(executor, "_cluster", "slurm")
    monkeypatch.setattr(
        slurm_jobs.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "5 PENDING\n6 RUNNING\n"})
    )
    executor._queue, executor._asked = {}, time.monotonic()
    executor.drop_ended([key])
    assert there.exists()
    there.write_text('{"id": "4"}')
    executor.drop_ended([key])
    assert not there.exists()


def test_the_next_job_is_not_taken_for_the_one_that_ended(made: Made, tmp_path: Path) -> None:
    """Another coordinator has submitted it meanwhile."""
    executor, key = made(), head_of(parcel(DOUBLE))["key"]
    there = tmp_path / "spool" / f"{key}.job"
    for number, left in (("8", 1), ("7", 0)):
        there.write_text(f'{{"id": "{number}"}}')
        ended = slurm_jobs._SpooledWork(key, Future(), job=type("Job", (), {"job_id": "7"})())
        executor._lose(ended, RuntimeError("lost"))
        assert len(list((tmp_path / "spool").iterdir())) == left
        assert str(ended.future.exception()) == "lost"
