"""`relpos show`: every position is drawn, what is asked for is drawn, and what a model learned."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import relpos
import relpos.report.drawing.mechanism_picture as drawing
from html_tags import Tags
from relpos.cli import main
from relpos.position import presets
from relpos.report.drawing.trained_examples import trained as example
from relpos.train import load

FAST_SHARE = 6  # of its tests, in the fast part

Captured = pytest.CaptureFixture[str]
Refused = Callable[..., str]


def said(svg: Path) -> str:
    """The words of a picture."""
    return re.sub(r"<[^>]+>\s*", "", " ".join(svg.read_text(encoding="utf-8").split()))


@pytest.mark.parametrize("name", list(presets()))
def test_every_position_is_laid_out(name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of each; saving, which is most of the time, is matplotlib's."""
    figures = []
    monkeypatch.setattr(drawing, "save_picture", lambda figure, path: figures.append(figure))
    main(["show", name, "--heads", "1"])
    where = "a sequence of 16 tokens" if 1 in presets()[name].token_axes else "a grid of 8 x 8"
    assert capsys.readouterr().out == f"Drew {name}, {where}: show-{name}.png\n"
    (figure,) = figures
    wide, high = figure.get_size_inches() * drawing.DOTS_PER_INCH
    assert 900 <= wide <= 2200
    assert 400 <= high <= 2600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "where"),
    [
        ("learned --grid 3x4 --query 5", "learned, a grid of 3 x 4, query (1, 1)"),
        ("learned+relative_2d --grid 2X3 --heads 1 --head-dim 4", "learned+relative_2d, a grid of 2 x 3"),
        ("learned --length 1", "learned, a sequence of 1 token"),
        ("relative_2d --grid 1x1", "relative_2d, a grid of 1 x 1"),
        ("rotary_1d --length 40 --query 39 --head-dim 7", "rotary_1d, a sequence of 40 tokens, query 39"),
    ],
)
def test_what_is_asked_for_is_drawn(typed: str, where: str, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "x.png"
    main(["show", *typed.split(), "--out", str(out)])
    assert capsys.readouterr().out == f"Drew {where}: {out}\n"
    with Image.open(out) as picture:
        assert 900 <= picture.width <= 2200


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("b.pdf", b"%PDF"), ("c.PNG", b"\x89PNG")])
def test_other_endings(name: str, begins: bytes, tmp_path: Path) -> None:
    main(["show", "alibi", "--length", "4", "--heads", "1", "--out", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("relative_1d --heads 1 --seed 3", ["Before training: what starts at random (std 0.02, seed 3)"]),
        ("alibi --heads 1 --seed 3", ["It has no learned parameters"]),
        (
            "t5",
            [
                "Above: initial values (random, std 0.1). Below: an example trained on English text",
                "T5Bias before training: bias",
                "T5Bias after training: bias",
            ],
        ),
    ],
)
def test_the_picture_says_what_is_learned(typed: str, words: list[str], tmp_path: Path) -> None:
    main(["show", *typed.split(), "--length", "4", "--out", str(tmp_path / "x.svg")])
    text = said(tmp_path / "x.svg")
    assert all(one in text for one in words), text
    assert ("Untrained" in text) == ("Untrained" in words[0])


