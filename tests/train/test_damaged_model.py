"""A damaged model's folder: one line that names the file, the fault and the remedy, and nothing large is made."""

import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from damage import changed, cut_or_flipped, odd_files
from relpos.cli import main
from relpos.data import Text, find_task
from relpos.train import ImageRecipe, TextRecipe, load, save

ON_IMAGES = ImageRecipe(embed_dim=8, depth=1, num_heads=2)
ON_TEXT = TextRecipe(embed_dim=8, depth=1, num_heads=2)
POSITIONS = {"digits": "learned+relative_2d", "text": "learned+rotary_1d"}


@pytest.fixture(params=["digits", "text"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    task = find_task(request.param)
    recipe = ON_TEXT if isinstance(task, Text) else ON_IMAGES
    torch.manual_seed(0)
    position = POSITIONS[task.name]
    save(tmp_path / "m", recipe.build(task, position), task=task, position=position, recipe=recipe, about={"seed": 0})
    return tmp_path / "m"


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def told(folder: Path, same: dict[str, torch.Size] | None = None) -> str | None:
    """What `load` says of a damaged folder in one line with a remedy, or None where it loads, and the same model."""
    try:
        model, _ = load(folder)
    except ValueError as error:
        message = str(error)
    else:
        assert same is None or shapes(model) == same
        return None
    assert re.search(rf"^expected .*; got .*{re.escape(str(folder))}.*\. [^.]*[Tt]rain .*\.\Z", message), message
    assert len(message) < 1500, message
    return message


def refused(folder: Path, name: str) -> str:
    """The message, which names the file."""
    message = told(folder)
    assert message is not None
    assert str(folder / name) in message
    return message


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_configuration_with_anything_changed_builds_the_same_model_or_is_refused(folder: Path) -> None:
    path, whole = folder / "config.json", json.loads((folder / "config.json").read_text())
    before = shapes(load(folder)[0])
    needed = {name: whole[name] for name in ("kind", "position", "model")}
    trees = [*changed(needed), *({**whole, name: {"a": [1]}} for name in whole)]
    refusals = 0
    for tree in trees[::3]:
        path.write_text(json.dumps(tree))
        refusals += told(folder, before) is not None
    assert refusals > 40


@pytest.mark.usefixtures("unchecked")
def test_cut_and_flipped_files_are_refused_or_harmless(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        path = folder / name
        whole = path.read_bytes()
        start = whole[:1500] if name == "model.safetensors" else whole  # where its header is
        met = []
        for damaged in cut_or_flipped(start, 30):
            path.write_bytes(damaged + whole[len(start) :] if len(damaged) == len(start) else damaged)
            met.append(told(folder))
        assert sum(message is not None for message in met) > 30
        path.write_bytes(whole)


@pytest.mark.parametrize("number", [10**6, 10**12, 10**30])
@pytest.mark.usefixtures("unchecked")
def test_a_configuration_that_asks_for_the_moon_is_refused_before_it_is_built(folder: Path, number: int) -> None:
    whole = json.loads((folder / "config.json").read_text())
    started = time.process_time()
    for name, value in whole["model"].items():
        if not isinstance(value, int | float | list) or isinstance(value, bool) or name == "position_init_std":
            continue
        asked = [number] * len(value) if isinstance(value, list) else number
        edited(folder, lambda config, name=name, asked=asked: config["model"].update({name: asked}))
        assert told(folder), name
        (folder / "config.json").write_text(json.dumps(whole))
    assert time.process_time() - started < 20


def test_the_files_are_regular_and_of_a_size(folder: Path) -> None:
    path = folder / "config.json"
    for says in odd_files(path):
        if path.is_file():
            assert re.search(says, refused(folder, "config.json"))
        else:
            with pytest.raises(ValueError, match=r"expected a folder with model\.safetensors and config\.json; got"):
                load(folder)


@pytest.mark.parametrize("length", [0, 10, 10**6, 2**40, 2**64 - 1])
def test_a_header_of_any_length_is_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "relpos train" in refused(folder, "model.safetensors")


def test_weights_of_another_model_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    first, *_ = weights
    bias = next(name for name, tensor in weights.items() if tensor.dim() == 1)
    cases = [
        ({name: tensor for name, tensor in weights.items() if name != first}, rf"lacks {re.escape(first)}"),
        ({**weights, "more": torch.zeros(1)}, r"has more\b"),
        ({**weights, bias: torch.zeros(3)}, rf"{re.escape(bias)} of shape \[3\], not \[\d+\]"),
        ({**weights, bias: weights[bias].long()}, rf"{re.escape(bias)} in I64"),
        ({bias: weights[bias], "a": weights[bias] + 1, "b": weights[bias] + 2}, r"lacks .* and \d+ more"),
    ]
    for changed_weights, says in cases:
        save_file(changed_weights, path)
        assert re.search(says, refused(folder, "model.safetensors")), says
    save_file({}, path)
    assert told(folder)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, path)
    load(folder)


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `relpos show` says of a folder that it refuses, in one line."""
    with pytest.raises(SystemExit) as caught:
        main(["show", "--weights", str(folder), "--out", str(folder / "x.png")])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "position", "asked"),
    [("text", "alibi", {"context": 10**9}), ("digits", "alibi_axes", {"img_size": [200_000, 200_000]})],
)
def test_show_draws_no_model_of_any_size(
    name: str, position: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, recipe = find_task(name), ON_TEXT if name == "text" else ON_IMAGES
    save(tmp_path, recipe.build(task, position), task=task, position=position, recipe=recipe, about={})
    edited(tmp_path, lambda config: config["model"].update(asked))  # no weight nor setting has its size
    said = r"at most 65,536 tokens in a picture; got 1.*000 in .*\. Draw one with fewer"
    assert re.search(said, shown(tmp_path, capsys))


@pytest.mark.parametrize("changes", [{"recipe": [1]}, {"recipe": {"steps": "$x"}}, {"task": ["$"]}, {"seed": "$a$"}])
def test_show_names_the_configuration(
    folder: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edited(folder, lambda config: config.update(changes))
    assert f"{folder / 'config.json'} (" in shown(folder, capsys)
