"""`relpos compare`: call `relpos.compare` with the options; print progress, the table and the page's path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relpos.cli.progress import say
from relpos.cli.task_choice import image_options

if TYPE_CHECKING:
    from jsonargparse import Namespace


LIBRARIES = ("accelerate", "sklearn.datasets", "relpos.comparison.entry")
_ALIKE = (
    "model", "data", "seeds", "step", "evaluate", "better", "steps", "batch_size", "lr", "what", "out", "quick",
    "device", "precision",
)  # fmt: skip
"""Options with the same name in the function."""


def _split(names: str | None) -> tuple[str, ...] | None:
    """Split names joined by commas."""
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def require_names(arguments: Namespace) -> None:
    """Raise if a named mechanism does not exist."""
    from relpos.position import find

    named = _split(arguments.positions) or ()
    known = ("own",) if arguments.model is not None else ()
    for name in () if named in (("all",), ("standard",)) else named:
        if name not in known:
            find(name)


def recipe_of(changes: Sequence[str]) -> dict[str, Any]:
    """`["recipe.weight_decay=0.1", "recipe.norm=rmsnorm"]` as fields and values.

    Raises:
        ValueError: a change does not have this form.
    """
    from relpos.core.checks import fail

    found: dict[str, Any] = {}
    for change in changes:
        key, equals, typed = change.partition("=")
        name = key.strip().removeprefix("recipe.")
        if not equals or name == key.strip() or not name:
            fail("--set recipe.KEY=VALUE", f"--set {change}", "Write for example --set recipe.weight_decay=0.1.")
        try:
            found[name] = json.loads(typed)
        except ValueError:
            found[name] = typed.strip()  # a name needs no quotes
    return found


def run(arguments: Namespace) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.cli.console import ConsoleDisplay
    from relpos.comparison.entry import compare
    from relpos.report.terminal import render_terminal

    console = Console()
    result = compare(
        **{name: arguments[name] for name in _ALIKE},
        positions=_split(arguments.positions),
        choices=_split(arguments.choices),
        recipe=recipe_of(arguments.set or ()),
        display=ConsoleDisplay(console),
        **image_options(arguments),
    )
    console.print(render_terminal(result.results, width=console.width), crop=False)
    say(console, f"Page:    {result.page}")
    say(console, f"Results: {result.folder / 'results.json'}")
