"""The atlas: a page a mechanism, an index that sorts and filters, and the explorer, all generated.

What a page says comes from the code (description, formula, class, rules of growth), from what was measured
(benchmarks/results/mechanisms-cpu.json, docs/results-*.md, docs/parity.md) and from website/atlas.toml (who uses it,
relatives, what is easy to get wrong).
"""

from __future__ import annotations

import html
import inspect
import json
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from atlas_index import axes_in_words, file_of, index, link
from latex2mathml.converter import convert

import relpos
from relpos import Grid, Sequence
from relpos.position import Mechanism, Preset, Site, presets
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.wrapped import parts_of
from relpos.position.rotary import RULES
from relpos.report.drawing.canvas import to_svg
from relpos.report.drawing.explorer_data import FAMILIES, LONGER, began, explored
from relpos.report.drawing.mechanism_data import View, strips
from relpos.report.drawing.mechanism_picture import Bars, Maps, Strip, Words, alone
from relpos.report.drawing.palette import stylesheet
from relpos.report.drawing.trained_examples import TRAINED_ON, start, trained
from relpos.report.explorer import explorer_page, explorer_parts

ROOT = Path(__file__).parent.parent
NOTES = ROOT / "website" / "atlas.toml"
COSTS = ROOT / "benchmarks" / "results" / "mechanisms-cpu.json"
MEASURED = {
    "results-digits.md": (
        "Handwritten digits, accuracy in %",
        ("five models of each", "two models of each"),
        "95% intervals over test images and models",
        ["test", "+1 px", "+2 px", "+3 px", "24 x 24, anywhere"],
    ),
    "results-text.md": (
        "Text, bits per byte (lower is better), causal",
        ("three models of each", "two models of each", "two models of each", "three models of each"),
        "trained on 256 bytes at a time; 95% intervals over text and models",
        ["256, trained", "512", "1,024", "2,048"],
    ),
}
"""Pages of docs/ with tables of what a mechanism reached: title, how many models those of each table are means of, a
note, and the columns that are shown."""
SYMBOLS = (
    "<i>s</i>: the score of query <i>i</i> and key <i>j</i> in head <i>h</i> of <i>H</i>, <i>D</i> wide; "
    "<i>x</i>: tokens, <i>E</i> wide; <i>r</i>, <i>c</i>: row and column; "
    "<i>p</i>: one of <i>P</i> pairs of dimensions."
)
"""The legend of all formulas."""
HEADS, HEAD_DIM = 4, 16
LINE = 70
"""Letters of a line of code that a page shows whole."""
KINDS = {
    "none": "none",
    "absolute": "absolute",
    "bias": "bias",
    "rotation": "rotation",
    "vectors": "vectors",
    "sum": "sum",
}


@dataclass(frozen=True)
class _Facts:
    """What the pages are made from."""

    notes: dict[str, dict[str, Any]]
    costs: dict[str, dict[str, dict[str, float]]]
    measured: dict[str, list[dict[str, dict[str, str]]]]
    parity: dict[str, list[list[str]]]


def write_atlas(pages: Path) -> None:
    """Write the atlas and the explorer into the folder of the site's pages."""
    known = presets()
    facts = _Facts(
        notes=tomllib.loads(NOTES.read_text(encoding="utf-8")),
        costs=json.loads(COSTS.read_text(encoding="utf-8"))["layers"],
        measured={page: _tables_of(ROOT / "docs" / page, columns) for page, (*_, columns) in MEASURED.items()},
        parity=_parity(),
    )
    if missing := known.keys() ^ facts.notes.keys():
        raise SystemExit(f"{NOTES.name} and the mechanisms differ: {', '.join(sorted(missing))}")
    if missing := known.keys() - facts.costs.keys():
        raise SystemExit(f"{COSTS.name} lacks {', '.join(sorted(missing))}: run benchmarks/mechanisms.py")
    compared = {name for tables in facts.measured.values() for table in tables for name in table}
    if missing := known.keys() - compared:
        raise SystemExit(f"no comparison has {', '.join(sorted(missing))}: see recipes/more_mechanisms.py")
    folder = pages / "atlas"
    folder.mkdir()
    for preset in known.values():
        (folder / file_of(preset.name)).write_text(_page(preset, facts, known), encoding="utf-8")
    entries = explored_all(known)
    behaviour = {
        page: {name: row for table in reversed(tables) for name, row in table.items()}
        for page, tables in facts.measured.items()
    }
    text = index({one["name"]: one for one in entries}, known, facts.costs, behaviour)
    (folder / "index.md").write_text(text, encoding="utf-8")
    (pages / "explorer-page.html").write_text(explorer_page(entries, version=relpos.__version__), encoding="utf-8")
    body, script, sheet = explorer_parts(entries)
    (pages / "explorer.md").write_text(EXPLORER.format(body=body), encoding="utf-8")
    (pages / "assets" / "explorer.js").write_text(script, encoding="utf-8")
    with (pages / "assets" / "site.css").open("a", encoding="utf-8") as style:
        style.write(sheet + stylesheet('[data-md-color-scheme="default"]', '[data-md-color-scheme="slate"]'))


