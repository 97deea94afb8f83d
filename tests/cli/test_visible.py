"""Names of a person's own in what is printed: control, bidirectional and invisible characters are written out."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from odd_names import ODD, SEEN, assert_shown
from relpos.adapters.reporting import Left, OwnPosition, ReplacementReport, RetrofitReport
from relpos.cli import main
from relpos.cli.progress import say, say_list, watched
from relpos.comparison.display import Display
from relpos.comparison.workers import Event, WorkerTask
from relpos.core import checks
from relpos.files.writing import write_whole
from relpos.models.card import model_card
from relpos.models.loading import LoadReport
from relpos_command.parsing import fail
from relpos_command.visible import visible

Captured = pytest.CaptureFixture[str]
TECHNOLOGIST = "\U0001f469\u200d\U0001f4bb"
SCOTLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x00\x07\x7f\x80\x9b", r"\x00\x07\x7f\x80\x9b"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("r\u202etl \u2066x\u2069 \u200e\u200f\u061c", r"r\u202etl \u2066x\u2069 \u200e\u200f\u061c"),
        ("z\u200bw\ufeff\u2060\xad\u180e", r"z\u200bw\ufeff\u2060\xad\u180e"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("of no UTF-8: \udcff", r"of no UTF-8: \udcff"),
        ("a\u200db", r"a\u200db"),
        ("a\U000e0061", r"a\U000e0061"),
        *((text, text) for text in ("caf\xe9", "e\u0301", "\N{CJK UNIFIED IDEOGRAPH-732B}", "\u05d0\u05d1", "[red]x")),
        *((text, text) for text in (TECHNOLOGIST, SCOTLAND, "\u0645\u06cc\u200c\u062e", "\u0915\u094d\u200d\u0937")),
        ("a\xa0b\u3000c", "a\xa0b\u3000c"),
        (r"C:\x1b", r"C:\x1b"),
    ],
    ids=ascii,
)
def test_what_is_hidden_is_written_out_and_all_else_stays(text: str, seen: str) -> None:
    assert visible(text) == seen
    assert visible(seen) == seen
    assert visible(f"{text}\n", keep="\n") == f"{seen}\n" or "\n" in text


def on_terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=300, color_system=None), file


def test_lines_and_bars_show_a_name_as_it_is() -> None:
    console, file = on_terminal()
    say(console, f"Saved in {ODD}/")
    say_list(console, {ODD: [f"is {ODD}"]})
    assert file.getvalue() == f"Saved in {SEEN}/\n{SEEN}  is {SEEN}\n"
    console, file = on_terminal()
    task = WorkerTask("task", print, (), label=ODD)

    def run(tell: Any) -> None:
        tell(Event(task, "started"))
        tell(Event(task, "progress", ODD))

    watched(run, [task], console)
    assert f"{SEEN}: {SEEN}" in file.getvalue()
    assert_shown(file.getvalue().replace("\x1b[31m", ""))


def test_an_error_shows_a_name_as_it_is(capsys: Captured, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fail(f"expected a folder; got {ODD}", 2)
    assert capsys.readouterr().err == f"relpos: error: expected a folder; got {SEEN}\n"
    with pytest.raises(ValueError) as caught:
        checks.fail("a folder", ODD, f"Rename {ODD}.")
    assert str(caught.value) == f"expected a folder; got {SEEN}. Rename {SEEN}."
    with pytest.raises(OSError) as unwritten:
        write_whole(tmp_path / ODD / "file", "x")
    assert_shown(str(unwritten.value))


@pytest.mark.parametrize(
    "typed",
    [
        "compare --data ODD",
        "compare --model ODD.py:build",
        "compare --positions ODD",
        "train --position ODD",
        "train --data ODD",
        "show ODD",
        "show --weights ODD",
        "show none --out ODD/x.png",
        "list ODD",
        "check --engines ODD",
        "bench --cases ODD",
        "retrofit hf:ODD",
        "ODD",
        "show --ODD",
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_every_verb_says_a_wrong_name_as_it_is(typed: str, refused: Any) -> None:
    said = refused([word.replace("ODD", ODD) for word in typed.split()])
    assert visible(said) == said


def test_what_is_drawn_is_named_as_it_is(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, seen = ODD.replace("/", ""), SEEN.replace("/", "")
    (tmp_path / folder).mkdir()
    save_file({f"{folder}.rel_pos_h": torch.randn(3, 4)}, f"{folder}/model.safetensors")
    main(["show", "--weights", folder, "--out", f"{folder}/page.html"])
    assert capsys.readouterr().out == f"Drew 1 parameter of {seen}: {seen}/page.html\n"
    page = (tmp_path / folder / "page.html").read_text("utf-8")
    assert visible(page, keep="\n") == page
    assert f"<h1>Learned positions in {seen}</h1>" in page
    assert f"<code>{seen}.rel_pos_h</code>" in page


def test_lines_of_a_comparison_in_python(capsys: Captured) -> None:
    display = Display()
    display.say(ODD)
    with display.working([WorkerTask("task", print, (), label=ODD)]) as take:
        take(Event(WorkerTask("task", print, (), label=ODD), "finished", None))
    assert capsys.readouterr().out == f"{SEEN}\nDone: {SEEN} (1 of 1 done)\n"


def test_reports_and_cards_show_names_as_they_are() -> None:
    left = Left(f"layers.{ODD}", f"models.{ODD.replace('.', '')}", "its reason")
    assert_shown(str(RetrofitReport(ODD, {}, (), (left,), (), None)))
    assert_shown(str(ReplacementReport(ODD, "alibi", (OwnPosition(ODD, "a table"),), ("layer 1",), True, False)))
    assert_shown(str(LoadReport("LanguageModel", "relpos", {"a": (ODD,)}, {ODD: "not needed"}, 1)))
    assert_shown(model_card("LanguageModel", 1, {"position": ODD}, [], ODD))
