"""Work in processes of its own: events come in order, failures stop everything and say where."""

import errno
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import work

from relpos.comparison import workers
from relpos.comparison.workers import Event, WorkerError, WorkerTask, run_tasks
from relpos.files.writing import WriteError


@pytest.mark.slow
def test_events_come_in_order_and_results_come_back() -> None:
    tasks = [WorkerTask("count", work.count, (3,), reports=True), WorkerTask("double", work.double, (21,))]
    events = list(run_tasks(tasks, 1))
    assert [(event.task.name, event.kind, event.value) for event in events] == [
        ("count", "started", 0),
        ("count", "progress", 0),
        ("count", "progress", 1),
        ("count", "progress", 2),
        ("count", "finished", "counted"),
        ("double", "started", 0),
        ("double", "finished", 42),
    ]


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_than_asked_run_at_once(at_once: int) -> None:
    """Those that do have other numbers."""
    tasks = [WorkerTask(f"double {number}", work.double, (number,)) for number in range(5)]
    running: dict[str, int] = {}
    most = 0
    finished = {}
    for event in run_tasks(tasks, at_once):
        if event.kind == "started":
            assert event.value in {*range(at_once)} - {*running.values()}
            running[event.task.name] = event.value
            most = max(most, len(running))
        else:
            del running[event.task.name]
            finished[event.task.name] = event.value
    assert most == at_once
    assert finished == {f"double {number}": 2 * number for number in range(5)}


def test_each_piece_has_a_process_of_its_own(tmp_path: Path) -> None:
    tasks = [WorkerTask(str(number), work.process_id, (tmp_path,)) for number in range(3)]
    found = [event.value for event in run_tasks(tasks, 2) if event.kind == "finished"]
    assert len({*found, os.getpid()}) == 4


def test_a_failure_raises_with_its_traceback() -> None:
    with pytest.raises(WorkerError) as caught:
        list(run_tasks([WorkerTask("bad", work.divide, (1,))], 1))
    message = str(caught.value)
    assert message.startswith("bad failed:\n")
    assert "return number / 0" in message, "the line that failed"
    assert "ZeroDivisionError: division by zero" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_line_of_the_file_and_no_bug(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught:
        list(run_tasks([WorkerTask("bad", work.run_out_of_space, (tmp_path,))], 1))
    said = f"expected to write {tmp_path / 'losses.jsonl'}; got No space left on device. Free some space."
    assert str(caught.value) == said
    assert caught.value.errno == errno.ENOSPC


def test_a_process_that_vanishes_is_noticed() -> None:
    with pytest.raises(WorkerError, match="gone failed:\nthe process ended with code 3 and said nothing"):
        list(run_tasks([WorkerTask("gone", work.vanish, (3,))], 1))


def test_a_failure_stops_the_others(tmp_path: Path) -> None:
    mark = tmp_path / "done"
    tasks = [WorkerTask("long", work.write_later, (mark, 600.0)), WorkerTask("bad", work.fail_once_begun, (mark,))]
    seen: list[Event] = []
    with pytest.raises(WorkerError, match="bad failed"):
        seen.extend(run_tasks(tasks, 2))
    assert not multiprocessing.active_children()
    assert not mark.exists()


def test_whoever_stops_listening_stops_the_work(tmp_path: Path) -> None:
    mark = tmp_path / "done"
    events = run_tasks([WorkerTask("long", work.write_later, (mark, 600.0)), WorkerTask("next", work.double, (1,))], 1)
    assert next(iter(events)).kind == "started"
    events.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert not mark.exists()


def test_an_interruption_is_this_process_alone_to_answer() -> None:
    """Ctrl-C in a terminal reaches every process of the group; workers, and what starts them, would each complain."""
    (found,) = [
        event.value for event in run_tasks([WorkerTask("mask", work.held_back, ())], 1) if event.kind == "finished"
    ]
    assert found is True
    assert not work.held_back()


def test_nothing_to_do() -> None:
    assert list(run_tasks([], 2)) == []


@pytest.mark.parametrize(("a_gpu_each", "seen"), [(False, []), (True, [1])])
def test_a_worker_takes_its_gpu(a_gpu_each: bool, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is there: what would be asked of PyTorch is."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    workers._work(WorkerTask("one", work.double, (3,)), theirs, 1 if a_gpu_each else None)
    assert ours.recv() == ("finished", 6)
    assert chosen == seen
