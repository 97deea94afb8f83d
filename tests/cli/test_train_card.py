"""The model card of `relpos train`: it says what the configuration and the data say, with an interval and a picture."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy import stats

import relpos
import relpos.cli.train_card as train_card
from relpos.cli import main
from relpos.data import find_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "mine"
    main(["train", "--position", "learned+relative_2d", "--steps", "20", "--device", "cpu", "--out", str(out)])
    return out


@pytest.mark.slow
def test_the_card_tells_the_run(folder: Path) -> None:
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    model = relpos.VisionTransformer.from_pretrained(folder)
    task = find_task("digits")
    images, labels = task.examples(task.probes[0], "test", slice(None))  # type: ignore[attr-defined]
    with torch.no_grad():
        each = [float((model(x).argmax(-1) == label).float().mean()) for x, label in zip(images, labels, strict=True)]
    mean, reach = (
        statistics.mean(each),
        stats.t.ppf(0.975, len(each) - 1) * statistics.stdev(each) / math.sqrt(len(each)),
    )
    said = re.search(
        r"Test accuracy: \*\*([\d.]+)%\*\*, 95% interval ([\d.]+) to ([\d.]+) over (\d+) test images", card
    )
    assert said is not None, card
    assert float(said[1]) == pytest.approx(100 * mean, abs=0.06)
    assert float(said[2]) == pytest.approx(100 * (mean - reach), abs=0.51)
    assert float(said[3]) == pytest.approx(100 * (mean + reach), abs=0.51)
    assert int(said[4]) == 360
    assert f"Validation accuracy: {config['validation_accuracy']:.1%}." in card
    for name, value in config["recipe"].items():
        assert f"| {name} | {value} |" in card
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card
    assert "1,257 train, 180 validation, 360 test" in card
    assert "relpos.VisionTransformer.from_pretrained('mine')" in card


@pytest.mark.slow
def test_the_picture_is_beside_it(folder: Path) -> None:
    (shown,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (folder / "README.md").read_text())
    with Image.open(folder / shown) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


@pytest.mark.slow
def test_without_libraries_of_reports_the_card_has_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_card, "_reporting", lambda: False)
    out = tmp_path / "plain"
    main(["train", "--position", "none", "--steps", "1", "--device", "cpu", "--out", str(out)])
    card = (out / "README.md").read_text()
    assert re.search(r"Test accuracy: [\d.]+%\. The interval needs relpos\[report\]\. Validation", card)
    assert "![" not in card
    assert {path.name for path in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["README.md", "position.png"])
def test_a_card_that_is_there_is_seen_before_training(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["train", "--position", "none", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert re.search(rf"expected a folder without a {name}; got .*nothing is overwritten", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_text_in_bits(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_bytes((b"the cat sat on the mat and the dog sat on the cat. " * 2400)[:120_000])
    out = tmp_path / "text"
    main(["train", "--position", "t5", "--steps", "2", "--device", "cpu", "--out", str(out), "--data", str(words)])
    card = (out / "README.md").read_text()
    assert re.search(r"Test bits per byte: \*\*[\d.]+ bits\*\*, 95% interval [\d.]+ to [\d.]+ over \d+ blocks", card)
    assert isinstance(relpos.LanguageModel.from_pretrained(out), relpos.LanguageModel)
