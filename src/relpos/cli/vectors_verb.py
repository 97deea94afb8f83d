"""`relpos vectors`: write the golden vectors, exact cases to test an implementation of positions with."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from relpos.cli.progress import say

if TYPE_CHECKING:
    from relpos_command.requests import VectorsRequest


def run(request: VectorsRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.cli.free_file import free_file
    from relpos.files.writing import write_whole

    out = free_file(Path(request.out), ("json",), option="OUT")
    text = resources.files("relpos").joinpath("golden_vectors.json").read_text("utf-8")
    write_whole(out, text, new=True)
    say(Console(), f"Wrote {len(json.loads(text)['cases'])} cases: {out}. Format: docs/golden-vectors.md")
