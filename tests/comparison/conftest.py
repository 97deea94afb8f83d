"""Comparisons in tests run on one thread: no figure is taken here, and threads that wait for a core spin."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import pytest
import work
from dask_cluster import Cluster

from loaded import Loaded
from warm import warm_python

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come; this one has its threads already


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> calls.Compared:
    """A comparison that tests read."""
    return calls.on_digits(tmp_path_factory.mktemp("digits") / "out")


@pytest.fixture(scope="module")
def warm(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python for workers and jobs, whose processes have their libraries."""
    pytest.importorskip("distributed")
    pytest.importorskip("submitit")
    with warm_python(loaded, tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture(scope="module")
def started(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three workers. It ends with its module: idle, it takes 7% of a processor."""
    cluster = Cluster(warm, tmp_path_factory.mktemp("dask"))
    with cluster.processes:
        cluster.work(3)
        yield cluster


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes executors of Slurm in one folder, whose jobs are processes."""
    slurm_jobs = pytest.importorskip("relpos.comparison.slurm_jobs")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(work.__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    executors: list[Any] = []
    jobs: list[Any] = []
    send = slurm_jobs.SlurmExecutor._send

    def sent(self: Any, *arguments: Any) -> Any:
        jobs.append(send(self, *arguments))
        return jobs[-1]

    monkeypatch.setattr(slurm_jobs.SlurmExecutor, "_send", sent)

    def make(parameters: dict[str, Any] | None = None, **options: Any) -> Any:
        options = {"cluster": "local", "poll": 0.05, "patience": 600.0, **options}
        executors.append(slurm_jobs.SlurmExecutor(tmp_path, parameters or {"timeout_min": 5}, **options))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()
    for job in jobs:
        if getattr(job, "_process", None):
            job._process.wait()
