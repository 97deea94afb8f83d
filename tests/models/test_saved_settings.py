"""Settings of mechanisms in what relpos itself loads and saves: folders, `load_weights`, checkpoints, comparisons."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import relpos
from relpos import LanguageModel, RotaryEmbedding, YaRN
from relpos.comparison.training import load_run, save_weights, weights_of
from relpos.position.base.saved_settings import is_settings
from relpos.train.snapshots import Snapshot
from relpos.train.state import restore_weights

SAID = "do not record their settings"
GROWN = r"saved with scaling=None; got scaling=YaRN\(factor=2, .*Call model\.grow\(32, 'yarn'\) before loading"


def model(position: Any = "rotary_1d+t5") -> LanguageModel:
    return LanguageModel(16, 16, embed_dim=16, depth=2, num_heads=2, position=position)


def before(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they were saved when there were no settings."""
    return {name: x for name, x in state.items() if not is_settings(name)}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


def test_weights_in_a_state_dict() -> None:
    one, other = model(), model()
    with pytest.raises(ValueError, match=GROWN):
        relpos.load_weights(other, one.grow(32, "yarn").state_dict())
    assert not same(one, other), "nothing was loaded"
    with pytest.warns(UserWarning, match=SAID) as told:
        relpos.load_weights(other, before(one.state_dict()))
    assert len(told) == 1
    assert same(one, other)
    with pytest.raises(ValueError, match=r"lacks positions.*and 6 more|has positions"):
        relpos.load_weights(model("none"), one.state_dict())


def test_a_folder(tmp_path: Path) -> None:
    """Its configuration says what mechanisms there are, also of one that was written before."""
    one = model().grow(32, "yarn")
    one.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(before(load_file(file)), file)
    assert same(one, LanguageModel.from_pretrained(tmp_path))
    relpos.load_weights(model().grow(32, "yarn"), tmp_path)
    with pytest.warns(UserWarning, match=SAID):  # it says that it was grown, and this one was not
        relpos.load_weights(model(), tmp_path)
    save_file(one.state_dict(), file)
    with pytest.raises(ValueError, match=GROWN):
        relpos.load_weights(model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "grown": []}))
    with pytest.raises(ValueError, match=r"^expected the weights of the model in config\.json; got .*safetensors"):
        LanguageModel.from_pretrained(tmp_path)


def test_a_model_that_no_configuration_builds_is_not_saved(tmp_path: Path) -> None:
    one = model("rotary_1d")
    rotary = one.positions[0].parts()[0]  # type: ignore[operator]
    assert isinstance(rotary, RotaryEmbedding)
    rotary.scaling = YaRN(4.0, 16)
    with pytest.raises(ValueError, match=r"that has RotaryEmbedding\(.*YaRN.*for positions\.0\.mechanisms\.0\. B"):
        one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_a_comparison(tmp_path: Path) -> None:
    one, other = model(), model()
    save_weights(tmp_path, one)
    load_run(tmp_path, other)
    assert same(one, other)
    with pytest.raises(ValueError, match="saved with scaling=YaRN"):
        load_run(tmp_path, other.grow(32, "yarn"))
    save_file(before(one.state_dict()), weights_of(tmp_path))
    with pytest.warns(UserWarning, match=SAID):
        load_run(tmp_path, model())
    with pytest.raises(ValueError, match=r"as the model has it"):
        load_run(tmp_path, model("alibi"))


def test_a_checkpoint_of_a_run() -> None:
    one, other = model(), model()
    snapshot = Snapshot({"model": dict(one.state_dict())}, {})
    restore_weights(other, snapshot)
    assert same(one, other)
    with pytest.raises(ValueError, match="saved with scaling=YaRN"):
        restore_weights(other.grow(32, "yarn"), snapshot)
    with pytest.warns(UserWarning, match=SAID):
        restore_weights(other, Snapshot({"model": before(dict(snapshot.tensors["model"]))}, {}))
    with pytest.raises(ValueError, match=r"the weights of the same model in the checkpoint"):
        restore_weights(model("none"), snapshot)
