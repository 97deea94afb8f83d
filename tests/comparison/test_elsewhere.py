"""Work by an executor: figures equal those of one machine, whatever dies is tried again, and answers are checked."""

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import calls
import pytest
import work
from calls import Compared, on_digits, snapshot

import relpos
from relpos.adapters.library_models import LibraryModel
from relpos.comparison.answer import WorkerAnswer, opened, sealed
from relpos.comparison.cluster import executor_of
from relpos.comparison.elsewhere import parcel_for
from relpos.comparison.executors import TrialsFailedError, progress_of, run_on, summary
from relpos.comparison.settings import environment
from relpos.comparison.store import Store
from relpos.comparison.trial import _other_model, differing, head_of, trial, versions
from relpos.comparison.workers import Event, WorkerTask
from relpos.files.writing import WriteError
from relpos.results import plain
from relpos.train import OURS, Progress
from relpos_command.option_groups import ClusterOptions

FAST_CASES = 1  # of each of its tests, in the fast part

TIMES = ("train_seconds", "environment", "peak_memory_mib", "step_ms", "ratio")


def figures(folder: Path) -> tuple[dict[str, Any], dict[str, bytes], dict[str, bytes]]:
    """The results of a comparison apart from times, memory and machines; each run's trained model, and its losses."""
    tree = json.loads((folder / "results.json").read_text())
    for entry in [tree, *tree["records"], *tree["costs"]]:
        for name in TIMES:
            entry.pop(name, None)
    models = {path.parent.name: path.read_bytes() for path in folder.glob("training/*/model.safetensors")}
    losses = {path.parent.name: path.read_bytes() for path in folder.glob("training/*/losses.jsonl")}
    assert len(models) == len(losses) == len(tree["records"])
    return tree, models, losses


class Now(Executor):
    """Answers at once, in this process, by a function of the work's name."""

    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self.answer = answer
        self.submitted = 0

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        self.submitted += 1
        future: Future[Any] = Future()
        try:
            future.set_result(self.answer(args[0]))
        except Exception as error:
            future.set_exception(error)
        return future


class Named(Executor):
    """Answers at once, by the name of the work as well."""

    def __init__(self, answer: Callable[[str, bytes], bytes]) -> None:
        self.answer = answer

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.answer(head_of(args[0])["name"], args[0]))
        return future


def parcel(task: WorkerTask) -> bytes:
    return parcel_for(task, "test", OURS, cost=False)


def events(executor: Executor, *tasks: WorkerTask, accept: Any = lambda *_: None) -> list[tuple[str, str, Any]]:
    found: list[Event] = list(run_on(executor, tasks, parcel, b"", accept))
    return [(event.task.name, event.kind, event.value) for event in found]


DOUBLE = WorkerTask("double", work.double, (21,))


