"""`relpos.compare`: models, data, steps and figures of one's own; what it returns, and what mistakes get."""

import json
import random
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import own_model
import pytest
import torch
from calls import Compared, compare
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import Dataset

from relpos.comparison.training import TrainingLog
from relpos.data import find_task
from relpos.report.command import command_line
from relpos.results import load_results
from relpos.train import Progress, measured

OWN = Path(own_model.__file__)


def waves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of 12 tokens, and of each the first number of its first token, which only position tells."""
    inputs = torch.rand(count, 12, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, 0, 0]


WAVES = (waves(96, 0), waves(32, 1), waves(40, 2))


@pytest.mark.slow
def test_models_that_come_back_reach_what_is_written(digits: Compared) -> None:
    result, task = digits[0], find_task("digits")
    assert list(result.models) == [("none", 0), ("relative_2d", 0)]
    for run in result.results.records:
        model = result.models[run.position, 0]
        assert not model.training
        reached = measured(model, task, task.probes[0], torch.device("cpu"))
        assert reached["correct"] == run.metrics[0].correct
    with pytest.raises(KeyError, match=r"among \('none', 0\), \('relative_2d', 0\); got \('t5', 0\)"):
        result.models["t5", 0]


@pytest.mark.slow
def test_weights_of_another_model_are_refused_in_one_line(digits: Compared) -> None:
    path = digits[0].folder / "training" / "none--recipe--seed0" / "model.safetensors"
    before = path.read_bytes()
    weights = load(before)
    name = next(iter(weights))
    wrong = [
        ({**weights, name: torch.zeros(3, 5)}, rf"expected {name} in .* a tensor of shape .*; got .*\(3, 5\)"),
        ({x: weights[x] for x in weights if x != name}, rf"expected {name} in .*; got none\."),
        ({**weights, "extra": torch.zeros(1)}, r"expected extra in .* has it: none; got a tensor"),
    ]
    try:
        for held, says in wrong:
            path.write_bytes(save(held))
            with pytest.raises(ValueError, match=says) as caught:
                digits[0].models["none", 0]
            assert len(str(caught.value).splitlines()) == 1
    finally:
        path.write_bytes(before)


@pytest.mark.slow
def test_what_was_asked_is_the_recipe_and_on_the_page(digits: Compared) -> None:
    result, lines = digits
    recipe = result.results.settings.recipe
    assert (recipe.depth, recipe.learning_rate, recipe.batch_size, recipe.steps) == (1, 1e-3, 32, 3)
    page = result.page.read_text(encoding="utf-8")
    assert "--set recipe.depth=1 --batch-size 32 --lr 0.001" in page
    assert load_results(result.folder / "results.json") == result.results
    assert lines[0].startswith("Comparing none, relative_2d on digits, in ")
    assert lines[-1] == "Done: time training steps (5 of 5 done)"


@pytest.mark.slow
def test_a_result_draws_itself(digits: Compared) -> None:
    result = digits[0]
    assert result.best is None, "a quick run decides nothing"
    assert "relative_2d" in str(result.table())
    assert repr(result).endswith(f"Page: {result.page}")
    shown = result._repr_html_()
    assert "<table>" in shown
    assert "It works: 2 of 2 trained" in shown


@pytest.mark.slow
def test_losses_and_rates_are_written_a_line_a_step(digits: Compared) -> None:
    result = digits[0]
    for run in result.results.records:
        text = (result.folder / "training" / run.id / "losses.jsonl").read_text()
        entries = [json.loads(line) for line in text.splitlines()]
        assert [entry["step"] for entry in entries] == [1, 2, 3]
        assert [round(entry["loss"], 6) for entry in entries] == run.curve.loss
        assert [round(entry["rate"], 6) for entry in entries] == run.curve.rate
        assert [round(entry["validation"], 6) for entry in entries] == run.curve.validation


def test_it_is_tensorboards_too_where_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            told.append(log_dir)

        def add_scalar(self, *entry: Any) -> None:
            told.append(entry)

        def close(self) -> None:
            told.append("closed")

    written = ModuleType("torch.utils.tensorboard")
    written.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", written)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorboard" or None)
    with TrainingLog(tmp_path / "run") as log:
        log.add(Progress(1, 2, 0.5, 0.1, 0.25))
        log.add(Progress(2, 2, 0.4, 0.05))
    assert told[0] == str(tmp_path / "run")
    assert sorted(told[1:4]) == [("loss", 0.5, 1), ("rate", 0.1, 1), ("validation", 0.25, 1)]
    assert sorted(told[4:6]) == [("loss", 0.4, 2), ("rate", 0.05, 2)]
    assert told[6:] == ["closed"]


@pytest.mark.slow
def test_a_file_builds_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("my models") / "mine.py"
    file.parent.mkdir()
    file.write_text(OWN.read_text())
    out = tmp_path / "out"
    result, lines = compare(out, f"{file}:build", positions=["own", "learned"], quick=True)
    assert result.results.settings.model is not None
    assert result.results.settings.model.startswith("mine.py:build, sha256 ")
    assert not any("in this process" in line for line in lines)
    parameters = {run.position: run.parameters.position for run in result.results.records}
    assert parameters == {"own": 0, "learned": 16 * 16}
    assert {cost.depth for cost in result.results.costs} == {None}
    asked = [metric.probe for metric in result.results.records[0].metrics]
    assert asked == ["test", "shift/1", "shift/2", "shift/3"], "nobody is asked what no model has a rule for"
    typed = shlex.split(command_line(result.results))
    assert typed[typed.index("--model") + 1] == "my models/mine.py:build"
    elsewhere = file.rename("mine.py")
    again, said = compare(out, f"{elsewhere}:build", positions=["own", "learned"], quick=True)
    assert said[0].startswith("This comparison is finished."), "where the file lies is no part of what is compared"
    assert again.results.settings.given == {"model": "mine.py:build"}
    file = elsewhere
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(ValueError, match=r"these differ: model was 'mine\.py:build, sha256 .*, now 'mine\.py:build"):
        compare(out, f"{file}:build", positions=["own", "learned"], quick=True)


@pytest.mark.slow
def test_regression_by_a_step_and_figures_of_ones_own(tmp_path: Path) -> None:
    """Figures are below 0 and more is better: the interval is not cut off at 0, and learned positions win."""
    result, lines = compare(
        tmp_path / "out", own_model.build_for_regression, WAVES, ["none", "learned"], seeds=3, step=own_model.step,
        evaluate=own_model.evaluate, better="higher", steps=100, lr=2e-2,
    )  # fmt: skip
    assert not any("in this process" in line for line in lines)
    for run in result.results.records:
        (metric,) = run.metrics
        assert metric.values is not None
        assert len(metric.values) == 40
        assert metric.figure == pytest.approx(sum(metric.values) / 40, abs=1e-5)
        if run.variant == "recipe":
            model = result.models[run.position, run.seed]
            wanted = own_model.evaluate(model, [WAVES[2]])
            assert metric.values == pytest.approx(wanted.tolist(), abs=1e-5)
    assert result.best == "learned"
    assert "The figure, higher is better" in str(result.table())
    assert load_results(result.folder) == result.results
    page = result.page.read_text(encoding="utf-8")
    assert "vision transformer" not in page
    assert "(train, validation, test)" in page


@pytest.fixture(scope="module")
def by_step(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """A comparison by a step alone, in processes of its own."""
    out = tmp_path_factory.mktemp("by step") / "out"
    step = own_model.step
    return compare(out, own_model.build_by_chance, WAVES, ["learned"], step=step, quick=True, batch_size=16)


@pytest.mark.slow
def test_a_loss_without_evaluate_is_the_figure(by_step: Compared) -> None:
    result, _ = by_step
    (metric,) = result.results.records[0].metrics
    model = result.models["learned", 0]
    with torch.no_grad():
        wanted = [own_model.step(model, [x[at : at + 16] for x in WAVES[2]]).item() for at in (0, 16, 32)]
    assert metric.values == pytest.approx(wanted, abs=1e-5)
    assert metric.figure == pytest.approx(sum(wanted) / 3, abs=1e-5)
    assert result.results.settings.better == "lower"


@pytest.mark.slow
def test_a_closure_runs_here_and_a_line_says_so(by_step: Compared, tmp_path: Path) -> None:
    """It gives the same figures, and what it draws from Python and NumPy is drawn from the seed, too."""
    made = own_model.build_by_chance

    def build(position: str, task: Any) -> nn.Module:
        return made(position, task)

    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(7), random.seed(7), np.random.seed(7)  # noqa: NPY002

    seed()
    expected, threads = drawn(), torch.get_num_threads()
    seed()
    step = own_model.step
    here, lines = compare(tmp_path / "out", build, WAVES, ["learned"], step=step, quick=True, batch_size=16)
    assert any(re.match(r"All runs use this process, because .*build", line) for line in lines)
    assert here.models["learned", 0] is not None
    assert drawn() == expected, "random numbers outside go on as if nothing had been"
    assert torch.get_num_threads() == threads
    there, lines = by_step
    assert not any("in this process" in line for line in lines)
    for one, other in zip(here.results.records, there.results.records, strict=True):
        assert (one.curve, one.metrics) == (other.curve, other.metrics), "the same figures in either"
    assert here.results.costs[0].peak_memory_mib is None
    assert there.results.costs[0].peak_memory_mib is not None


class Pictures(Dataset[tuple[Tensor, int]]):
    """Grey pictures whose brighter half says their class."""

    classes = ("left", "right", "above")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, label = torch.zeros(1, 16, 24), index % 3
        half = [(slice(None), slice(0, 12)), (slice(None), slice(12, 24)), (slice(0, 8), slice(None))][label]
        picture[0][half] = 1.0 + index / 100
        return picture, label


@pytest.mark.slow
def test_datasets_of_images_train_our_models(tmp_path: Path) -> None:
    data = (Pictures(30), Pictures(6), Pictures(9))
    result, lines = compare(tmp_path / "out", None, data, ["none"], quick=True, patch=4)
    task = result.results.task
    assert (task.classes, task.channels, task.image_size, task.patch_size) == (
        ["left", "right", "above"], 1, [16, 24], [4, 4],
    )  # fmt: skip
    assert lines[0] == "Pictures: 30 inputs to train on, 6 for validation, 9 to test."
    assert "Batches of 30 instead of 64: there are 30 training images." in lines
    (metric,) = result.results.records[0].metrics
    assert metric.correct is not None
    assert len(metric.correct) == 9


ON_WAVES: dict[str, Any] = {"data": WAVES, "model": own_model.build_for_regression}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "fails": ({"model": own_model.fails}, r"expected build\(.*\) to return a model; got KeyError: 'none' for"),
    "none": ({"model": own_model.gives_none}, r"expected a torch\.nn\.Module from build\(position, task\); got None\."),
    "shape": ({"model": own_model.of_another_shape}, r"expected scores of shape \(2, 10\) .*; got .*\(2, 3\)"),
    "module": ({"model": nn.Linear(1, 1)}, r"expected .*build\(position, task\) as .*; got Linear\(.*Pass the"),
    "hf": ({"model": "hf:gone"}, r"expected a folder with config\.json after hf:; got gone\. Save a model there"),
    "hf nothing": (
        {"model": "hf:"},
        r"expected timm:NAME, torchvision:NAME or hf:FOLDER; got 'hf:'\. Write for example timm:vit_tiny",
    ),
    "timm": ({"model": "timm:vit_tini_patch16_224"}, r"of timm; got 'vit_tini_patch16_224'\. Did you mean vit_tiny"),
    "word": (
        {"model": "swim"},
        r"expected swin, timm:NAME, torchvision:NAME, hf:FOLDER, or build\(position, task\) as a .*; got 'swim'",
    ),
    "depth": (
        {"model": own_model.build, "recipe": {"depth": 1}},
        r"training settings with your own model; got depth, a setting of",
    ),
    "own": ({"positions": ["own"]}, r"expected a position mechanism.* got 'own'|got 'own'"),
    "gone": ({"data": "no/such"}, r"expected data as a folder .*; got no/such, which does not exist\. Name one"),
    "two": ({"data": WAVES[:2]}, r"expected data as three datasets: train, validation, test; got 2\."),
    "no set": ({"data": (WAVES[0], WAVES[1], 3)}, r"expected a dataset for test; got int 3\. Pass one with __len__"),
    "empty": ({"data": (WAVES[0], [], WAVES[2])}, r"expected a dataset for validation with items; got an empty one"),
    "model": ({"data": WAVES}, r"expected a model with these datasets \(relpos's own needs images"),
    "data": ({"data": 3}, r"expected data as a folder of images, .*; got int 3\."),
    "no figure": (
        ON_WAVES,
        r"expected a figure to measure on inputs that are neither images nor text; got no step and no evaluate\.",
    ),
    "no step": (
        {**ON_WAVES, "evaluate": own_model.evaluate, "better": "lower"},
        r"expected classes as integers; got a tensor of shape \(2,\) and dtype float32\. Pass your own step",
    ),
    "scalar": (
        {**ON_WAVES, "step": lambda model, batch: model(batch[0])},
        r"expected one number as a tensor from step\(model, batch\); got a tensor of shape \(2, 1\)",
    ),
    "gradient": (
        {**ON_WAVES, "step": lambda model, batch: torch.zeros(())},
        r"expected a loss that depends on the model's parameters; got one without a gradient",
    ),
    "figure": (
        {**ON_WAVES, "step": own_model.step, "better": "lower", "evaluate": lambda model, split: "good"},
        r"expected a number, or one for each unit, from evaluate\(model, split\); got str 'good'\.",
    ),
    "raises": (
        {**ON_WAVES, "step": own_model.step, "better": "lower", "evaluate": lambda model, split: 1 / 0},
        r"expected evaluate\(model, split\) to return a figure; got ZeroDivisionError: division by zero for the pos",
    ),
    "better": ({"evaluate": own_model.evaluate}, r"expected better='higher' or 'lower' with evaluate; got none"),
    "what": (
        {"what": "norm", "model": own_model.build},
        r"expected what='position' with your own model, .*; got 'norm'",
    ),
    "field": ({"recipe": {"weigth_decay": 1}}, r"a field of the recipe among .*; got 'weigth_decay'\. Did you mean"),
    "bool": ({"recipe": {"shared_position": 3}}, r"the recipe's shared_position to be True or False; got int 3"),
    "name": ({"recipe": {"norm": 3}}, r"expected the recipe's norm as a name; got int 3"),
    "step file": ({"step": "mine.py"}, r"expected step\(model, batch\) as a function or FILE\.py:NAME; got 'mine\.py'"),
    "sophia": (
        {"step": own_model.step, "recipe": {"optimizer": "sophia-g"}},
        r"expected adamw or lion, with your own step or evaluate; got sophia-g\.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(mistake: str, tmp_path: Path) -> None:
    options, says = MISTAKES[mistake]
    with pytest.raises(ValueError, match=says) as caught:
        compare(tmp_path / "out", **{"positions": ["none"], **options})
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()
