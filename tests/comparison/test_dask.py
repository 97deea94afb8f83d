"""Comparisons on a Dask cluster of three workers: equal figures, and nothing is lost where processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import work
from calls import Compared, call
from test_comparison import COMPARE, kill_in_the_middle, snapshot
from test_elsewhere import figures, parcel

from loaded import Loaded
from patience import PATIENCE
from relpos.cli import main
from relpos.comparison.executors import run_on
from relpos.comparison.trial import versions
from relpos.comparison.workers import WorkerTask

dask_workers = pytest.importorskip("relpos.comparison.dask_workers")
pytest.importorskip("distributed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::distributed", "ignore:::tornado")]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)
    return path.read_text()


@pytest.fixture(scope="module")
def cluster(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with three workers, each a process."""
    folder = tmp_path_factory.mktemp("dask")
    file = folder / "scheduler.json"
    path = os.pathsep.join([str(Path(work.__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    one = ["worker", *common, "--no-nanny", "--nthreads", "1", "--local-directory", str(folder)]
    with contextlib.ExitStack() as stack:
        for words in (["scheduler", "--host", "127.0.0.1", "--port", "0", *common], *[one] * 3):
            with (folder / "log").open("ab") as log:
                program = [warm, "-m", "dask", *words]
                process = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if words[0] == "scheduler":
                wait_for(file)
        yield str(json.loads(file.read_text())["address"])


@pytest.fixture
def executor(cluster: str) -> Iterator[dask_workers.DaskExecutor]:
    executor = dask_workers.DaskExecutor(cluster)
    yield executor
    executor.shutdown()


def on(executor: dask_workers.DaskExecutor, *tasks: WorkerTask) -> dict[str, tuple[str, object]]:
    events = list(run_on(executor, tasks, parcel, b"", lambda *_: None))
    return {event.task.name: (event.kind, event.value) for event in events}


def test_a_killed_coordinator_goes_on_and_figures_are_equal(
    cluster: str, tmp_path: Path, loaded: Loaded, digits: Compared, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [*call(out), "--cluster", cluster]
    kill_in_the_middle(loaded, ["-c", COMPARE, *command], out, tmp_path / "log")
    kept = snapshot(out / "records")
    main(command)
    assert figures(out) == figures(digits[0].folder)
    after = snapshot(out / "records")
    assert len(after) == 5
    assert {name: after[name] for name in kept} == kept, "finished work is not done again"
    assert "Page:" in capsys.readouterr().out


def test_other_versions_are_refused_by_name(executor: dask_workers.DaskExecutor) -> None:
    def pretend(version: str) -> None:
        import relpos.comparison.trial

        relpos.comparison.trial.__version__ = version

    first, second, third = executor._workers()
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


def test_a_killed_worker_is_replaced_and_its_work_ends_with_it(
    executor: dask_workers.DaskExecutor, tmp_path: Path
) -> None:
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


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_PATIENCE", 1)
    with pytest.raises(ValueError, match=r"^expected a Dask scheduler that answers; got tcp://127.0.0.1:9 \("):
        dask_workers.DaskExecutor("tcp://127.0.0.1:9")


def test_an_unknown_machine_for_costs_is_one_line(cluster: str) -> None:
    with pytest.raises(ValueError, match=r"^expected the name, address or host of a worker; got --cost-worker mars\. "):
        dask_workers.DaskExecutor(cluster, cost_worker="mars")