@pytest.mark.slow
def test_each_piece_has_a_process_whatever_the_executor(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process do them here: work that ends its process ends no other."""
    monkeypatch.setattr(sys, "executable", str(warm))
    tasks = [WorkerTask("vanish", work.vanish, (3,)), WorkerTask("divide", work.divide, (1,))]
    with ThreadPoolExecutor(2) as executor:
        found = {task.name: executor.submit(trial, parcel(task), b"") for task in tasks}
        answers = {task.name: opened(found[task.name].result(), head_of(parcel(task))["key"]) for task in tasks}
    assert answers["vanish"].kind == "lost"
    assert answers["vanish"].error.endswith("ended with code 3 and said nothing")
    assert answers["divide"].kind == "failed"
    assert answers["divide"].error.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.slow
def test_a_program_that_is_killed_as_it_starts_stops_no_other(warm: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.connect(str(warm.with_name("socket")))
    done = subprocess.run([warm, "-c", "print(6)"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "6\n", done.stderr


def answer(data: bytes, **changes: Any) -> bytes:
    return sealed(replace(WorkerAnswer(head_of(data)["key"], "w", record=42), **changes))


@pytest.mark.parametrize(
    ("answers", "kinds", "said"),
    [
        (answer, ["started", "finished"], 42),
        (lambda data: answer(data, kind="failed", error="trace\nno"), ["started", "failed"], "trace\nno"),
        (lambda data: answer(data, kind="lost", error="gone"), ["started", "failed"], "gone"),
        (lambda data: answer(data, kind="refused", error="old torch"), ["started", "failed"], "old torch"),
        (lambda data: b"bad", ["started", "failed"], "its answer cannot be used: it does not begin as"),
    ],
)
def test_answers_become_events(answers: Any, kinds: list[str], said: Any) -> None:
    """Work is sent three times where the worker may be at fault."""
    executor = Now(answers)
    found = events(executor, DOUBLE)
    assert [kind for _, kind, _ in found] == kinds
    assert found[-1][2] == said or found[-1][2].startswith(said)
    assert executor.submitted == (1 if said in (42, "trace\nno") else 3)


@pytest.mark.parametrize("before", [0, 1])
def test_what_another_coordinator_stored_is_not_done_again(before: int) -> None:
    """It took the answer, so that this one's work is lost, once."""
    executor = Now(lambda data: answer(data, kind="lost", error="its job ended without an answer"))
    stored = iter([*[False] * before, True])
    found = list(run_on(executor, [DOUBLE], parcel, b"", lambda *_: None, stored=lambda _: next(stored)))
    assert [(event.kind, event.value) for event in found] == [("started", ""), ("finished", None)]
    assert executor.submitted == before


def test_only_progress_that_can_be_shown_is() -> None:
    told = {"step": 0, "steps": 8, "loss": 0.5, "rate": 0.1, "validation": None}
    assert progress_of(told) == Progress(0, 8, 0.5, 0.1)
    for odd in ({"steps": 0}, {"step": -1}, {"step": 9}, {"loss": "x"}):
        assert progress_of({**told, **odd}) is None


def test_what_fails_does_not_stop_the_rest() -> None:
    def answers(data: bytes) -> bytes:
        if head_of(data)["key"] == head_of(parcel(DOUBLE))["key"]:
            raise BrokenProcessPool("a process died")
        return answer(data)

    found = events(Now(answers), DOUBLE, WorkerTask("other", work.double, (1,)))
    assert ("other", "finished", 42) in found
    failed = {name: value for name, kind, value in found if kind == "failed"}
    assert failed == {"double": "BrokenProcessPool: a process died"}
    assert summary({**failed, "x": "y"}) == (
        "double failed: BrokenProcessPool: a process died (and 1 more: x). "
        "The rest is finished and stored; the same command tries again."
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slurm": {"partition": "gpu"}}, "expected --slurm with --cluster slurm; got"),
        ({"cluster": "tcp://a:1", "shared": "d"}, "expected --shared with --cluster slurm; got"),
        ({"cost_worker": "n1"}, "expected --cost-worker with --cluster; got"),
        ({"detach": True}, "expected --detach with --cluster; got"),
        ({"send_data": True}, "expected --send-data with --cluster; got"),
        ({"cluster": "slurm"}, "expected --shared DIR, a folder that all nodes see; got none"),
        ({"cluster": "slurm", "shared": "d", "cluster_tls": ("a", "b", "c")}, "expected --cluster-tls with"),
        ({"cluster": "tls://a:1"}, "expected --cluster-tls CERT,KEY,CA with a tls"),
        ({"cluster": "tls://a:1", "cluster_tls": ("a",)}, "expected --cluster-tls CERT,KEY,CA; got a"),
    ],
)
def test_options_need_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"), executor_of(ClusterOptions(**options)):
        pass


def test_a_full_disk_here_ends_the_comparison() -> None:
    """Finished work that cannot be stored is no failed work."""

    def accept(*_: object) -> None:
        raise WriteError("expected to write it; got No space left on device.", errno.ENOSPC)

    with pytest.raises(WriteError):
        events(Now(answer), DOUBLE, accept=accept)


def test_a_worker_of_other_versions_refuses() -> None:
    wanted = {**versions(), "torch": "1.0", "timm_of_old": "3"}
    line = differing(wanted, "host")
    assert line is not None
    here = versions()["torch"]
    assert line == (
        f"expected torch 1.0, timm_of_old 3 on every worker; got torch {here}, timm_of_old none on host. "
        "Install the same there, or stop that worker."
    )
    assert differing(versions(), "host") is None


