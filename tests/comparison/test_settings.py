"""What a comparison is asked to do: settings, defaults, refusals, and the training runs that follow."""

import inspect
import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

import relpos
from relpos.comparison import ComparisonSettings, Job
from relpos.comparison.choices import find_choice
from relpos.comparison.settings import QUICK_STEPS, describe, environment
from relpos.data import find_task
from relpos.position import presets
from relpos.results import plain
from relpos.results.typed import typed
from relpos.train import ImageRecipe, TextRecipe
from relpos_command.requests import CompareRequest


def make(**changes: Any) -> ComparisonSettings:
    task = changes.pop("task", None) or find_task("digits")
    return ComparisonSettings.make(task, CompareRequest(**{"device": "cpu", **changes}))


def test_the_call_takes_what_the_command_takes() -> None:
    arguments = {name: one.default for name, one in inspect.signature(relpos.compare).parameters.items()}
    del arguments["display"], arguments["executor"]
    assert arguments == {one.name: one.default for one in fields(CompareRequest)}


def test_a_change_of_the_recipe_holds_beside_options_that_were_left_out() -> None:
    """Those with an option of their own are fields of the recipe, too."""
    settings = make(recipe={"learning_rate": 0.5, "batch_size": 8})
    assert (settings.recipe.learning_rate, settings.recipe.batch_size) == (0.5, 8)
    assert settings.changes == {"learning_rate": 0.5, "batch_size": 8}
    assert make(recipe={"batch_size": 8}, batch_size=16).recipe.batch_size == 16
    assert make(recipe={"weight_decay": None}).changes == {}
    with pytest.raises(ValueError, match="expected seeds to be an integer of at least 1; got None"):
        make(seeds=None)


def test_windows_of_layers() -> None:
    """And without any the settings are those of folders from before there were windows."""
    windows = replace(make(task=find_task("text"), recipe={"window": [32, None]}).recipe, depth=1)
    assert isinstance(windows, TextRecipe)
    assert (windows.window, windows.of_the_model()["window"]) == ((32, None), (32,))
    assert make(task=find_task("text"), recipe={"window": 32}).to_json()["recipe"]["window"] == [32]
    assert "window" not in make(task=find_task("text")).to_json()["recipe"]
    with pytest.raises(ValueError, match="expected 1 to 4 windows for 4 layers; got 5"):
        make(task=find_task("text"), recipe={"window": [8] * 5})
    with pytest.raises(ValueError, match=r"a field of the recipe among .*; got 'window'"):
        make(recipe={"window": [8]})


def test_by_default_the_tasks_mechanisms_by_the_recipe() -> None:
    settings = make()
    assert settings.positions == ("none", "learned", "relative_2d", "t5", "rotary_2d", "learned+relative_2d")
    assert settings.recipe == ImageRecipe()
    assert (settings.task, settings.seeds, settings.quick, settings.device, settings.threads) == (
        "digits", 1, False, "cpu", 1,
    )  # fmt: skip


def test_all_is_every_mechanism_that_suits_images() -> None:
    every = make(positions=("all",)).positions
    assert every == tuple(name for name, preset in presets().items() if 2 in preset.token_axes)
    standard = make(positions=("standard",)).positions
    assert standard == (
        "none", "learned", "sinusoidal_2d", "relative_1d", "relative_2d", "t5", "alibi", "rotary_1d", "rotary_2d",
        "learned+relative_2d", "rotary_2d+relative_2d",
    )  # fmt: skip
    assert set(make().positions) < set(standard) < set(every)
    with pytest.raises(ValueError, match="expected one position for all models of --what norm; got standard"):
        make(positions=("standard",), what="norm")


@pytest.mark.parametrize(
    ("named", "positions"),
    [
        (("relative_2d", "none", "relative_2d"), ("relative_2d", "none")),
        (("rope", "swin", "relative_2d", "abs+swin"), ("rotary_2d", "relative_2d", "learned+relative_2d")),
    ],
)
def test_positions_keep_their_order_and_come_once(named: tuple[str, ...], positions: tuple[str, ...]) -> None:
    """By any of their names."""
    assert make(positions=named).positions == positions


