"""The report of a comparison: reads `results.json`; makes advice, a table, a page and pictures.

Nothing here depends on models or training: it reports on any file with the schema of `docs/results.md`.
"""

from relpos.report.advice import Advice, advise, decided
from relpos.report.page import build_page, notebook_html, save_overview, write_report
from relpos.report.terminal import render_terminal
from relpos.results import ResultsError, load_results

__all__ = [
    "Advice",
    "ResultsError",
    "advise",
    "build_page",
    "decided",
    "load_results",
    "notebook_html",
    "render_terminal",
    "save_overview",
    "write_report",
]