def test_another_model_of_that_name_refuses(tmp_path: Path) -> None:
    """A folder of transformers that differs from the coordinator's."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    model = LibraryModel(f"hf:{tmp_path}")
    procedure = replace(OURS, build=model)
    head = head_of(parcel_for(DOUBLE, "test", procedure, cost=False, model=model.described()))
    assert _other_model(head, "host") is None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    line = _other_model(head, "host")
    assert line is not None
    assert line.startswith(f"expected the model {head['model'][1]} on every worker; got hf:")
    assert line.endswith(" on host. Copy its folder there.")


@pytest.mark.parametrize("forged", ["another run", {"id": "none--recipe--seed0"}, None])
def test_a_record_of_something_else_is_not_stored(forged: Any, tmp_path: Path, digits: Compared) -> None:
    if forged == "another run":
        forged = plain(digits[0].results.runs("relative_2d")[0])

    def answers(data: bytes) -> bytes:
        here = {"device": "cpu", "environment": plain(environment("cpu"))}
        asked = head_of(data)["cost"] and not (tmp_path / "out").exists()
        return answer(data, record=here if asked else forged, files={"losses.jsonl": b""})

    options = {"positions": ["none", "relative_2d"], "quick": True, "recipe": {"depth": 1}, "executor": Now(answers)}
    with pytest.raises(TrialsFailedError, match="failed: the answer of w cannot be used: ") as caught:
        calls.compare(tmp_path / "out", **options)
    assert "none--recipe--seed0" in str(caught.value)
    stored = {path.name for path in (tmp_path / "out" / "records").iterdir()}
    assert stored <= {"relative_2d--recipe--seed0.json"}, "which is the answer to that"


def test_what_failed_is_on_the_page_and_times_of_another_kind_of_machine_are_refused(
    tmp_path: Path, digits: Compared
) -> None:
    trained = {run.id: plain(run) for run in digits[0].results.records}
    gone = "relative_2d--recipe--seed0"
    for run in trained.values():
        run["environment"]["host"] = "node7"

    def answers(name: str, data: bytes) -> bytes:
        if name == gone:
            return answer(data, kind="lost", error="node8 died")
        if name in trained:
            files = (digits[0].folder / "training" / name).iterdir()
            return answer(data, record=trained[name], files={file.name: file.read_bytes() for file in files})
        here = {"device": "cpu", "environment": plain(environment("cpu"))}
        record = {"environment": here, "timing": plain(digits[0].results.costs)}.get(name, 1.5)
        return answer(data, record=record, machine={"kind": "abacus" if name == "timing" else environment("cpu").kind})

    with pytest.raises(TrialsFailedError, match=f"^{gone} failed: node8 died \\(and 1 more: timing\\)") as caught:
        on_digits(tmp_path / "out", executor=Named(answers))
    of_timing = caught.value.failed["timing"]
    assert re.search(r"time and memory of one kind of machine, .*; it is of abacus \(--cost-worker", of_timing)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["id"], one.get("name")) for one in written["failed"]] == [(gone, "relative_2d"), ("timing", None)]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "failed: node8 died" in page
    assert "node7" in page
    assert not (tmp_path / "out" / "records" / f"{gone}.json").exists(), "so that it is tried again"


@pytest.mark.slow
def test_on_a_full_disk_nothing_that_is_finished_is_lost(
    tmp_path: Path, digits: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system lets no file grow beyond some bytes once the first record is stored."""
    trained, out = {run.id: plain(run) for run in digits[0].results.records}, tmp_path / "out"
    lifted, add = resource.getrlimit(resource.RLIMIT_FSIZE), Store.add

    def answers(name: str, data: bytes) -> bytes:
        files = {}
        if name in trained:
            files = {file.name: file.read_bytes() for file in (digits[0].folder / "training" / name).iterdir()}
        here = {"device": "cpu", "environment": plain(environment("cpu"))}
        records = {**trained, "environment": here, "timing": plain(digits[0].results.costs)}
        return answer(data, record=records.get(name, 1.5), files=files)

    def fill(self: Store, name: str, record: Any) -> None:
        add(self, name, record)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, lifted[1]))

    with monkeypatch.context() as full:
        full.setattr(Store, "add", fill)
        try:
            with pytest.raises(WriteError, match=r"^expected to write .*; got File too large\."):
                on_digits(out, executor=Named(answers))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, lifted)
    (kept,) = snapshot(out / "records").items()
    on_digits(out, executor=Named(answers))
    assert kept in snapshot(out / "records").items(), "it is not done again"
    assert figures(out) == figures(digits[0].folder)
    assert not list(out.rglob("*.part"))


def test_another_version_is_an_error_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^expected torch .* on every worker"):
        relpos.compare(
            executor=Now(lambda data: answer(data, kind="refused", error="expected torch 1 on every worker")),
            out=tmp_path / "a",
        )
    assert os.listdir(tmp_path) == [], "nothing was begun"
