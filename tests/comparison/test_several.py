"""Runs of several processes: under every executor they train to the weights of `relpos train` with as many."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import work
from dask_cluster import Cluster
from safetensors.torch import load_file

from loaded import Loaded
from patience import PATIENCE
from relpos.cli import main
from relpos.comparison import Comparison, ComparisonSettings
from relpos.comparison.several import run_in_processes
from relpos.comparison.workers import WorkerError
from relpos.data import find_task
from relpos.train import Progress
from relpos_command.requests import CompareRequest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::submitit", "ignore:::distributed")]

RECIPE = {"warmup_steps": 2}


@pytest.fixture(autouse=True)
def quick_python(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm))


@pytest.fixture(scope="module")
def trained(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of `relpos train` in two processes."""
    out = tmp_path_factory.mktemp("train") / "out"
    options = ["--position", "relative_2d", "--steps", "2", "--device", "cpu", "--threads", "1", "--out", out]
    done = loaded.run("-m", "relpos", "train", *options, processes=2, needs=["train"])
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors")


@pytest.fixture(params=["threads", "dask", "slurm"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "slurm":
        yield request.getfixturevalue("made")()
        return
    made: Executor = ThreadPoolExecutor(1)
    if request.param == "dask":
        from relpos.comparison.dask_workers import DaskExecutor

        cluster: Cluster = request.getfixturevalue("started")
        cluster.work(1)  # other tests kill some
        made = DaskExecutor(cluster.address)
    yield made
    made.shutdown()


def test_two_processes_train_as_relpos_train(
    executor: Executor, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    task = find_task("digits")
    options = {"positions": ("relative_2d",), "quick": True, "steps": 2, "recipe": RECIPE, "device": "cpu"}
    settings = ComparisonSettings.make(task, CompareRequest(**options, devices_per_trial=2))
    comparison = Comparison(settings, task, tmp_path / "out", executor=executor)
    comparison.probes = comparison.probes[:1]
    (first, *_), *_ = comparison.tasks()
    events = list(comparison._elsewhere(executor, [first]))
    assert events[-1].kind == "finished", events[-1].value
    weights = load_file(tmp_path / "out" / "training" / first.name / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    assert events[-1].value["settings"]["devices_per_trial"] == 2


def test_their_first_reports_and_answers() -> None:
    said: list[object] = []
    assert run_in_processes(2, work.ranks, 5, report=said.append) == (5, "0 of 2")
    assert said == [Progress(1, 2, 0.5, 0.1)]


def test_the_answer_of_a_first_process_that_has_ended_counts() -> None:
    """Though another fails while it is read."""
    assert isinstance(run_in_processes(2, work.end_first, report=print), work.SlowlyRead)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_fails_ends_all(rank: int, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError: on purpose") as caught:
        run_in_processes(2, work.fail_in, rank, tmp_path, report=print)
    assert ("process 1 ended with code 1 after: " in str(caught.value)) == (rank == 1)
    (number,) = (int(path.name) for path in tmp_path.iterdir())
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < deadline, "it ends, too"
        time.sleep(0.01)


def test_a_batch_must_be_divisible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--devices-per-trial", "3", "--batch-size", "32", "--quick", "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "expected a batch divisible by 3 processes x 1 accumulated parts; got 32" in capsys.readouterr().err
