"""Draw the README's picture from a comparison: accuracy against cost, and what is left when images move.

relpos compare --seeds 3 --out runs/readme && python recipes/readme_picture.py runs/readme docs/comparison.png
"""

from __future__ import annotations

import sys

from relpos.report.page import save_overview
from relpos.results import load_results

if __name__ == "__main__":
    folder, picture = sys.argv[1:]
    save_overview(load_results(folder), picture)
