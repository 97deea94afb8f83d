"""`relpos bundle`: a comparison as one file to share, without data or who made it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relpos.cli.progress import say

if TYPE_CHECKING:
    from relpos_command.requests import BundleRequest

LIBRARIES = ("relpos.report.bundle",)


def run(request: BundleRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.cli.free_file import free_file
    from relpos.report.bundle import write_bundle
    from relpos.results import load_results

    results = load_results(request.run)
    out = free_file(Path(request.out), ("zip",), option="OUT", overwrite=request.overwrite)
    files = write_bundle(results, out, samples=request.with_samples, overwrite=request.overwrite)
    say(Console(), f"Wrote {out}: {', '.join(files)}")
