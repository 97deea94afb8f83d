"""`relpos train`: the model, its card with an interval and a picture, and that nothing is overwritten."""

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy import stats

import relpos
import relpos.cli.train_card as train_card
import relpos.train
from relpos.cli import main
from relpos.data import find_task
from relpos.train import load

Refused = Callable[..., str]
BEGIN = "train --position none --steps 1 --device cpu --out"


@pytest.mark.slow
def test_a_model_is_saved_as_asked(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    model, config = load(folder)
    assert model(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    assert config["position"] == "learned+relative_2d"
    assert (config["recipe"]["steps"], config["recipe"]["optimizer"]) == (3, "lion")
    assert (config["seed"], config["threads"], config["precision"]) == (5, 1, "float32")
    assert (config["relpos"], config["torch"]) == (relpos.__version__, torch.__version__)
    assert "by lion" in printed
    assert f"test {config['test_accuracy']:.1%}" in printed


@pytest.mark.slow
def test_the_card_tells_the_run(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    model = relpos.VisionTransformer.from_pretrained(folder)
    task = find_task("digits")
    images, labels = task.examples(task.probes[0], "test", slice(None))  # type: ignore[attr-defined]
    with torch.no_grad():
        right = model(images.flatten(0, 1)).argmax(-1).view(len(labels), -1) == labels[:, None]
    each = right.double().mean(1).tolist()
    mean = statistics.mean(each)
    reach = stats.t.ppf(0.975, len(each) - 1) * statistics.stdev(each) / math.sqrt(len(each))
    figures = r"Test accuracy: \*\*([\d.]+)%\*\*, 95% interval ([\d.]+) to ([\d.]+) over 360 test images"
    said = re.search(figures, card)
    assert said is not None, card
    assert float(said[1]) == pytest.approx(100 * mean, abs=0.06)
    assert float(said[2]) == pytest.approx(100 * (mean - reach), abs=0.51)
    assert float(said[3]) == pytest.approx(100 * (mean + reach), abs=0.51)
    assert f"Validation accuracy: {config['validation_accuracy']:.1%}." in card
    for name, value in config["recipe"].items():
        assert f"| {name} | {value} |" in card
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card
    assert "1,257 train, 180 validation, 360 test" in card
    assert "relpos.VisionTransformer.from_pretrained('mine')" in card
    (shown,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", card)
    with Image.open(folder / shown) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50, "a picture of something"


@pytest.mark.slow
def test_without_libraries_of_reports_the_card_has_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_card, "_reporting", lambda: False)
    out = tmp_path / "plain"
    main([*BEGIN.split(), str(out)])
    card = (out / "README.md").read_text()
    assert re.search(r"Test accuracy: [\d.]+%\. The interval needs relpos\[report\]\. Validation", card)
    assert "![" not in card
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.slow
def test_text_in_bits(tmp_path: Path) -> None:
    words, out = tmp_path / "words.txt", tmp_path / "text"
    words.write_bytes((b"the cat sat on the mat and the dog sat on the cat. " * 2400)[:120_000])
    main([*BEGIN.replace("none", "t5").split(), str(out), "--data", str(words)])
    card = (out / "README.md").read_text()
    assert re.search(r"Test bits per byte: \*\*[\d.]+ bits\*\*, 95% interval [\d.]+ to [\d.]+ over \d+ blocks", card)
    assert isinstance(relpos.LanguageModel.from_pretrained(out), relpos.LanguageModel)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "position.png"])
def test_nothing_is_overwritten_and_that_is_seen_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(relpos.train, "train", lambda *_, **__: pytest.fail("it trains first"))
    (tmp_path / name).write_text("mine")
    assert re.search(r"expected .*; got .*nothing is overwritten", refused([*BEGIN.split(), str(tmp_path)]))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
