"""What is printed: lines wrapped at words at any width, and how far the work is."""

import io
import os
import sys
from typing import Any

import pytest
from rich.console import Console

from relpos.cli import main
from relpos.cli.progress import Work, in_words, say, watched
from relpos.comparison.workers import Event, WorkerTask
from relpos.position import presets
from relpos.train import Progress
from relpos_command import parsing

TEXT = "Comparing none, learned+relative_2d and rotary_2d on digits, in runs/digits-0123abcd/ for a well-known reason."
at_any_width = pytest.mark.parametrize("width", [20, 33, 80, 200])


def console(width: int, *, terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width, color_system=None), file


def assert_wrapped(text: str, width: int) -> None:
    assert all(len(line) <= width or " " not in line.strip() for line in text.splitlines()), "wrapped at words"


@at_any_width
def test_lines_and_errors_wrap_at_words_on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = console(width)
    say(out, TEXT)
    assert file.getvalue().split() == TEXT.split(), "no word is broken"
    assert_wrapped(file.getvalue(), width)
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(parsing.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((width, 24)))
    with pytest.raises(SystemExit):
        parsing.fail(TEXT, 2)
    assert errors.getvalue().split() == ["relpos:", "error:", *TEXT.split()]
    assert_wrapped(errors.getvalue(), width)


def test_a_pipe_gets_whole_lines() -> None:
    out, file = console(20, terminal=False)
    say(out, TEXT)
    assert file.getvalue() == TEXT + "\n"


@pytest.mark.parametrize("typed", [["--help"], ["compare", "--help"]])
@at_any_width
def test_help_wraps_at_words(
    typed: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main(typed)
    assert_wrapped(capsys.readouterr().out, max(width, 33))  # usage has its own least


@at_any_width
def test_positions_have_a_line_each_where_it_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = console(width)
    monkeypatch.setattr("rich.console.Console", lambda: out)
    main(["list", "positions"])
    assert_wrapped(file.getvalue(), width)
    lines = file.getvalue().splitlines()
    if width >= 80:
        assert len(lines) == len(presets()) + 1
        assert lines[-1] == "--long adds a description and the source of each."


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "1 s"),
        (4.4, "4 s"),
        (9.8, "10 s"),
        (14, "10 s"),
        (99, "100 s"),
        (100, "2 min"),
        (601, "10 min"),
        (7200, "2.0 h"),
    ],
)
def test_time_in_words(seconds: float, said: str) -> None:
    assert in_words(seconds) == said


def two_tasks() -> list[WorkerTask]:
    return [WorkerTask(f"t{n}", lambda: None, (), label=f"train t{n}") for n in range(2)]


def test_the_time_left_is_what_the_rest_takes_at_the_speed_so_far() -> None:
    now = [0.0]
    tasks = [*two_tasks(), WorkerTask("timing", lambda: None, (), weight=2.0)]
    work = Work(tasks, clock=lambda: now[0])
    assert str(work) == "0 of 3 done"
    now[0] = 60.0
    work.take(Event(tasks[0], "progress", Progress(1, 2, 0.0, 0.0)))
    assert str(work) == "0 of 3 done, about 7 min left", "an eighth took a minute"
    work.take(Event(tasks[0], "finished"))
    assert str(work) == "1 of 3 done, about 3 min left"
    for task in tasks[1:]:
        work.take(Event(task, "finished"))
    assert str(work) == "3 of 3 done"


def test_where_nothing_is_left_to_do_no_line_says_so() -> None:
    out, file = console(80)
    assert watched(lambda watch: "results", [], out) == "results"
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("terminal", [True, False])
def test_work_has_names_that_a_person_understands(width: int, terminal: bool) -> None:
    out, file = console(width, terminal=terminal)
    tasks = two_tasks()

    def run(watch: Any) -> dict[str, Any]:
        for task in tasks:
            watch(Event(task, "started"))
            watch(Event(task, "progress", Progress(1, 2, 0.5, 0.1)))
            watch(Event(task, "progress", "64 tokens"))
            watch(Event(task, "finished"))
        return {"all": "done"}

    assert watched(run, tasks, out) == {"all": "done"}
    if not terminal:
        assert file.getvalue().splitlines()[0].startswith("Done: train t0 (1 of 2 done")
        assert file.getvalue().splitlines()[1] == "Done: train t1 (2 of 2 done)"
