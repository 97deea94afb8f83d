"""The page of learned positions in a model's weights: one file, no network needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from relpos.report.drawing.canvas import LAID_OUT, to_svg
from relpos.report.drawing.mechanism_picture import alone
from relpos.report.drawing.palette import stylesheet
from relpos.report.drawing.stored_positions import Stored
from relpos_command.visible import visible

HERE = Path(__file__).parent / "templates"


def weights_page(name: str, found: Sequence[Stored], left: Sequence[tuple[str, str]], *, version: str) -> str:
    """The page as text. Equal weights give an equal page.

    Args:
        name: the file or folder.
        found: the parameters to draw, in order. left: names of parameters not drawn, each with the reason.
        version: relpos's version.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    entries = [
        {
            "stored": one,
            "pictures": [
                (strip.title, Markup(to_svg(alone(strip), name=f"w{index}-{at}", title=f"{strip.title}, {one.name}")))
                for at, strip in enumerate(one.pictures)
            ],
        }
        for index, one in enumerate(found)
    ]
    style = Markup(stylesheet() + (HERE / "style.css").read_text(encoding="utf-8"))
    template = environment.get_template("weights.html.j2")
    page = template.render(name=name, entries=entries, left=left, version=version, style=style)
    return visible(page, keep=LAID_OUT)
