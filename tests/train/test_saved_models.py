"""Saved models that load where their images are gone, and in a later version."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from photographs import make_folder
from relpos.cli import main
from relpos.data import ImageFolder
from relpos.train import load


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


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_folder_of_an_earlier_version_loads(kind: str) -> None:
    """`saved_0_1_0/` was written by relpos 0.1.0 as it stood before `save_pretrained`: untrained models of `relpos
    train`, and what they made of an input then. It is never written anew."""
    saved = Path(__file__).parent / "saved_0_1_0" / kind
    model, config = load(saved)
    expected = load_file(saved / "expected.safetensors")
    torch.testing.assert_close(model(expected["input"]), expected["output"])
    assert config["relpos"] == "0.1.0"


def test_a_model_of_an_earlier_relpos_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = {"task": "digits", "position": "none", "recipe": {}, "relpos": "0.0.9"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"a config.json with the model's arguments; got one without, .*0\.0\.9"):
        load(tmp_path)
