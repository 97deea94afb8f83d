"""The machines of a comparison on several: where each run was, what failed, and which times may be compared."""

from __future__ import annotations

from typing import Any

from relpos.results import Results


def machines(results: Results) -> dict[str, Any] | None:
    """The rows of the table of runs by machine, and a line on their times; None if all were on this machine."""
    rows = [
        {
            "run": run.id,
            "host": run.environment.host or "",
            "kind": run.environment.kind,
            "ended": "diverged" if run.diverged else f"finished, {run.train_seconds:,.0f} s",
        }
        for run in results.records
        if run.environment is not None
    ]
    failed = [{"run": one.id, "host": "", "kind": "", "ended": f"failed: {one.reason}"} for one in results.failed]
    if not failed and not any(row["host"] for row in rows):
        return None
    return {"rows": [*rows, *failed], "times": _on_times(results)}


def _on_times(results: Results) -> str:
    kinds = sorted({run.environment.kind for run in results.records if run.environment is not None})
    where = f"Steps were timed and their memory was measured on one machine: {results.environment.kind}."
    if len(kinds) < 2:
        return where
    return f"{where} Training was on {', '.join(kinds)}, so seconds of training are not compared."
