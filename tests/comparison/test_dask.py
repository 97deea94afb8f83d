"""Comparisons on a Dask cluster of three workers: equal figures, and nothing is lost where processes are killed."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import work
from calls import Compared, call, snapshot
from dask_cluster import Cluster, wait_for
from test_comparison import COMPARE, kill_in_the_middle
from test_elsewhere import figures, parcel

from loaded import Loaded
from patience import PATIENCE
from relpos.cli import main
from relpos.comparison.answer import opened
from relpos.comparison.elsewhere import parcel_for
from relpos.comparison.executors import run_on
from relpos.comparison.trial import head_of, trial, versions
from relpos.comparison.workers import WorkerTask
from relpos.train import OURS, Progress

dask_workers = pytest.importorskip("relpos.comparison.dask_workers")
pytest.importorskip("distributed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::distributed", "ignore:::tornado")]


@pytest.fixture(scope="module")
def cluster(started: Cluster) -> str:
    """The address of the scheduler."""
    return started.address


@pytest.fixture
def executor(cluster: str) -> Iterator[dask_workers.DaskExecutor]:
    executor = dask_workers.DaskExecutor(cluster)
    yield executor
    executor.shutdown()


def at_least(count: int, started: Cluster, executor: dask_workers.DaskExecutor) -> list[str]:
    """The workers; others are started where some were killed."""
    started.work(max(0, count - len(executor._workers())))
    executor._client.wait_for_workers(count, timeout=PATIENCE)
    return list(executor._workers())


def on(executor: dask_workers.DaskExecutor, *tasks: WorkerTask) -> dict[str, tuple[str, object]]:
    events = list(run_on(executor, tasks, parcel, b"", lambda *_: None))
    return {event.task.name: (event.kind, event.value) for event in events}


def test_a_killed_coordinator_goes_on_in_the_background_and_figures_are_equal(
    cluster: str,
    tmp_path: Path,
    loaded: Loaded,
    warm: Path,
    digits: Compared,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same command with `--detach` takes it over, and the same without attaches to that."""
    out = tmp_path / "out"
    command = [*call(out), "--cluster", cluster]
    kill_in_the_middle(loaded, ["-c", COMPARE, *command], out, tmp_path / "log")
    kept = snapshot(out / "records")
    monkeypatch.setattr(sys, "executable", str(warm))
    monkeypatch.setattr(sys, "argv", ["relpos", *command, "--detach"])
    main([*command, "--detach"])
    assert "In the background: process " in " ".join(capsys.readouterr().out.split())
    assert not (out / "report.html").exists()
    main(command)
    said = " ".join(capsys.readouterr().out.split())
    assert "This comparison has a coordinator, process " in said
    assert re.search(r"Done: time training steps \((\d) of \1 done\)", said), "its words"
    assert figures(out) == figures(digits[0].folder)
    after = snapshot(out / "records")
    assert len(after) == 5
    assert {name: after[name] for name in kept} == kept, "finished work is not done again"
    assert (out / "report.html").exists()


def test_other_versions_are_refused_by_name(started: Cluster, executor: dask_workers.DaskExecutor) -> None:
    def pretend(version: str) -> None:
        import relpos.comparison.trial

        relpos.comparison.trial.__version__ = version

    first, second, third, *_ = at_least(3, started, executor)
    executor.require_versions(versions())
    executor._client.run(pretend, "0.0.1", workers=[first, second])
    try:
        with pytest.raises(
            ValueError, match=rf"^expected relpos \S+ on every worker; got relpos 0.0.1 on ({first}|{second})"
        ):
            executor.require_versions(versions())
        tasks = [WorkerTask(str(number), work.double, (number,)) for number in range(2)]
        assert on(executor, *tasks) == {"0": ("finished", 0), "1": ("finished", 2)}, "by the third"
        assert third not in executor._left_out
    finally:
        executor._client.run(pretend, versions()["relpos"], workers=[first, second])


def test_one_that_dies_when_it_is_asked_is_not_refused_and_one_without_relpos_is() -> None:
    answers: dict[str, Any] = {"tcp://a:1": versions(), "tcp://a:2": OSError("Stream is closed")}
    executor = object.__new__(dask_workers.DaskExecutor)
    executor._client = type("Client", (), {"run": lambda *_, **__: answers})()
    executor.require_versions(versions())
    answers["tcp://a:3"] = ModuleNotFoundError("No module named 'relpos'")
    said = r"; got relpos none \(No module named 'relpos'\) on tcp://a:3\. Install the same there, or stop it\."
    with pytest.raises(ValueError, match=said):
        executor.require_versions(versions())


