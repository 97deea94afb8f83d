"""Write the tables of `docs/choices.md`: what was measured of attention, norms and optimizers.

    relpos compare --what attention --data text --steps 240 --seeds 3 --out runs/attention-text      and so on
    python recipes/choices_page.py runs/*

Each folder is one finished comparison. Nothing is computed here that its own page has not; the words around the tables
are written by hand, and what documents claim stands in `docs/claims.md` (`recipes/claims`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from relpos.report.table import build_table
from relpos.results import Results, load_results


def section(results: Results) -> str:
    """One comparison as a heading and a table."""
    table = build_table(results)
    lines = [f"## {results.settings.what.capitalize()}, {results.settings.task}", ""]
    lines.append(f"| {' | '.join([results.settings.what, *(column.title for column in table.columns)])} |")
    lines.append("|---" * (len(table.columns) + 1) + "|")
    for row in table.rows:
        cells = [f"{cell.text} ({cell.small})" if cell.small else cell.text for cell in row.cells]
        lines.append(f"| `{row.contender.name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print("\n".join(section(load_results(Path(folder))) for folder in sys.argv[1:]))
