"""A model trained on a folder of images: what is saved, and that it loads where the images are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from photographs import make_folder
from relpos.cli import main
from relpos.data import ImageFolder
from relpos.train import ImageRecipe, load


@pytest.mark.slow
def test_a_model_loads_where_its_images_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs, out = make_folder(tmp_path / "photographs", 6), tmp_path / "out"
    words = ["train", "--data", str(photographs), "--position", "learned", "--out", str(out), "--steps", "2"]
    main([*words, "--device", "cpu", "--image-size", "40x64", "--patch", "5x8"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "learned on images: validation" in printed
    assert "Batches of 12 instead of 64: there are 12 training images." in printed
    options = ImageFolder(photographs, (40, 64), (5, 8)).options
    shutil.rmtree(photographs)
    model, config = load(out)
    assert model(torch.zeros(2, 3, 40, 64)).shape == (2, 3)
    assert config["task_options"] == options
    assert config["classes"] == ["brick", "cat", "grass"]
    assert config["recipe"]["batch_size"] == 12


def test_a_model_of_an_earlier_relpos_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(
        json.dumps({"task": "digits", "position": "none", "recipe": {}, "relpos": "0.0.9"})
    )
    with pytest.raises(
        ValueError, match=r"a config.json with the model's arguments; got one without, .*relpos 0\.0\.9"
    ):
        load(tmp_path)


def test_a_batch_is_no_larger_than_the_data(tmp_path: Path) -> None:
    task = ImageFolder(make_folder(tmp_path, 6))
    assert ImageRecipe().within(task) == ImageRecipe(batch_size=12)
    assert ImageRecipe(batch_size=5).within(task) == ImageRecipe(batch_size=5)
