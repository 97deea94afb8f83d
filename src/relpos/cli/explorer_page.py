"""`relpos show --page OUT.html`: the explorer, a page to choose a mechanism, its tokens and a query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relpos_command.option import flag_of

if TYPE_CHECKING:
    from relpos_command.requests import ShowRequest

NOT_WITH_PAGE = ("weights", "length", "grid", "heads", "head_dim", "query", "seed", "out")
"""Options of `relpos show` that are controls on the page, or belong to other pictures."""


def write_page(request: ShowRequest, free: Callable[[Path], Path]) -> None:
    """Write the explorer with every mechanism, the named one first; `free` raises if the file exists."""
    from rich.console import Console

    from relpos import __version__
    from relpos.cli.progress import say
    from relpos.core.checks import fail
    from relpos.files.writing import write_whole
    from relpos.position import find, presets
    from relpos.report.drawing.explorer_data import explored
    from relpos.report.drawing.trained_examples import trained
    from relpos.report.explorer import explorer_page

    for option in NOT_WITH_PAGE:
        if getattr(request, option) is not None:
            name = flag_of(type(request), option)
            fail("--page alone, or with a position", f"--page and {name}", f"Leave {name} out; choose it on the page.")
    assert request.page is not None
    out = free(Path(request.page))
    known = list(presets().values())
    if request.position is not None:
        first = find(request.position)
        known = [first, *(one for one in known if one.name != first.name)]
    entries = [explored(one, partial(trained, one.name)) for one in known]
    write_whole(out, explorer_page(entries, version=__version__))
    say(Console(), f"Wrote an explorer of {len(known)} positions: {out}")
