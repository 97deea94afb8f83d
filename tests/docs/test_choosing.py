"""docs/guides/choosing.md: every figure of its tables is one that was measured, in the page or file that it cites."""

import json
import re
from pathlib import Path

from relpos.position import presets

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"^\|.*\n\|[-|]+\|\n(?:\|.*\n)+", flags=re.MULTILINE)
GUIDE = (ROOT / "docs" / "guides" / "choosing.md").read_text("utf-8")
LAYERS = json.loads((ROOT / "benchmarks" / "results" / "mechanisms-cpu.json").read_text("utf-8"))["layers"]
DEARER = ("carope", "selective_rope", "pope", "rerope", "self_extend", "dual_chunk")
"""Rotations that are made from hidden states, make queries and keys wider, or are several."""


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, the row of its heads first."""
    found = ([line.strip("|").split("|") for line in one[0].splitlines()] for one in TABLE.finditer(text))
    return [[[cell.strip() for cell in row] for at, row in enumerate(table) if at != 1] for table in found]


def measured(page: str, columns: list[str]) -> dict[str, list[str]]:
    """By mechanism, the figures of a page in docs, of its first table that has them, without intervals and rules."""
    found: dict[str, list[str]] = {}
    for heads, *rows in tables((ROOT / "docs" / page).read_text("utf-8")):
        if set(columns) <= set(heads):
            places = [heads.index(column) for column in columns]
            for row in rows:
                found.setdefault(row[0], [row[place].split(" ")[0] for place in places])
    return found


def test_text_and_digits_are_those_of_their_pages() -> None:
    text, digits, _ = tables(GUIDE)
    wanted = measured("results-text.md", ["256, trained", "2,048", "position parameters"])
    for name, *cells in text[1:]:
        assert [cell.split(";")[0] for cell in cells] == wanted[name], name
    wanted = measured("results-digits.md", ["test", "+3 px", "24 x 24, anywhere", "position parameters"])
    for name, *cells in digits[1:]:
        assert cells == wanted[name], name


def test_costs_are_those_of_the_benchmark() -> None:
    *_, costs = tables(GUIDE)
    assert len(costs) == 6
    rotations = [one.name for one in presets().values() if one.family == "rotation" and one.name not in DEARER]
    for what, *cells in costs[1:]:
        names = rotations if what == "rotations by position" else re.findall(r"`(\w+)`", what)
        for where, cell in zip(("sequence of 1,024", "grid of 32 x 32"), cells, strict=True):
            times = [f"{LAYERS[name][where]['time']:.2f}" for name in names if where in LAYERS[name]]
            said = re.findall(r"[\d.]+", cell)
            assert said == (times if len(times) < 3 else [min(times), max(times)]), (what, where)


def test_photographs_are_those_of_their_page() -> None:
    page = measured("results-timm.md", ["test", "+3 px"])
    said = re.search(r"\*\*It does not all carry over\.\*\*.*?\n\n", GUIDE, flags=re.DOTALL)
    assert said is not None
    unsaid = ("`relative_2d`", "`none`")  # when moved
    wanted = [x for name, row in page.items() if name != "`alibi`" for x in (row[:1] if name in unsaid else row)]
    assert sorted(re.findall(r"([\d.]+)%", said[0])) == sorted(wanted)
