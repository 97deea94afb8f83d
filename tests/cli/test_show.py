"""`relpos show`: every position is drawn, what is asked for is drawn, and a wrong call is one line and exit code 2."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relpos
from relpos.cli import main
from relpos.position import presets

FAST_SHARE = 12  # of its tests, in the fast part

Captured = pytest.CaptureFixture[str]


def size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    wide, high = struct.unpack(">II", content[16:24])
    return wide, high


@pytest.mark.parametrize("name", list(presets()))
def test_every_position_is_drawn(name: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of each: most of the time is matplotlib's."""
    monkeypatch.chdir(tmp_path)
    main(["show", name, *([] if name == "relative_2d" else ["--heads", "1"])])
    where = "a sequence of 16 tokens" if 1 in presets()[name].token_axes else "a grid of 8 x 8"
    assert capsys.readouterr().out == f"Drew {name}, {where}: show-{name}.png\n"
    (path,) = tmp_path.iterdir()
    wide, high = size(path)
    assert 900 <= wide <= 2200
    assert 400 <= high <= 2600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "where"),
    [
        ("learned --grid 3x4 --query 5", "learned, a grid of 3 x 4, query (1, 1)"),
        ("learned+relative_2d --grid 2X3 --heads 1 --head-dim 4", "learned+relative_2d, a grid of 2 x 3"),
        ("alibi --length 1", "alibi, a sequence of 1 token"),
        ("learned --length 1", "learned, a sequence of 1 token"),
        ("relative_2d --grid 1x1", "relative_2d, a grid of 1 x 1"),
        ("rotary_1d --length 40 --query 39 --head-dim 7", "rotary_1d, a sequence of 40 tokens, query 39"),
    ],
)
def test_what_is_asked_for_is_drawn(typed: str, where: str, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "x.png"
    main(["show", *typed.split(), "--out", str(out)])
    assert capsys.readouterr().out == f"Drew {where}: {out}\n"
    assert size(out)[0] >= 900


@pytest.mark.slow
def test_other_endings(tmp_path: Path) -> None:
    for name, begins in (("a.svg", b"<?xml"), ("b.pdf", b"%PDF"), ("c.PNG", b"\x89PNG")):
        main(["show", "alibi", "--length", "4", "--heads", "1", "--out", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_the_picture_says_whether_anything_is_learned(tmp_path: Path) -> None:
    texts = {}
    for name in ("relative_1d", "alibi"):
        out = tmp_path / f"{name}.svg"
        main(["show", name, "--length", "4", "--heads", "1", "--seed", "3", "--out", str(out)])
        texts[name] = " ".join(out.read_text(encoding="utf-8").split())
    assert "Untrained: what is learned starts random (std 0.02, seed 3)" in re.sub(
        r"<[^>]+>\s*", "", texts["relative_1d"]
    )
    assert "Nothing is learned" in re.sub(r"<[^>]+>\s*", "", texts["alibi"])


@pytest.mark.slow
def test_the_seed_decides_and_repeats(tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main(["show", "relative_1d", "--length", "4", "--seed", seed, "--out", str(tmp_path / f"{name}.png")])
    first, same, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == same != other


USER_ERRORS: list[tuple[str, str]] = [
    ("", r"expected a position or --weights FILE; got neither\. Write relpos show relative_2d"),
    ("alibi --weights OUT", r"expected a position or --weights FILE; got 'alibi' and --weights"),
    ("relativ_2d", r"got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("none+lerned", r"got 'lerned'\. Did you mean 'learned'\?"),
    ("alibi --gird 8x8", r"unrecognized arguments: --gird 8x8\. Did you mean --grid\?"),
    ("relative_2d --length 16", r"expected --grid for relative_2d, .*; got --length 16\. Write --grid 8x8\."),
    ("alibi --length 16 --grid 4x4", r"expected one of --length and --grid; got --length 16 and --grid 4x4"),
    ("alibi --length 0", r"--length to be an integer of at least 1; got int 0"),
    ("alibi --length x", r"argument --length: expected a whole number; got 'x'"),
    ("alibi --length 5000", r"at most 4096 tokens in a picture; got 5000"),
    ("alibi --grid 8", r"expected --grid as rows x columns of at least 1; got '8'\. Write for example --grid 8x8"),
    ("alibi --grid 0x8", r"got '0x8'\. Write for example"),
    ("alibi --grid 8x8x8", r"got '8x8x8'\. Write for example"),
    ("alibi --grid 100x100", r"at most 4096 tokens in a picture; got 10000"),
    ("alibi --query 16", r"expected --query from 0 to 15; got 16\. Tokens are counted from 0"),
    ("alibi --query -1", r"expected --query from 0 to 15; got -1"),
    ("alibi --heads 0", r"--heads to be an integer of at least 1; got int 0"),
    ("alibi --seed -1", r"--seed to be an integer of at least 0; got int -1"),
    ("sinusoidal_1d --heads 1 --head-dim 5", r"a multiple of 2; got 5\. .*5 wide \(--head-dim\)"),
    ("rotary_2d --head-dim 3", r"head_dim to be an integer of at least 4; got int 3.*\(--head-dim\)"),
    ("alibi --out OUT", r"expected a file for --out; got the folder .*out\. Write for example"),
    ("alibi --out OUT/x.docx", r"expected --out to end in one of \.png, \.svg, \.pdf; got .*x\.docx"),
    ("alibi --out OUT/x", r"expected --out to end in one of .*got .*/x\. Write for example --out x\.png"),
    ("alibi --out OUT/no/x.png", r"expected --out in a folder that exists; got .*Make .*no first"),
    (
        "alibi --out OUT/mine.png",
        r"expected a file that does not exist yet; got .*mine\.png\. .*nothing is overwritten",
    ),
    ("--weights OUT", r"expected a folder with model\.safetensors and config\.json; got .*relpos train --out DIR"),
    ("--weights OUT/no", r"expected a model's folder or its weights for --weights; got .*no, which does not exist"),
    ("--weights OUT/mine.png", r"expected a model's folder or its model\.safetensors for --weights; got the file"),
    ("--weights OUT --heads 4", r"expected --weights alone; got --weights and --heads\. .*leave --heads out"),
    ("--weights OUT --head-dim 4", r"got --weights and --head-dim"),
]


@pytest.mark.parametrize(("typed", "says"), USER_ERRORS, ids=[typed or "nothing" for typed, _ in USER_ERRORS])
def test_a_wrong_call_is_one_line(
    typed: str, says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.png").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["show", *typed.replace("OUT", str(out)).split()])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("relpos: error: ")
    assert len(printed.err.splitlines()) == 1
    assert re.search(says, printed.err), printed.err
    assert [path.name for path in out.iterdir()] == ["mine.png"]
    assert (out / "mine.png").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        main(["show", "alibi", "--out", str(tmp_path / "x.png")])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert re.search(r"this needs matplotlib; install it with: pip install 'relpos\[.*report.*\]'", message), message


def test_what_learns_is_drawn_as_it_starts_and_trained(tmp_path: Path) -> None:
    out = tmp_path / "t5.svg"
    main(["show", "t5", "--length", "4", "--out", str(out)])
    text = re.sub(r"<[^>]+>\s*", "", " ".join(out.read_text(encoding="utf-8").split()))
    assert "Above as it starts (std 0.1, random), below trained on English text" in text
    assert "T5Bias as it starts: bias" in text
    assert "T5Bias trained: bias" in text
    assert "Untrained" not in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    typed = ["train", "--position", "learned+relative_2d", "--steps", "2", "--device", "cpu", "--out", str(folder)]
    main(typed)
    return folder


@pytest.mark.slow
def test_what_a_trained_model_learned(
    trained: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relpos.cli import show_verb
    from relpos.viz import strips as show

    drawn = {}

    def kept(title: str, note: str, strips: list[object]) -> object:
        drawn.update(title=title, note=note, strips=strips)
        return original(title, note, strips)  # type: ignore[arg-type]

    original = show.picture
    monkeypatch.setattr(show, "picture", kept)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main(["show", "--weights", str(trained)])
    assert capsys.readouterr().out == "Drew model, a grid of 8 x 8: show-model.png\n"
    assert size(tmp_path / "show-model.png")[0] >= 900
    assert drawn["title"] == "What learned+relative_2d learned"
    assert "Trained for 2 steps on digits, seed 0" in drawn["note"]
    assert "Untrained" not in drawn["note"]
    model, _ = relpos_load(trained)
    table = next(value for name, value in model.state_dict().items() if name.endswith("bias_table"))
    vectors = next(value for name, value in model.state_dict().items() if name.endswith("pos_embed"))
    by_title = {strip.title: strip for strip in drawn["strips"]}
    bias = by_title["RelativePositionBias in all layers: bias of each head over offsets"]
    np.testing.assert_allclose(bias.values, table.T.reshape(4, 15, 15).double().numpy())
    added = by_title["LearnedPositionEmbedding: the vector added to each token"]
    np.testing.assert_allclose(added.values, vectors.double().numpy())
    assert show_verb.HEADS == 4


def relpos_load(folder: Path) -> tuple[torch.nn.Module, dict[str, object]]:
    from relpos.train import load

    return load(folder)


def test_the_file_of_the_weights_will_do(trained: Path, tmp_path: Path) -> None:
    main(["show", "--weights", str(trained / "model.safetensors"), "--query", "27", "--out", str(tmp_path / "q.png")])
    assert size(tmp_path / "q.png")[0] >= 900


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{"), ("config.json", "{}"), ("model.safetensors", "not weights at all")]
)
def test_a_broken_model_is_named(name: str, content: str, trained: Path, tmp_path: Path, capsys: Captured) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in trained.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / name).write_text(content)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["show", "--weights", str(broken), "--out", str(tmp_path / "x.png")])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert re.search(r"expected (a |weights ).*; got .*(relpos train --out DIR|train a new model)", message), message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_of_windows_is_drawn_as_a_page(version: Any, tmp_path: Path, capsys: Captured) -> None:
    """Its tables; what a network says stands in no parameter."""
    model = relpos.SwinTransformer(8, 2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=2, version=version)
    model.save_pretrained(tmp_path / "swin")
    typed = ["show", "--weights", str(tmp_path / "swin"), "--out", str(tmp_path / "x.html")]
    if version == 1:
        main(typed)
        assert "Drew 2 parameters of swin" in capsys.readouterr().out
        assert "relative_position_bias_table" in (tmp_path / "x.html").read_text()
        return
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 2
    assert "expected weights with a learned position" in capsys.readouterr().err


def test_the_explorer_is_written_once_and_opens_where_asked(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "explorer.html"
    main(["show", "t5+rotary_1d", "--page", str(out)])
    assert capsys.readouterr().out == f"{len(presets()) + 1} positions to explore: {out}\n"
    page = out.read_text(encoding="utf-8")
    assert '<option value="t5+rotary_1d" selected>' in page
    assert "http" not in re.sub(r"https?://www\.w3\.org/[\w/]+", "", page.partition('id="data"')[0])
    for typed, message in (
        (["--page", str(out)], "expected a file that does not exist yet"),
        (["--page", str(tmp_path / "x.png")], "expected --page to end in .html"),
        (
            ["--page", str(tmp_path / "y.html"), "--grid", "8x8"],
            "expected --page alone, or with a position; got --page",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["show", *typed])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["explorer.html"]


def test_a_second_picture_without_a_name_gets_a_number(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        main(["show", "none", "--length", "4"])
    names = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["show-none.png", "show-none-2.png", "show-none-3.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
