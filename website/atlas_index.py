"""The index of the atlas: every mechanism with a thumbnail, its kind, costs and figures, to sort and to filter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thumbnails import address

from relpos import Grid, Sequence
from relpos.position import Preset, Site
from relpos.report.drawing.explorer_data import FAMILIES

TIME = "\N{MULTIPLICATION SIGN} none's layer"
BEHAVIOUR = (
    ("results-digits.md", "test", "digits", "accuracy, %"),
    ("results-digits.md", "+3 px", "digits +3 px", "accuracy, %"),
    ("results-text.md", "256, trained", "text", "bits per byte"),
    ("results-text.md", "2,048", "text at 8x", "bits per byte"),
)
"""Figures in the index: their page, their column there, and the head and the unit here."""
_SITES = [Site(num_heads=4, head_dim=16, embed_dim=64, queries=tokens) for tokens in (Grid(8, 8), Sequence(16))]


def file_of(name: str) -> str:
    """The page of a mechanism."""
    return f"{name.replace('+', '-and-')}.md"


def link(name: str) -> str:
    """A link to the page of a mechanism, from the atlas."""
    return f'<a href="{file_of(name).removesuffix(".md")}.html"><code>{name}</code></a>'


def axes_in_words(preset: Preset) -> str:
    """What a mechanism is made for."""
    words = {0: "graphs", 1: "sequences", 2: "images", 3: "video"}
    return ", ".join(words[axes] for axes in preset.token_axes)


def index(
    entries: Mapping[str, dict[str, Any]],
    known: Mapping[str, Preset],
    costs: Mapping[str, dict[str, dict[str, float]]],
    reached: Mapping[str, dict[str, dict[str, str]]],
) -> str:
    """All mechanisms in a table that the page's script sorts and filters.

    Args:
        entries: the explorer's data by name, for thumbnails. costs: of a layer with each, by its tokens.
        reached: the cells of a page's tables, by page, mechanism and head of the column.
    """
    rows: list[str] = []
    growth: list[str] = []
    for preset in known.values():
        rules_here = list(preset.make(_SITES[1 in preset.token_axes]).growth)
        growth += rules_here
        layers = costs[preset.name]
        time = {
            axes: next((one for where, one in layers.items() if where.startswith(axes)), None)
            for axes in ("seq", "grid")
        }
        parameters = max(figures["parameters"] for figures in layers.values())
        cells = [
            f'<img class="thumb" alt="" src="{address(entries[preset.name])}">{link(preset.name)}',
            preset.family,
            axes_in_words(preset),
            f"{parameters:,}",
            *("" if one is None else f"{one['time']:.2f}" for one in time.values()),
            *(reached[page].get(preset.name, {}).get(name, "").partition(" ")[0] for page, name, *_ in BEHAVIOUR),
            ", ".join(rules_here),
        ]
        sizes = " ".join(str(axes) for axes in preset.token_axes)
        rows.append(
            f'<tr data-kind="{preset.family}" data-axes="{sizes}" data-rules="{"|".join(rules_here)}">'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    heads = {"name": "", "kind": "", "on": "", "parameters": "of a layer", "time, sequence": TIME, "time, grid": TIME}
    heads |= {short: unit for _, _, short, unit in BEHAVIOUR} | {"at other sizes": "rules"}
    buttons = "".join(
        f'<th scope="col"><button type="button">{head}</button><small>{unit}</small></th>'
        for head, unit in heads.items()
    )
    rules = "".join(f"<option>{rule}</option>" for rule in sorted({rule for rule in growth if rule}))
    kinds = "".join(f'<option value="{kind}">{words}</option>' for kind, words in FAMILIES.items())
    return INDEX.format(count=len(known), kinds=kinds, rules=rules, buttons=buttons, rows="".join(rows))


INDEX = """---
hide: [navigation, toc]
---

# Atlas of positions

{count} mechanisms, each on a page of its own: formula, picture, cost, behaviour as measured, pitfalls.
Names joined with `+` are sums, of any of them; names joined with `~` are a schedule over layers.

<form class="filters">
<label>kind <select id="atlas-kind"><option value="">all</option>{kinds}</select></label>
<label>on <select id="atlas-axes"><option value="">all</option><option value="1">sequences</option>
<option value="2">images</option><option value="3">video</option><option value="0">graphs</option></select></label>
<label>at other sizes <select id="atlas-rules"><option value="">all</option>{rules}</select></label>
<label>search <input id="atlas-search" type="search" placeholder="name or rule"></label>
</form>

<p class="atlas-cue" hidden>More columns to the right: swipe, or scroll. &rarr;</p>
<div class="atlas" tabindex="0" role="region" aria-label="mechanisms">
<table id="atlas"><thead><tr>{buttons}</tr></thead>
<tbody>{rows}</tbody></table></div>

*A thumbnail is the first head's effect on scores, orange raises attention: queries down, keys across, or on images
one query's keys; of a rotation, the cosines of pairs of dimensions over positions. Accuracy is on handwritten digits,
also shifted by three pixels; text is read at the trained length of 256 bytes and at eight times that. Parameters and
time are of one layer of attention, 8 heads of 64, forward and backward, at 1,024 tokens, as a multiple of the same
layer without a position (2 threads of a CPU, `benchmarks/mechanisms.py`).*
"""
