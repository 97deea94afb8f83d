"""The explorer: a page on which to choose a mechanism, its tokens and a query, and see what it does to attention.

One file, its data computed beforehand: no server and no network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from relpos.position import Preset
from relpos.viz.explored import HEAD_DIM, HEADS, LONG, SEED, STRENGTHS, WIDE, Maker, explored, facts

HERE = Path(__file__).parent / "templates"
FAMILIES = {
    "none": "No position",
    "absolute": "Absolute",
    "bias": "Bias on scores",
    "rotation": "Rotation",
    "vectors": "Vectors by offset",
    "sum": "Sums",
}


def explorer_page(
    presets: Iterable[Preset], *, version: str, trained: Callable[[Preset], Maker | None] = lambda preset: None
) -> str:
    """The page as text. Equal mechanisms give an equal page.

    Args:
        presets: what can be chosen; the first one is.
        version: of relpos.
        trained: of a mechanism, what makes its trained example for a site, or None.
    """
    chosen = list(presets)
    entries = [_entry(preset, trained(preset)) for preset in chosen]
    families = [(title, [one for one in chosen if one.family == name]) for name, title in FAMILIES.items()]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    read = {name: (HERE / name).read_text(encoding="utf-8") for name in ("style.css", "explorer.css", "explorer.js")}
    return environment.get_template("explorer.html.j2").render(
        version=version,
        style=Markup(read["style.css"] + read["explorer.css"]),
        script=Markup(read["explorer.js"]),
        families=[(title, group) for title, group in families if group],
        strengths=STRENGTHS,
        HEADS=HEADS,
        HEAD_DIM=HEAD_DIM,
        SEED=SEED,
        data=Markup(json.dumps(entries, separators=(",", ":")).replace("<", "\\u003c")),
    )


def _entry(preset: Preset, trained: Maker | None) -> dict[str, Any]:
    words = {name: getattr(preset, name) for name in ("name", "title", "summary", "source", "family")}
    return words | facts(preset) | explored(preset, trained) | {"long": LONG, "wide": WIDE}
