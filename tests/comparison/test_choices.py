"""Comparisons of anything but position: what is trained, what a step costs, and a whole one through the command."""

from pathlib import Path
from typing import Any

import pytest
from schema import written

from relpos.cli import main
from relpos.comparison import CHOICES, ComparisonSettings
from relpos.comparison.cost import GROWING, _Step, memory_sizes, sizes
from relpos.data import find_task
from relpos.train import ImageRecipe, TextRecipe
from relpos_command.requests import CompareRequest


def settings(what: str, task: str = "digits", **more: Any) -> ComparisonSettings:
    return ComparisonSettings.make(
        find_task(task), CompareRequest(**{"seeds": 2, "device": "cpu", "what": what, **more})
    )


@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("task", ["digits", "text"])
def test_every_choice_is_the_recipe_but_for_itself(what: str, task: str) -> None:
    asked, base = settings(what, task), TextRecipe() if task == "text" else ImageRecipe()
    assert asked.names == tuple(CHOICES[what])
    assert asked.positions == ("rotary_1d" if task == "text" else "rotary_2d",)
    recipes = [asked.of(name)[0] for name in asked.names]
    assert len(set(recipes)) == len(recipes), "all differ"
    may_differ = {
        "attention": {"attention", "num_kv_heads"},
        "norm": {"norm", "qk_norm"},
        "optimizer": {"optimizer", "learning_rate", "weight_decay"},
    }[what]
    for recipe in recipes:
        changed = {field for field in base.__dataclass_fields__ if getattr(recipe, field) != getattr(base, field)}
        assert changed <= may_differ


def test_jobs_are_every_choice_and_seed_and_no_other_rate() -> None:
    asked = settings("norm", choices=("rmsnorm", "layernorm", "rmsnorm"))
    assert [job.id for job in asked.jobs(find_task("digits"))] == [
        "layernorm--recipe--seed0", "rmsnorm--recipe--seed0", "layernorm--recipe--seed1", "rmsnorm--recipe--seed1",
    ], "in the order of the list, whose first the others are held to"  # fmt: skip
    assert [probe.id for probe in asked.probes(find_task("digits"))] == ["test"]


@pytest.mark.parametrize(("position", "name"), [("t5", "linear"), ("shaw", "linear"), ("cope", "flash")])
def test_a_position_that_some_attention_lacks_is_refused_before_any_training(position: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"expected a position that {name} attention supports; got '{position}'"):
        settings("attention", "text", positions=(position,), choices=("full", name))
    assert settings("attention", "text", positions=("t5",), choices=("full", "flash")).positions == ("t5",)


@pytest.mark.slow
def test_larger_sizes_differ_in_tokens_alone() -> None:
    for task in ("digits", "text"):
        own, *larger = sizes(settings("attention", task), find_task(task))
        assert own.depth is None
        assert {(size.batch_size, size.depth) for size in larger} == {(1, 1)}
        assert len(larger) == len(GROWING) == 3
        assert memory_sizes(settings("attention", task, seeds=1), find_task(task)) == (0, 1, 2, 3)
    assert len(sizes(settings("attention", quick=True), find_task("digits"))) == 1


@pytest.mark.parametrize(("name", "written"), [("linear", "linear"), ("flash", "tiles")])
def test_files_name_the_engine_of_an_attention_without_one_as_they_always_have(name: str, written: str) -> None:
    asked, task = settings("attention", quick=True), find_task("digits")
    assert _Step(name, sizes(asked, task)[0], asked, task).backend() == written


@pytest.mark.parametrize(("name", "kept"), [("adamw", 2), ("lion", 1), ("sophia-h", 2)])
def test_what_an_optimizer_keeps_is_counted(name: str, kept: int) -> None:
    asked, task = settings("optimizer", quick=True), find_task("digits")
    step = _Step(name, sizes(asked, task)[0], asked, task)
    assert step() > 0
    assert step.state_per_parameter() == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"what": "attention", "choices": ("dilated",)}, "expected a kind of attention among full, local"),
        ({"what": "speed"}, "--what to be one of 'position', 'attention', 'norm', 'optimizer'; got str 'speed'"),
        ({"what": "norm", "choices": ("layernom",)}, "a kind of norm among .*Did you mean 'layernorm'"),
        ({"what": "norm", "choices": ()}, "at least one choice; got none"),
        ({"what": "norm", "positions": ("none", "learned")}, "one position for all models of --what norm"),
        ({"what": "position", "choices": ("full",)}, "--choices only with --what attention, norm or opt"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**more)


def call(out: Path) -> list[str]:
    short = ["--steps", "2", "--quick", "--device", "cpu"]
    return ["compare", "--what", "norm", "--choices", "layernorm,groupnorm", *short, "--out", str(out)]


@pytest.mark.slow
def test_a_comparison_of_norms_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(call(out))
    results = written(out)
    assert (results["settings"]["what"], results["settings"]["choices"]) == ("norm", ["layernorm", "groupnorm"])
    assert [one["name"] for one in results["mechanisms"]] == ["layernorm", "groupnorm"]
    assert [probe["id"] for probe in results["task"]["probes"]] == ["test"]
    for record, name in zip(results["records"], ("layernorm", "groupnorm"), strict=True):
        assert (record["choice"], record["position"], record["id"]) == (name, "rotary_2d", f"{name}--recipe--seed0")
        assert [metric["probe"] for metric in record["metrics"]] == ["test"]
        assert record["settings"]["recipe"]["norm"] == name
        assert not {"learned", "attention", "sample"} & set(record)
    assert [(cost["choice"], cost["tokens"]) for cost in results["costs"]] == [("layernorm", 64), ("groupnorm", 64)]
    assert all(cost["peak_memory_mib"] >= 0 and cost["state_per_parameter"] > 1.9 for cost in results["costs"])
    assert results["costs"][0]["ratio"] == 1
    assert "groupnorm" in (out / "report.html").read_text()
    with pytest.raises(SystemExit):
        main([*call(out), "--what", "attention", "--choices", "full,local"])
    assert "what was 'norm', now 'attention'" in capsys.readouterr().err
