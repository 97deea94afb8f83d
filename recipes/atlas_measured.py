"""What the atlas says was measured: every mechanism on digits and on text, from the results of two comparisons.

    relpos compare --positions all --data digits --out DIGITS
    relpos compare --positions all --data text --out TEXT
    python recipes/atlas_measured.py DIGITS TEXT

Writes docs/measured.json. With one seed an interval speaks of the test data alone, which the note says. A comparison
that was stopped serves too: mechanisms that it has not trained have no row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from relpos.report.statistics import mean_interval
from relpos.results import Results, Run, load_results

OUT = Path(__file__).parent.parent / "docs" / "measured.json"
DIGITS = {
    "test images": ("test", "test"),
    "moved by 1 px": ("shift/1", None),
    "by 2 px": ("shift/2", None),
    "by 3 px": ("shift/3", "+3 px"),
    "on a canvas of 24 x 24, anywhere": ("canvas/24/anywhere", "24 x 24"),
}
"""Column to probe, and what the index calls it if it has it."""


def _cell(runs: list[Run], probe: str, *, images: bool) -> str | None:
    """Mean and interval of a probe by the first rule of growth that a mechanism has."""
    outcomes: dict[int, np.ndarray] = {}
    rule = None
    for run in runs:
        metric = next((one for one in run.metrics if one.probe == probe), None)
        if metric is None or metric.reason is not None:
            return None
        rule = metric.growth
        if images:
            assert metric.correct is not None
            assert metric.trials is not None
            outcomes[run.seed] = 100 * np.array(metric.correct, dtype=np.float64) / metric.trials
        else:
            outcomes[run.seed] = np.array(metric.values, dtype=np.float64)
    interval = mean_interval(outcomes, most=100.0 if images else None)
    digits = 1 if images else 3
    figures = [f"{one:.{digits}f}" for one in (interval.mean, interval.low, interval.high)]
    return f"{figures[0]} ({figures[1]} to {figures[2]})" + ("" if rule in (None, "as is") else f", {rule}")


def _table(
    results: Results, columns: dict[str, tuple[str, str | None]], title: str, *, images: bool
) -> dict[str, object]:
    runs: dict[str, list[Run]] = {}
    for run in results.records:
        if run.variant == "recipe":
            runs.setdefault(run.position, []).append(run)
    whole = min(len(one) for one in runs.values())
    words = "one model of each" if whole == 1 else f"{whole} models of each"
    of = "test data" if whole == 1 else "test data and models"
    recipe = results.settings.recipe
    note = f"{recipe.steps} steps, {words}; 95% intervals over {of}."
    note += (
        " One model ranks nothing: see [digits](../results-digits.md) and [text](../results-text.md)."
        if whole == 1
        else ""
    )
    mechanisms = {
        name: [
            _cell(sorted(own, key=lambda run: run.seed)[:whole], probe, images=images) for probe, _ in columns.values()
        ]
        for name, own in runs.items()
    }
    index = {column: short for column, (_, short) in columns.items() if short is not None}
    return {"title": title, "columns": list(columns), "index": index, "mechanisms": mechanisms, "note": note}


def main() -> None:
    """Read both comparisons, write the file."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    digits, text = (load_results(Path(one) / "results.json") for one in sys.argv[1:])
    probes = dict.fromkeys(metric.probe for run in text.records for metric in run.metrics)
    lengths = {f"{probe.rpartition('/')[2]} bytes" if "/" in probe else "trained length": probe for probe in probes}
    last = list(lengths)[-1]
    columns = {
        name: (probe, {"trained length": "bits a byte", last: f"at {last}"}.get(name))
        for name, probe in lengths.items()
    }
    found = {
        "digits": _table(digits, DIGITS, "Handwritten digits, accuracy in %", images=True),
        "text": _table(text, columns, "Text, bits per byte (less is better), causal", images=False),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
