"""`relpos list`: what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

KINDS = ("positions", "tasks", "backends")


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("kind", type=str, help="positions, tasks or backends")


def run(arguments: Namespace) -> None:
    """Carry the verb out."""
    import difflib

    from rich.console import Console
    from rich.table import Table

    if arguments.kind not in KINDS:
        near = difflib.get_close_matches(arguments.kind, KINDS, n=1, cutoff=0.4)
        remedy = f"Did you mean {near[0]!r}?" if near else "Write relpos list positions."
        raise ValueError(f"expected one of {', '.join(KINDS)}; got {arguments.kind!r}. {remedy}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what it is")
    if arguments.kind == "positions":
        from relpos.position import presets

        for name, preset in presets().items():
            table.add_row(name, f"{preset.title}. {preset.summary} ({preset.source})")
    elif arguments.kind == "tasks":
        from relpos.data import TASKS

        for name, task in TASKS.items():
            table.add_row(name, task.summary)
    else:
        from relpos.attention import backends

        for name, summary in backends().items():
            table.add_row(name, summary)
    Console().print(table)
