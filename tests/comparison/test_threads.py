"""Timings depend on the number of threads, so it is among the settings: with another, no figure is taken over."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relpos.comparison import Comparison, ComparisonSettings, OtherSettingsError, cost, default_folder
from relpos.data import find_task
from relpos.results import Cost
from relpos_command.requests import CompareRequest

DIGITS = find_task("digits")


@pytest.fixture(autouse=True)
def threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(threads: int) -> ComparisonSettings:
    torch.set_num_threads(threads)  # as OMP_NUM_THREADS does where a process begins
    return ComparisonSettings.make(DIGITS, CompareRequest(positions=("none",), steps=1, device="cpu", quick=True))


def test_another_number_of_threads_is_another_comparison(tmp_path: Path) -> None:
    Comparison(made(1), DIGITS, tmp_path)
    Comparison(made(1), DIGITS, tmp_path)
    with pytest.raises(OtherSettingsError, match="these differ: timing_threads was 1, now 2"):
        Comparison(made(2), DIGITS, tmp_path)
    assert default_folder(made(1)) != default_folder(made(2))


def test_steps_are_timed_on_the_threads_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_time_size", lambda *_: [Cost(64, 1, 1, "sdpa", threads=torch.get_num_threads())])
    settings = made(2)
    torch.set_num_threads(1)  # the process that times may have been given others
    assert {entry.threads for entry in cost.time_steps(settings, DIGITS)} == {2}


def test_steps_are_timed_with_freed_memory_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs keep it, and a step without is slower than theirs."""
    done: list[str] = []
    monkeypatch.setattr(cost, "keep_freed_memory", lambda: done.append("kept"))
    monkeypatch.setattr(cost, "_time_size", lambda *_: (done.append("timed"), [])[1])
    cost.time_steps(made(1), DIGITS)
    assert done[:2] == ["kept", "timed"]
    assert done.count("kept") == 1
