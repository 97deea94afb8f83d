"""`relpos list`: list mechanisms, data or engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relpos.cli.progress import say, say_list

if TYPE_CHECKING:
    from relpos.position import Preset
    from relpos_command.requests import ListRequest


def run(request: ListRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    console = Console()
    if request.kind == "positions":
        from relpos.position import presets

        known = presets().values()
        say_list(console, {one.name: [_title(one), *_more(one, request.long)] for one in known})
        if not request.long and console.is_terminal:
            say(console, "--long adds a description and the source of each.")
    elif request.kind == "data":
        from relpos.data import KINDS_OF_DATA

        say_list(console, {name: [summary] for name, summary in KINDS_OF_DATA.items()})
    else:
        from relpos.engines import backends

        say_list(console, {name: [summary] for name, summary in backends().items()})


def _title(preset: Preset) -> str:
    return f"{preset.title} (also {', '.join(preset.aliases)})" if preset.aliases else preset.title


def _more(preset: Preset, long: bool) -> list[str]:
    return [preset.summary, f"Source: {preset.source}"] if long else []