def explored_all(known: dict[str, Preset]) -> list[dict[str, Any]]:
    """The explorer's data of every mechanism, a well-known one first."""
    first = "rotary_1d"
    ordered = [known[first], *(one for name, one in known.items() if name != first)]
    return [explored(preset, partial(trained, preset.name)) for preset in ordered]


EXPLORER = """---
hide: [navigation, toc]
---

# Explorer

<div class="explorer">{body}</div>

`relpos show --page explorer.html` writes it as one file ([this one](explorer-page.html)).

<script src="assets/explorer.js"></script>
"""


def _site(tokens: Sequence | Grid, heads: int = HEADS) -> Site:
    return Site(num_heads=heads, head_dim=HEAD_DIM, embed_dim=heads * HEAD_DIM, queries=tokens)


def _tokens(preset: Preset) -> Sequence | Grid:
    """Where a page shows it: on images if it is made for them."""
    return Sequence(16) if 1 in preset.token_axes else Grid(8, 8)


def _made(preset: Preset) -> Mechanism:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return preset.make(_site(_tokens(preset)))


def _page(preset: Preset, facts: _Facts, known: dict[str, Preset]) -> str:
    notes = facts.notes[preset.name]
    mechanism = _made(preset)
    parts = [
        f"# {preset.title}",
        f"`{preset.name}`: {preset.summary}",
        _table(
            {
                "other names": ", ".join(f"<code>{alias}</code>" for alias in preset.aliases) or "none",
                "kind": FAMILIES[preset.family].lower(),
                "on": axes_in_words(preset),
                "source": html.escape(preset.source, quote=False),
                "used by": notes["used_by"] or "no published model that we know of",
                "at other lengths and sizes": _growth(mechanism),
                "relatives": ", ".join(link(name) for name in notes["relatives"]),
            }
        ),
        "## In code",
        code_of(preset),
        "## What it looks like",
        _pictures(preset),
        f'<a href="../explorer.html#name={preset.name.replace("+", "%2B")}">Play with it in the explorer</a>.',
        "## How it works",
        _in_mathematics(preset, facts.notes),
        *_formulas(mechanism),
        "## What it costs",
        _cost(preset, facts.costs[preset.name]),
        *_behaviour(preset, facts.measured),
        "## What is easy to get wrong",
        "\n".join(f"- {one}" for one in notes["pitfalls"]),
        *_held_against(preset, facts.parity),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: dict[str, str]) -> str:
    body = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows.items())
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _growth(mechanism: Mechanism) -> str:
    rules = list(mechanism.growth)
    return (
        "defined anywhere, as it is"
        if rules == [AS_IS]
        else f"{rules[0]}" + (f"; on request {', '.join(rules[1:])}" if len(rules) > 1 else "")
    )


