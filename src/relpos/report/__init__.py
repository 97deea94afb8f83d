"""The report of a comparison: `results.json` in, a verdict, a table, a page and pictures out.

Nothing here knows about models or training: whatever writes the schema of `docs/results.md` can be reported on.
"""

from relpos.report.page import build_page, write_report
from relpos.report.plots import save_overview
from relpos.report.results import ResultsError, load_results
from relpos.report.terminal import render_terminal
from relpos.report.verdict import Verdict, judge

__all__ = [
    "ResultsError",
    "Verdict",
    "build_page",
    "judge",
    "load_results",
    "render_terminal",
    "save_overview",
    "write_report",
]
