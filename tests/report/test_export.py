"""A comparison for a paper: figures that a printer takes, a table that LaTeX takes, numbers that are the measured."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from text_results import make_text

from relpos.cli import main
from relpos.report.export import CSV_COLUMNS, PLOTS, _escaped, figures_of, save_figure, to_csv, to_latex
from relpos.results import read
from relpos_command import requests

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(make: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    results = make(("none", "learned", "rotary_2d+relative_2d"), seeds=2, images=20)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def refused(typed: list[str], capsys: Captured) -> str:
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_pdf_embeds_truetype_and_a_file_of_another_width_has_it(run: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "cost.pdf"
    main(["report", str(run), "--figure", str(out), "--width", "83mm"])
    assert capsys.readouterr().out == f"Drew cost: {out}\n"
    data = out.read_bytes()
    assert b"/FontFile2" in data, "TrueType, embedded"
    assert b"/Type3" not in data
    (wide,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+)", data)
    assert float(wide) == pytest.approx(83 / 25.4 * 72, abs=0.01)


@pytest.mark.slow
def test_an_svg_needs_no_font_and_a_png_is_legible_in_print(run: Path, tmp_path: Path) -> None:
    main(["report", str(run), "--figure", str(tmp_path / "a.svg"), "--plot", "shift"])
    assert "<text" not in (tmp_path / "a.svg").read_text(encoding="utf-8")
    main(["report", str(run), "--figure", str(tmp_path / "a.png"), "--plot", "training"])
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width == round(3.25 * 300)
        edges = np.asarray(picture.convert("L"))[:, [0, -1]]
    assert (edges == 255).all(), "nothing is cut off"


def test_every_figure_has_a_name_and_the_command_says_them(make: Any) -> None:
    assert tuple(PLOTS) == requests.PLOTS
    assert set(figures_of(read(make()))) | set(figures_of(read(make_text()))) == set(PLOTS) - {"rotation"}


@pytest.mark.slow
def test_a_figure_is_replaced_only_when_asked(run: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "mine.pdf"
    out.write_text("mine")
    typed = ["report", str(run), "--figure", str(out)]
    assert "Choose another --figure; or add --overwrite." in refused(typed, capsys)
    assert out.read_text() == "mine"
    main([*typed, "--overwrite"])
    assert out.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--figure x.pdf --plot length", r"these results have far-cost, cost, shift, canvas, training\. Choose"),
        ("--figure x.jpg", r"expected --figure to end in one of \.pdf, \.svg, \.png; got x\.jpg"),
        ("--figure x.pdf --width 3", r"expected a number and in, cm, mm or pt for --width; got '3'"),
        ("--figure x.pdf --width 900in", r"expected a width from 2 to 20 inches; got 900"),
        ("--latex --csv", r"expected one of --figure, --latex and --csv; got --latex and --csv"),
        ("--plot cost", r"expected --plot with --figure; got no --figure"),
        ("--csv --overwrite", r"expected --overwrite with --figure; got no --figure"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    typed: str, says: str, run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(says, refused(["report", str(run), *typed.split()], capsys))
    assert not list(tmp_path.iterdir())


def test_the_table_is_latex(run: Path, capsys: Captured) -> None:
    main(["report", str(run), "--latex"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [r"\begin{tabular}{lrrrrrrrrrr}", r"\toprule"]
    assert r"rotary\_2d+relative\_2d & 900 & " in "\n".join(lines)
    assert all(line.count("&") == 10 for line in lines if "&" in line)
    assert _escaped("a_b%\\~\N{MINUS SIGN}") == r"a\_b\%\textbackslash{}\textasciitilde{}$-$"


def test_the_numbers_are_those_measured(run: Path, make: Any, capsys: Captured) -> None:
    main(["report", str(run), "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    results = make(("none", "learned", "rotary_2d+relative_2d"), seeds=2, images=20)
    assert tuple(rows[0]) == CSV_COLUMNS
    (found,) = [row for row in rows if (row["name"], row["probe"]) == ("learned", "shift/2")]
    shares = [
        np.mean(metric["correct"]) / metric["trials"]
        for record in results["records"]
        for metric in record["metrics"]
        if (record["position"], record["variant"], metric["probe"]) == ("learned", "recipe", "shift/2")
    ]
    assert float(found["value"]) == pytest.approx(np.mean(shares))
    assert (found["seeds"], found["measure"]) == ("2", "accuracy")
    steps = {row["tokens"]: float(row["value"]) for row in rows if (row["name"], row["measure"]) == ("none", "step_ms")}
    assert steps == {str(c["tokens"]): c["step_ms"]["median"] for c in results["costs"] if c["position"] == "none"}


def test_an_unfinished_comparison_has_no_figure_and_a_table(make: Any, tmp_path: Path) -> None:
    begun = {**make(), "records": [], "costs": []}
    with pytest.raises(ValueError, match="these results have none yet"):
        save_figure(begun, tmp_path / "x.pdf")
    assert to_latex(begun).count("\n") == 9
    assert to_csv(begun) == ",".join(CSV_COLUMNS)