def test_a_sum_grows_as_its_parts_do() -> None:
    settings = make(positions=("learned+relative_2d",))
    assert describe("learned+relative_2d", settings, find_task("digits")).growth == ["interpolated", "clipped"]


def test_quick_is_short_unless_steps_say_otherwise() -> None:
    quick = make(quick=True)
    assert quick.quick
    assert quick.recipe.steps == QUICK_STEPS < ImageRecipe().steps
    assert make(quick=True, steps=3).recipe.steps == 3
    assert make(steps=3).recipe.steps == 3


@pytest.mark.parametrize("steps", [1, 10, 100, 1000])
def test_the_warm_up_is_shorter_than_training(steps: int) -> None:
    recipe, usual = make(steps=steps).recipe, ImageRecipe()
    assert 1 <= recipe.warmup_steps <= usual.warmup_steps
    assert recipe.warmup_steps <= max(1, steps // 5)
    assert replace(recipe, steps=usual.steps, warmup_steps=usual.warmup_steps) == usual, "and nothing else"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ("all", "none")}, "got 'all'"),
        ({"positions": ("relative2d",)}, "got 'relative2d'. Did you mean 'relative_2d'?"),
        ({"positions": ("none", "learned+relativ_2d")}, "got 'relativ_2d'. Did you mean 'relative_2d'?"),
        ({"positions": ()}, "expected at least one position; got none. Name some"),
        ({"seeds": 0}, "expected seeds to be an integer of at least 1; got int 0"),
        ({"steps": 0}, "expected steps to be an integer of at least 1; got int 0"),
        ({"precision": "float16"}, "expected a precision among float32, bf16-mixed, fp16-mixed; got 'float16'"),
        ({"device": "gpu"}, "expected a device (auto, cpu, cuda, cuda:0); got 'gpu'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_jobs_are_every_mechanism_and_seed_then_learned_ones_at_rate_one() -> None:
    jobs = make(positions=("none", "learned", "relative_2d"), seeds=2).jobs(find_task("digits"))
    usual = ImageRecipe().position_learning_rate_multiplier
    assert usual != 1
    assert jobs == [
        *(Job(name, seed, "recipe", usual) for seed in (0, 1) for name in ("none", "learned", "relative_2d")),
        *(Job(name, seed, "x1", 1.0) for seed in (0, 1) for name in ("learned", "relative_2d")),
    ]
    assert len({job.id for job in jobs}) == len(jobs)


def test_no_runs_at_rate_one_where_the_recipe_is_at_one() -> None:
    settings = make(positions=("learned",))
    at_one = replace(settings, recipe=replace(settings.recipe, position_learning_rate_multiplier=1.0))
    assert [job.variant for job in at_one.jobs(find_task("digits"))] == ["recipe"]


def test_settings_are_plain_values_and_whole() -> None:
    settings = make(positions=("none", "learned"))
    written = settings.to_json()
    assert json.loads(json.dumps(written)) == written
    begun = {**asdict(settings), "positions": ["none", "learned"]}
    for name in (
        "what",
        "choices",
        "model",
        "step",
        "evaluate",
        "changes",
        "better",
        "given",
        "sources",
        "devices_per_trial",
    ):
        del begun[name]
    assert written == begun, "a folder that was begun is resumed: its comparison.json says this and no more"
    other = make(positions=None, what="norm", choices=("rmsnorm",)).to_json()
    assert json.loads(json.dumps(other)) == other
    assert (other["what"], other["choices"], other["positions"]) == ("norm", ["rmsnorm"], ["rotary_2d"])
    assert set(written["recipe"]) == set(ImageRecipe.__dataclass_fields__)


@pytest.mark.parametrize("task", ["digits", "text"])
def test_descriptions_are_what_results_are_read_as(task: str) -> None:
    data = find_task(task)
    settings = make(task=data)
    for described in (
        settings.describe(),
        environment("cpu"),
        data.describe(),
        *(describe(name, settings, data) for name in settings.positions),
        find_choice("norm", "rmsnorm").describe(),
    ):
        tree = json.loads(json.dumps(plain(described)))
        assert typed(type(described), tree, "results") == described
