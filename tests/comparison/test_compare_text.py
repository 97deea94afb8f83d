"""A comparison on text through the command, on a file of one's own."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from schema import check, written

from relpos.cli import main
from relpos.comparison import ComparisonSettings
from relpos.comparison.cost import sizes
from relpos.comparison.learned import PROMPT, WRITTEN, learned, sample
from relpos.data import Text
from relpos.data.text import STANDARD_ON_TEXT
from relpos.models import LanguageModel
from relpos.position import presets
from relpos.train import TextRecipe
from relpos_command.requests import CompareRequest

WORDS = b"the cat sat on the mat and the dog sat on the cat. "


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes((WORDS * 1200)[:60_000])
    return path


def call(path: Path, out: Path) -> list[str]:
    options = ["--positions", "none,relative_1d", "--steps", "2", "--quick", "--device", "cpu"]
    return ["compare", "--data", str(path), *options, "--out", str(out)]


@pytest.fixture(scope="module")
def finished(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison") / "out"
    main(call(path, out))
    return out


@pytest.mark.slow
def test_results_are_what_the_page_on_them_says(finished: Path) -> None:
    results = written(finished)
    check(results)
    assert [record["id"] for record in results["records"]] == ["none--recipe--seed0", "relative_1d--recipe--seed0"]
    assert [(cost["position"], cost["tokens"]) for cost in results["costs"]] == [("none", 256), ("relative_1d", 256)]
    assert results["settings"]["task_options"]["text"].endswith("words.txt")
    page = (finished / "report.html").read_text()
    assert "words.txt: 2 position mechanisms compared" in page
    assert "--data" in page, "the command to run it again names the file"


@pytest.mark.slow
def test_a_changed_file_is_another_comparison(finished: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    path.write_bytes(before[1:])
    try:
        with pytest.raises(SystemExit) as caught:
            main(call(path, finished))
    finally:
        path.write_bytes(before)
    assert caught.value.code == 2
    assert "task_options.contents was" in capsys.readouterr().err


def settings(task: Text, positions: tuple[str, ...] | None = None, **more: Any) -> ComparisonSettings:
    return ComparisonSettings.make(task, CompareRequest(positions=positions, device="cpu", **more))


def test_a_comparison_takes_six_a_dozen_or_all() -> None:
    task = Text()
    chosen = settings(task)
    assert chosen.positions == ("none", "learned", "t5", "alibi", "rotary_1d", "kerple_log")
    standard = settings(task, ("standard",)).positions
    assert standard == STANDARD_ON_TEXT
    assert len(standard) == 12
    assert set(chosen.positions) < set(standard)
    assert chosen.recipe == TextRecipe()
    every = settings(task, ("all",)).positions
    assert set(every) == {name for name, preset in presets().items() if 1 in preset.token_axes}
    assert set(standard) - set(every) <= {name for name in standard if "+" in name}
    with pytest.raises(ValueError, match="expected positions that suit text for task text; got 'relative_2d'"):
        settings(task, ("relative_2d",))


def test_longer_inputs_are_timed() -> None:
    task = Text()
    assert [size.grid for size in sizes(settings(task, seeds=2), task)] == [(256,), (1024,), (4096,)]
    assert [size.grid for size in sizes(settings(task), task)] == [(256,), (1024,)]
    assert [size.grid for size in sizes(settings(task, quick=True), task)] == [(256,)]


def tiny(position: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(embed_dim=16, depth=2, num_heads=2, position=position, shared_position=True)


def test_a_bias_is_kept_for_the_past() -> None:
    model = tiny("alibi")
    (entry,) = learned(model)
    assert (entry.offsets, entry.along, entry.layer) == ([[0, 255]], "bytes", "shared")
    assert entry.values[0][:3] == pytest.approx([0, entry.values[0][1], 2 * entry.values[0][1]])
    assert all(len(values) == 256 and values[1] < 0 for values in entry.values)


def test_a_sequence_of_vectors_is_thinned() -> None:
    model = tiny("sinusoidal_1d")
    (entry,) = learned(model)
    assert (entry.grid, entry.every) == ([64], 4)
    places = model.token_position.embed(torch.zeros(1, 256, 16), model.coordinates)[0, ::4]
    unit = torch.nn.functional.normalize(places - places.mean(dim=0), dim=-1)
    torch.testing.assert_close(torch.tensor(entry.similarity), unit @ unit.T, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "learned", "rotary_yarn"])
def test_a_sample_is_the_trained_models_and_goes_on_beyond_by_its_first_rule(position: str) -> None:
    task, model = Text(), tiny(position).eval()
    with torch.no_grad():
        for parameter in model.position_parameters():
            parameter.normal_()
    prompt = task.blocks("test")[0][:1, :PROMPT]
    within = model.generate(prompt, task.length - PROMPT, temperature=0.0)
    grown = model.grow(PROMPT + WRITTEN, model.growth()[0])
    beyond = grown.generate(within, PROMPT + WRITTEN - task.length, temperature=0.0)[0, task.length :]
    assert asdict(sample(model, task)) == {
        "prompt": words(prompt[0]),
        "within": words(within[0, PROMPT:]),
        "beyond": words(beyond),
    }
    assert len(beyond) == PROMPT + WRITTEN - task.length > 0


def words(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode("utf-8", "replace")
