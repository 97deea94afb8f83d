"""The printed program, run: it reaches what the command reached, to the last bit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from relpos.comparison import ComparisonSettings, environment
from relpos.comparison.run import run
from relpos.comparison.settings import describe
from relpos.data import find_task
from relpos.report.reproduce import reproduce
from relpos.results import SCHEMA_VERSION, Results, ResultsError, plain, read
from relpos_command.requests import CompareRequest

FAST_CASES = 2  # of each of its tests, in the fast part

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "batch_size": 8, "warmup_steps": 2}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def compared(task: str, name: str, *, seed: int = 0, **asked: Any) -> Results:
    """The results of a small comparison, as the command has them but for figures of a clock."""
    data = find_task(task)
    positions = None if "what" in asked else (name,)
    choices = None if positions else (name,)
    request = CompareRequest(positions=positions, choices=choices, steps=6, device="cpu", quick=True, **asked)
    settings = ComparisonSettings.make(data, request)
    settings = replace(settings, recipe=replace(settings.recipe, **TINY))
    (job,) = settings.jobs(data)
    record = plain(run(replace(job, seed=seed), settings, data))
    tree = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings.describe(),
        "environment": environment("cpu"),
        "task": data.describe(),
        "mechanisms": [describe(name, settings, data) for name in settings.names],
        "records": [record],
        "costs": [],
    }
    return read(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name", "asked"),
    [
        ("digits", "learned+relative_2d", {"seed": 3}),
        ("text", "t5", {}),
        ("digits", "sophia-g", {"what": "optimizer"}),
        ("digits", "qk-norm", {"what": "norm"}),
        ("digits", "rotary_2d", {"precision": "bf16-mixed"}),
        ("digits", "relative_2d", {"precision": "fp16-mixed"}),
    ],
)
def test_the_program_reaches_the_figure_of_the_command(
    task: str, name: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComparisonSettings, "probes", lambda _, task: task.probes[:1])
    results = compared(task, name, **asked)
    (record,) = results.records
    (metric,) = record.metrics
    figure = metric.accuracy if task == "digits" else metric.bits_per_byte
    made: dict[str, Any] = {}
    exec(compile(reproduce(results, name), "reproduce.py", "exec"), made)
    assert float(capsys.readouterr().out) == figure
    assert round(made["loss"].item(), 6) == record.curve.loss[-1]


def test_it_is_short_and_names_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComparisonSettings, "probes", lambda _, task: task.probes[:1])
    program = reproduce(compared("digits", "relative_2d"), "relative_2d")
    assert len(program.splitlines()) <= 48
    assert max(map(len, program.splitlines())) <= 120
    for said in ("position_init_std=0.5", "position_learning_rate_multiplier=10.0", "0.006", "clip_grad_norm_"):
        assert said in program


def test_a_name_without_a_finished_run_is_one_line(make: Any) -> None:
    results = read({**make(), "records": []})
    with pytest.raises(ResultsError, match="expected a finished run of t5; got none"):
        reproduce(results, "t5")


def test_any_title_leaves_it_a_program(make: Any) -> None:
    tree = make(("none", "relative_2d"))
    for title in ('a """ folder', "C:\\users\\x", "two\nlines"):
        tree["task"]["title"] = title
        compile(reproduce(read(tree), "relative_2d"), "printed", "exec")