def test_work_waits_for_no_worker_that_has_ended(
    executor: dask_workers.DaskExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that suited when it was submitted, nor for ever one on the machine of measurements."""
    here = parcel(WorkerTask("double", work.double, (21,)))
    executor.leave_out("tcp://127.0.0.1:2", "old torch")
    with monkeypatch.context() as then:
        then.setattr(executor, "_workers", lambda: {"tcp://127.0.0.1:1": {}, "tcp://127.0.0.1:2": {}})
        ended = executor.submit(trial, here, b"")
    assert opened(ended.result(PATIENCE), head_of(here)["key"]).record == 42
    monkeypatch.setattr(dask_workers, "_PATIENCE", 0.0)
    executor.cost_machine = "127.0.0.9"
    measures = WorkerTask("measures", work.double, (21,))
    costs = partial(parcel_for, comparison="test", procedure=OURS, cost=True)
    (_, failed) = run_on(executor, [measures], costs, b"", lambda *_: None)
    assert failed.kind == "failed"
    assert failed.value.startswith("no worker on 127.0.0.9, which measures time and memory; start one there")


def test_a_killed_worker_is_replaced_and_its_work_ends_with_it(
    started: Cluster, executor: dask_workers.DaskExecutor, tmp_path: Path
) -> None:
    at_least(2, started, executor)
    mark = tmp_path / "mark"
    numbers = executor._client.run(os.getpid)
    events = run_on(executor, [WorkerTask("wait", work.wait_at_first, (mark,))], parcel, b"", lambda *_: None)
    started = next(events)
    assert started.kind == "started"
    process = int(wait_for(mark))
    os.kill(numbers[started.value], signal.SIGKILL)
    finished = next(events)
    assert (finished.kind, finished.value) == ("finished", "done")
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline, "it ends where its worker does"
        time.sleep(0.05)


def test_how_far_work_is_is_told(executor: dask_workers.DaskExecutor, tmp_path: Path) -> None:
    task = WorkerTask("tell", work.tell_and_wait, (tmp_path / "end",), reports=True)
    events = run_on(executor, [task], parcel, b"", lambda *_: None)
    assert next(events).value in executor._workers()
    told = next(events)
    assert (told.kind, told.value) == ("progress", Progress(3, 8, 0.5, 0.1))
    (tmp_path / "end").touch()
    assert [event.kind for event in events][-1] == "finished"


def test_a_pickled_result_is_not_read(executor: dask_workers.DaskExecutor) -> None:
    future = executor.submit(work.no_bytes, parcel(WorkerTask("double", work.double, (21,))), b"")
    with pytest.raises(RuntimeError, match=r"^TypeError: .*only able to deserialize"):
        future.result(PATIENCE)


def test_an_answer_that_its_worker_took_along_holds_up_no_other(
    executor: dask_workers.DaskExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask waits for one whose worker has died, until it is done again, and has one thread for what has ended."""
    again, ended = threading.Event(), ThreadPoolExecutor(1)

    class Asked:
        status = "finished"

        def __init__(self, key: str) -> None:
            self.is_lost = "first" in key

        def add_done_callback(self, take: Callable[[Any], None]) -> None:
            ended.submit(take, self)

        def result(self) -> bytes:
            return b"late" if self.is_lost and again.wait(PATIENCE) else b"soon"

        def release(self) -> None:
            pass

    monkeypatch.setattr(executor._client, "submit", lambda *_, key, **__: Asked(key))
    heads = {name: {"key": name, "cost": False} for name in ("first", "second")}
    monkeypatch.setattr(dask_workers, "head_of", lambda name: heads[name.decode()])
    first, second = (executor.submit(trial, name.encode(), b"") for name in heads)
    try:
        assert second.result(10) == b"soon"
    finally:
        again.set()
    assert first.result(PATIENCE) == b"late"
    ended.shutdown()


def test_files_of_tls_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^expected --cluster-tls CERT,KEY,CA, three files; got no file .*/cert\. "):
        dask_workers.DaskExecutor("tls://127.0.0.1:9", tls=(str(tmp_path / "cert"), __file__, __file__))


def test_work_that_ends_three_workers_is_given_up(
    started: Cluster, executor: dask_workers.DaskExecutor, tmp_path: Path
) -> None:
    """The scheduler begins it on a fourth, and is told to stop."""
    at_least(4, started, executor)
    mark, deadline = tmp_path / "mark", time.monotonic() + PATIENCE
    events = run_on(executor, [WorkerTask("wait", work.wait_for_ever, (mark,))], parcel, b"", lambda *_: None)
    worker = next(events).value
    for count in range(1, 4):
        while len(begun := next(iter(executor._begun.values()))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(executor._client.run(os.getpid, workers=[begun[-1]])[begun[-1]], signal.SIGKILL)
    (failed,) = events
    assert failed.kind == "failed"
    assert failed.value.startswith(f"every worker that it was given died: {worker}, tcp://")
    assert failed.value.count("tcp://") == 3
    waiting = list(executor._workers())
    started.work(1)
    for process in executor._client.run(os.getpid, workers=waiting, on_error="ignore").values():
        os.kill(process, signal.SIGKILL)  # the fourth would do nothing else for ever


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_PATIENCE", 1)
    with pytest.raises(ValueError, match=r"^expected a Dask scheduler that answers; got tcp://127.0.0.1:9 \("):
        dask_workers.DaskExecutor("tcp://127.0.0.1:9")


def test_tls_needs_its_address() -> None:
    with pytest.raises(
        ValueError, match=r"^expected --cluster tls://HOST:8786 with --cluster-tls; got tcp://127.0.0.1:9"
    ):
        dask_workers.DaskExecutor("tcp://127.0.0.1:9", tls=(__file__, __file__, __file__))


def test_a_file_without_an_address_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    for content in ("{}", "no", "[1]", '{"address": 1}'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"^expected a Dask scheduler's file; got .*, which has no address\. "):
            dask_workers.DaskExecutor(str(file))


def test_an_unknown_machine_for_costs_is_one_line(cluster: str) -> None:
    with pytest.raises(ValueError, match=r"^expected the name, address or host of a worker; got --cost-worker mars\. "):
        dask_workers.DaskExecutor(cluster, cost_worker="mars")