@pytest.mark.slow
def test_the_seed_decides_and_repeats(tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        typed = ["show", "relative_1d", "--length", "4", "--heads", "1", "--seed", seed]
        main([*typed, "--out", str(tmp_path / f"{name}.png")])
    first, same, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == same != other


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused("show alibi --out x.png")
    assert re.search(r"this needs matplotlib; install it with: pip install 'relpos\[.*report.*\]'", line), line


def test_a_second_picture_without_a_name_gets_a_number(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing, "save_picture", lambda figure, path: path.touch())
    for _ in range(3):
        main(["show", "none", "--length", "4"])
    names = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["show-none.png", "show-none-2.png", "show-none-3.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_the_explorer_has_every_position_and_example_and_begins_with_the_one_asked_for(
    tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "explorer.html"
    main(["show", "t5+rotary_1d", "--page", str(out)])
    assert capsys.readouterr().out == f"Wrote an explorer of {len(presets()) + 1} positions: {out}\n"
    page = out.read_text(encoding="utf-8")
    assert '<option value="t5+rotary_1d" selected>' in page
    head, _, data = page.partition('id="data">')
    assert "http" not in re.sub(r"https?://www\.w3\.org/[\w/]+", "", head)
    entries = {entry["name"]: entry for entry in json.loads(data.partition("</script>")[0])}
    for name in presets():
        for tokens, axes in (("sequence", 1), ("grid", 2)):
            if example(name, axes=axes) is not None:
                kept = entries[name][tokens]["trained"]
                assert kept.get("offsets") or kept["pairs"]
                assert kept != entries[name][tokens]["start"]


# Of a trained model


@pytest.mark.slow
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_what_a_trained_model_learned(
    file: str, trained: tuple[Path, str], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}

    def picture(title: str, note: str, strips: list[Any]) -> None:
        drawn.update(title=title, note=note, strips={strip.title: strip for strip in strips})

    monkeypatch.setattr(drawing, "picture", picture)
    monkeypatch.setattr(drawing, "save_picture", lambda figure, path: path.touch())
    monkeypatch.chdir(tmp_path)
    folder, _ = trained
    main(["show", "--weights", str(folder / file)])
    assert capsys.readouterr().out == "Drew mine, a grid of 8 x 8: show-mine.png\n"
    assert (tmp_path / "show-mine.png").exists()
    assert drawn["title"] == "What learned+relative_2d learned"
    assert "Trained for 3 steps on digits, seed 5" in drawn["note"]
    assert "Untrained" not in drawn["note"]
    (table,) = (x for name, x in load(folder)[0].state_dict().items() if name.endswith("bias_table"))
    (vectors,) = (x for name, x in load(folder)[0].state_dict().items() if name.endswith("pos_embed"))
    bias = drawn["strips"]["RelativePositionBias in all layers: bias of each head over offsets"]
    np.testing.assert_allclose(bias.values, table.T.reshape(4, 15, 15).double().numpy())
    added = drawn["strips"]["LearnedPositionEmbedding: the vector added to each token"]
    np.testing.assert_allclose(added.values, vectors.double().numpy())


def test_a_page_of_a_trained_model(trained: tuple[Path, str], tmp_path: Path) -> None:
    main(["show", "--weights", str(trained[0]), "--out", str(tmp_path / "x.html")])
    assert "relative_position_bias_table" in (tmp_path / "x.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{"), ("config.json", "{}"), ("model.safetensors", "not weights at all")]
)
def test_a_broken_model_is_named(
    name: str, content: str, trained: tuple[Path, str], tmp_path: Path, refused: Refused
) -> None:
    broken = shutil.copytree(trained[0], tmp_path / "broken")
    (broken / name).write_text(content)
    line = refused(["show", "--weights", str(broken), "--out", str(tmp_path / "x.png")])
    assert re.search(r"expected (a |weights ).*; got .*(relpos train --out DIR|train a new model)", line), line
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_of_windows_is_drawn_as_a_page(
    version: Any, tmp_path: Path, capsys: Captured, refused: Refused
) -> None:
    """Its tables; what a network says stands in no parameter."""
    model = relpos.SwinTransformer(8, 2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=2, version=version)
    model.save_pretrained(tmp_path / "swin")
    typed = ["show", "--weights", str(tmp_path / "swin"), "--out", str(tmp_path / "x.html")]
    if version == 2:
        assert "expected weights with a learned position" in refused(typed)
        return
    main(typed)
    assert "Drew 2 parameters of swin" in capsys.readouterr().out
    assert "relative_position_bias_table" in (tmp_path / "x.html").read_text()


# Of weights of others

NAMES = [f"encoder.block.{n}.layer.0.SelfAttention.relative_attention_bias.weight" for n in (0, 2, 10)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as transformers writes it; its values are those of bfloat16."""
    (tmp_path / "model").mkdir()
    tensors = {name: torch.randn(32, 3).bfloat16().float() for name in NAMES}
    save_file({"shared.weight": torch.zeros(9, 4), **tensors}, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text('{"model_type": "t5", "relative_attention_max_distance": 40}')
    return tmp_path / "model"


def test_a_page_of_a_folder(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    main(["show", "--weights", "model"])
    assert capsys.readouterr().out == "Drew 3 parameters of model: show-model.html\n"
    text = (folder.parent / "show-model.html").read_text("utf-8")
    page = Tags(text)
    assert all(x.startswith(("#", "data:")) for x in page.addresses), "it needs no network"
    assert {x[1:] for x in page.addresses if x.startswith("#")} <= set(page.ids)
    places = [text.index(f"<code>{name}</code></h2>") for name in NAMES]
    assert all(before < after for before, after in combinations(places, 2)), "2 before 10"
    assert text.count("<svg") == 3
    assert "\N{MINUS SIGN}40 to +40" in text
    assert all(f"head {head}" in text for head in range(3))
    assert "shared.weight" not in text


@pytest.mark.slow
def test_shards_are_one_model(folder: Path, tmp_path: Path) -> None:
    main(["show", "--weights", str(folder), "--out", str(tmp_path / "whole.html")])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{n}.safetensors" for n, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name].bfloat16()}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    main(["show", "--weights", str(folder), "--out", str(tmp_path / "shards.html")])
    main(["show", "--weights", str(index), "--out", str(tmp_path / "index.html")])
    whole, shards, by_index = ((tmp_path / f"{name}.html").read_text("utf-8") for name in ("whole", "shards", "index"))
    assert whole == shards
    assert by_index.count("<svg") == whole.count("<svg")
