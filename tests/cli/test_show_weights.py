"""`relpos show --weights PATH` on weights of others: one page without a network; wrong uses are one line and code 2."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from relpos.cli import main

Captured = pytest.CaptureFixture[str]
NAMES = [f"encoder.block.{n}.layer.0.SelfAttention.relative_attention_bias.weight" for n in (0, 2, 10)]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(32, 3, generator=generator) for name in NAMES}
    return {"shared.weight": torch.zeros(9, 4), **found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as transformers writes it."""
    (tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text('{"model_type": "t5", "relative_attention_max_distance": 40}')
    return tmp_path / "model"


class Tags(HTMLParser):
    """What a page refers to, and that its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [x or "" for name, x in attrs if name in ("href", "src", "xlink:href")]
        self.ids += [x or "" for name, x in attrs if name == "id"]
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_of_a_folder(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    main(["show", "--weights", "model"])
    assert capsys.readouterr().out == "Drew 3 parameters of model: show-model.html\n"
    text = (folder.parent / "show-model.html").read_text("utf-8")
    page = Tags(text)
    assert not page.open
    assert all(x.startswith(("#", "data:")) for x in page.addresses), "it needs no network"
    assert {x[1:] for x in page.addresses if x.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert [text.index(f"<code>{name}</code></h2>") for name in NAMES] == sorted(
        text.index(f"<code>{name}</code></h2>") for name in NAMES
    )
    assert text.count("<svg") == 3
    assert "\N{MINUS SIGN}40 to +40" in text
    assert all(f"head {head}" in text for head in range(3))
    assert "shared.weight" not in text


@pytest.mark.slow
def test_shards_are_one_model(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    shards = tmp_path / "other" / "model"
    shards.mkdir(parents=True)
    tensors = weights()
    files = {name: f"model-{n}.safetensors" for n, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name].bfloat16() if "bias" in name else tensors[name]}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (shards / "config.json").write_text((folder / "config.json").read_text())
    main(["show", "--weights", str(shards), "--out", str(tmp_path / "a.html")])
    main(["show", "--weights", str(shards / "model.safetensors.index.json"), "--out", str(tmp_path / "b.html")])
    rounded = {name: x.bfloat16().float() for name, x in tensors.items()}
    save_file(rounded, folder / "model.safetensors")
    main(["show", "--weights", str(folder), "--out", str(tmp_path / "c.html")])
    a, b, c = ((tmp_path / f"{name}.html").read_text("utf-8") for name in "abc")
    assert a == c
    assert b.count("<svg") == a.count("<svg")


@pytest.mark.slow
def test_a_model_that_relpos_trained(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "run"
    main(["train", "--position", "relative_2d", "--steps", "1", "--out", str(out)])
    main(["show", "--weights", str(out), "--out", str(tmp_path / "x.html")])
    assert "relative_position_bias_table" in (tmp_path / "x.html").read_text("utf-8")
    main(["show", "--weights", str(out), "--out", str(tmp_path / "x.png")])
    assert "Drew run, a grid of" in capsys.readouterr().out


USER_ERRORS = [
    ("model --heads 3", r"expected --weights alone; got --weights and --heads\. .*leave --heads out"),
    ("model --query 3", r"got --weights and --query\. The page has every head and offset"),
    ("model --out x.png", r"expected --out to end in \.html; got x\.png\. Write for example --out x\.html"),
    ("model --out no/x.html", r"expected --out in a folder that exists"),
    ("model --out there.html", r"expected a file that does not exist yet; got there\.html"),
    ("no.safetensors", r"got no\.safetensors, which does not exist"),
    ("no --out x.html", r"expected a folder or a \.safetensors file; got no, which does not exist"),
    ("text.txt --out x.html", r"expected a folder or a \.safetensors file; got the file text\.txt"),
    ("broken.safetensors", r"expected safetensors that can be read; got broken\.safetensors \("),
    ("empty --out x.html", r"one index of shards; got 0 of them in empty\. Name the file"),
    ("two", r"one index of shards; got 2 of them in two\. Name the file"),
    ("plain.safetensors", r"a learned position \(relative_attention_bias, .*of whose 1 names none is one"),
    ("odd.safetensors", r"odd\.safetensors, whose a\.rel_pos_h cannot be drawn: it has 4 rows, an even number"),
    ("away", r"an index of shards; got .* \(its shard '\.\./model/model\.safetensors' is not beside it\)"),
    ("unmapped", r"an index of shards; got .* \(it has no weight_map from names to files\)"),
    ("torn", r"an index of shards; got .* \(it is no JSON that can be read"),
]


@pytest.mark.parametrize(("typed", "message"), USER_ERRORS)
def test_a_users_error_is_one_line(
    typed: str, message: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folder.parent
    monkeypatch.chdir(here)
    (here / "text.txt").write_text("weights")
    (here / "there.html").write_text("mine")
    (here / "broken.safetensors").write_text("not weights at all")
    save_file({"a": torch.zeros(2)}, here / "plain.safetensors")
    save_file({"a.rel_pos_h": torch.zeros(4, 2)}, here / "odd.safetensors")
    (here / "empty").mkdir()
    for name, text in (
        ("two", None),
        ("away", '{"weight_map": {"a": "../model/model.safetensors"}}'),
        ("unmapped", '{"weight_map": {}}'),
        ("torn", "{"),
    ):
        (here / name).mkdir()
        for file in ("a", "b"):
            save_file({file: torch.zeros(2)}, here / name / f"{file}.safetensors")
        if text is not None:
            (here / name / "model.safetensors.index.json").write_text(text)
    before = sorted(here.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["show", "--weights", *typed.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    assert re.search(message, said), said
    assert sorted(here.rglob("*")) == before