def code_of(preset: Preset) -> str:
    """How a mechanism is made, by its name and by its constructor."""
    tokens = _tokens(preset)
    where = f"relpos.Grid{tokens.sizes}" if isinstance(tokens, Grid) else f"relpos.Sequence({tokens.count})"
    same = re.sub(r"\b([A-Z]\w*)\(", r"relpos.\1(", repr(_made(preset)))
    broken = same.replace(" + ", "\n    + ")
    if broken == same and len(same) > LINE:
        broken = re.sub(r"^(\S+?\()(.*)\)$", r"\1\n        \2\n    )", same)
    lines = [
        "import relpos",
        "",
        f"tokens = {where}",
        "position = relpos.create_position(",
        f'    "{preset.name}", num_heads={HEADS}, head_dim={HEAD_DIM}, queries=tokens',
        ")",
        "",
        "# the same by its constructor",
        f"position = {same}" if broken == same else f"position = (\n    {broken}\n)",
    ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _pictures(preset: Preset) -> str:
    tokens = _tokens(preset)
    view = View(tokens, HEADS, HEAD_DIM, HEADS * HEAD_DIM)
    axes = len(tokens.sizes) if isinstance(tokens, Grid) else 1
    if (learned := trained(preset.name, axes=axes)) is not None:
        on = TRAINED_ON[axes]
        later = " Later keys were masked in training: their values mean nothing." if axes == 1 else ""
        return "\n\n".join(
            [
                f"Trained for a short while on {on} (one small model: an example and no finding).{later}",
                _figures(preset, strips(list(learned.parts()), view), "trained"),
                "The same before training, where what is learned is random:",
                _figures(preset, strips(list(start(preset.name, axes).parts()), view), "start"),
            ]
        )
    if preset.family == "rotation" and axes == 1:  # some act beyond the length of their training alone
        view = View(Sequence(LONGER * tokens.count), HEADS, HEAD_DIM, HEADS * HEAD_DIM)
        said = f"As it is at {view.tokens.count} tokens after training on {tokens.count}:"
        return said + "\n\n" + _figures(preset, strips(list(began(preset, _site(view.tokens)).parts()), view), "start")
    return _figures(preset, strips(list(_made(preset).parts()), view), "start")


def _figures(preset: Preset, found: list[Strip], state: str) -> str:
    figures = []
    for number, strip in enumerate(found):
        if isinstance(strip, Words):
            figures.append(html.escape(strip.text, quote=False))
            continue
        name = f"{re.sub(r'[^a-z0-9]', '-', preset.name)}-{state}-{number}"
        caption = html.escape(strip.title, quote=False)
        kinds = {"": strip} if len(strip.values) <= ON_A_PHONE else {"wide": strip, "narrow": in_rows(strip)}
        drawings = "".join(_drawing(one, f"{name}{kind}", kind) for kind, one in kinds.items())
        figures.append(f'<figure class="drawing">{drawings}<figcaption>{caption}</figcaption></figure>')
    return "\n\n".join(figures)


ON_A_PHONE = 2
"""How many heads a narrow page has side by side."""


def in_rows(strip: Maps | Bars) -> Maps | Bars:
    """The strip with `ON_A_PHONE` panels in a row."""
    return replace(strip, across=ON_A_PHONE)


def _drawing(strip: Maps | Bars, name: str, kind: str) -> str:
    drawing = to_svg(alone(strip), name=name, title=strip.title)
    drawing = re.sub(r"\s*\n\s*", " ", drawing[drawing.index("<svg") :])
    return drawing.replace("<svg", f'<svg class="{kind}"', 1) if kind else drawing


def _in_mathematics(preset: Preset, notes: dict[str, dict[str, Any]]) -> str:
    """The formulas of all parts as MathML, which browsers set without a script."""
    whole = [latex for name in preset.name.split("+") for latex in notes[name]["formula"]]
    lines = [part for latex in whole for part in re.split(r"[,;] \\quad ", latex)]  # a phone is narrow
    return f'<div class="formulas">{"".join(convert(latex, display="block") for latex in lines)}<p>{SYMBOLS}</p></div>'


def _formulas(mechanism: Mechanism) -> list[str]:
    """What the heads of the files say, of each part once; their first sentence is a paragraph of its own."""
    modules = dict.fromkeys(type(part).__module__ for part in parts_of(mechanism))
    if any(
        getattr(part, "scaling", None) or getattr(part, "beyond", AS_IS) in RULES[1:] for part in parts_of(mechanism)
    ):
        modules["relpos.position.scaling"] = None
    texts = [inspect.getdoc(sys.modules[name]) or "" for name in modules]
    return [_as_markdown(text) for text in texts]


def _as_markdown(text: str) -> str:
    """A docstring as Markdown: indented blocks are fenced, so that none is taken for a list."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if all(line.startswith("    ") for line in block.splitlines()):
            blocks.append("```text\n" + textwrap.dedent(block) + "\n```")
        else:
            blocks.append(
                re.sub(r"(?<!`)\b(\w+)\[(\w[\w, ]*)\]", r"`\1[\2]`", block.replace("*", "\\*").replace("<", "&lt;"))
            )
    return "\n\n".join(blocks)


def _cost(preset: Preset, layers: dict[str, dict[str, float]]) -> str:
    rows = [
        f"| {where} | {one['parameters']:,} | {one['time']:.2f} ({one['low']:.2f} to {one['high']:.2f}) |"
        for where, one in layers.items()
    ]
    return "\n".join(
        [
            "| tokens | position parameters | time of a layer beside none |",
            "|---|---|---|",
            *rows,
            "",
            "*One layer of attention with its projections, forward and backward, 8 heads of 64, on a CPU with "
            "2 threads: median and quartiles (`benchmarks/mechanisms.py`).*",
        ]
    )


def _behaviour(preset: Preset, measured: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    found = ["## What it does, as measured here"]
    for page, (title, models, note, columns) in MEASURED.items():
        for number, (table, count) in enumerate(zip(measured[page], models, strict=True)):
            if preset.name not in table or any(preset.name in earlier for earlier in measured[page][:number]):
                continue
            lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            lines += [
                f"| `{name}` | {' | '.join(table[name][column] for column in columns)} |"
                for name in dict.fromkeys([preset.name, "none"])
            ]
            found += ["\n".join(lines), f"*[The whole table](../{page}): {count}; {note}.*"]
    return found


def _tables_of(path: Path, columns: list[str]) -> list[dict[str, dict[str, str]]]:
    """The tables of a page that have these columns: by the name in the first column, then by the head of a column."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        if set(columns) <= set(heads):
            tables.append({cells[0].strip("`"): dict(zip(heads, cells, strict=True)) for cells in rows})
    return tables


def _parity() -> dict[str, list[list[str]]]:
    """The rows of docs/parity.md by mechanism."""
    found: dict[str, list[list[str]]] = {}
    for line in (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) >= 6:
            found.setdefault(cells[0].partition(" (")[0], []).append(cells)
    return found


def _held_against(preset: Preset, parity: dict[str, list[list[str]]]) -> list[str]:
    rows = parity.get(preset.name, [])
    if not rows:
        return []
    lines = ["| what | held against | output, float64 | gradients, float64 |", "|---|---|---|---|"]
    lines += [f"| {row[0]} | {row[1]} | {row[2]} | {row[3]} |" for row in rows]
    text = "Largest relative differences; [how they are measured](../parity.md)."
    return ["## Parity", "\n".join(lines), text]
