"""The explorer: a page to choose a mechanism, its tokens and a query, and see the effect on attention.

It is one file with precomputed data: no server and no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from relpos.report.drawing.explorer_data import FAMILIES, STRENGTHS
from relpos.report.drawing.trained_examples import HEAD_DIM, HEADS, SEED

HERE = Path(__file__).parent / "templates"


def explorer_page(entries: Iterable[Mapping[str, Any]], *, version: str) -> str:
    """The page as text. Equal entries give an equal page.

    Args:
        entries: the result of `explored` for each available mechanism; the first is shown at the start.
        version: relpos's version.
    """
    known = list(entries)
    read = {name: (HERE / name).read_text(encoding="utf-8") for name in ("style.css", "explorer.css", "explorer.js")}
    return (
        _environment()
        .get_template("explorer.html.j2")
        .render(
            version=version,
            style=Markup(read["style.css"] + read["explorer.css"]),
            script=Markup(read["explorer.js"]),
            HEADS=HEADS,
            HEAD_DIM=HEAD_DIM,
            SEED=SEED,
            data=Markup(json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")),
            **_choices(known),
        )
    )


def explorer_parts(entries: Iterable[Mapping[str, Any]]) -> tuple[str, str, str]:
    """The explorer within another page: elements without blank lines, the script that draws them, and its style."""
    known = list(entries)
    body = _environment().get_template("explorer_body.html.j2").render(**_choices(known))
    script = (HERE / "explorer.js").read_text(encoding="utf-8")
    script = script.replace(_DATA, json.dumps(known, separators=(",", ":")), 1)
    return body.strip(), f"{{\n{script}\n}}\n", (HERE / "explorer.css").read_text(encoding="utf-8")


_DATA = 'JSON.parse(document.getElementById("data").textContent)'


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _choices(known: list[Mapping[str, Any]]) -> dict[str, Any]:
    families = [(title, [one for one in known if one["family"] == name]) for name, title in FAMILIES.items()]
    return {
        "families": [(title, group) for title, group in families if group],
        "first": known[0]["name"],
        "strengths": STRENGTHS,
    }
