"""A training run whose loss is no number is a record like any other: the rest goes on, and it is not trained again."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from schema import check_diverged

import relpos.comparison.experiment as experiment
from relpos.comparison import Comparison, ComparisonSettings, Event, Job
from relpos.comparison.run import metrics, run
from relpos.comparison.store import Store
from relpos.comparison.workers import WorkerTask, run_here
from relpos.data import find_task
from relpos.report.page import build_page
from relpos.report.terminal import render_terminal
from relpos.results import load_results, plain
from relpos.train import TextRecipe
from relpos_command.requests import CompareRequest

DIGITS = find_task("digits")


def settings(*positions: str, rate: float = 3e-3, multiplier: float = 10.0) -> ComparisonSettings:
    """A small comparison; with an enormous multiplier whoever learns something about position diverges."""
    made = ComparisonSettings.make(DIGITS, CompareRequest(positions=positions, steps=2, device="cpu", quick=True))
    small = {"depth": 1, "embed_dim": 16, "num_heads": 2, "batch_size": 8}
    changed = {"learning_rate": rate, "position_learning_rate_multiplier": multiplier}
    return replace(made, recipe=replace(made.recipe, **small, **changed))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(tasks: Sequence[WorkerTask], at_once: int, **_: Any) -> Iterator[Event]:
        events: list[Event] = []
        run_here(tasks, events.append)
        return iter(events)

    monkeypatch.setattr(experiment, "run_tasks", here)


def test_a_run_that_diverges_is_a_record() -> None:
    made = settings("learned", multiplier=1e42)
    record = run(Job("learned", 0, "recipe", 1e42), made, DIGITS)
    check_diverged(record, 2)
    assert record.diverged is not None
    json.dumps(plain(record), allow_nan=False)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_the_rest_goes_on_and_it_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings("none", "learned", multiplier=1e42)
    results = Comparison(made, DIGITS, tmp_path).run()
    diverged = {record.position: record.diverged is not None for record in results.records}
    assert diverged == {"none": False, "learned": True}
    assert len(results.costs) == 2, "what it costs is known all the same"
    for path in [tmp_path / "results.json", *(tmp_path / "records").iterdir()]:
        json.loads(path.read_text(), parse_constant=pytest.fail)
    read = load_results(tmp_path)
    assert "diverged" in build_page(read)
    render_terminal(read)

    monkeypatch.setattr(Store, "add", lambda *_: pytest.fail("again"))
    assert Comparison(made, DIGITS, tmp_path).run() == results


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_one_mechanism_alone_that_diverges_has_a_page(tmp_path: Path) -> None:
    Comparison(settings("learned", rate=1e42), DIGITS, tmp_path).run()
    page = build_page(load_results(tmp_path))
    assert "Every training run diverged" in page


def test_a_probe_whose_figures_are_no_numbers_has_a_reason() -> None:
    text = find_task("text")
    small = TextRecipe(embed_dim=16, depth=1, num_heads=2)
    model = small.build(text, "alibi")
    next(model.parameters()).data.fill_(math.nan)
    found = metrics(model, text, text.probes[:2], torch.device("cpu"), quick=True)
    assert [one.bits_per_byte for one in found] == [None, None]
    assert all("not finite" in str(one.reason) for one in found)
    images = replace(settings("learned").recipe).build(DIGITS, "learned")
    next(images.parameters()).data.fill_(math.nan)
    found = metrics(images, DIGITS, DIGITS.probes[:1], torch.device("cpu"))
    assert found[0].accuracy == 0, "scores that are no numbers name no class"
