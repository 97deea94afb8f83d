"""What the searches share: settings tried one after another on two processes, kept in a file as they finish.

A search cut short continues from its file; settings that changed since, or another base or PyTorch, are repeated.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = dict[str, Any]


def search(
    path: Path,
    run: Callable[[Any], Run],
    jobs: list[tuple[Any, ...]],
    *,
    fields: tuple[str, ...],
    base: Any,
    changes: dict[str, Any],
    score: str,
    scores: Callable[[list[Run]], dict[str, float]],
) -> None:
    """Run every job that the file does not have yet, and write what was found.

    Args:
        path: the file. run: a job to its result, which repeats the job under the names `fields`; the first is "change".
        base, changes: what the search began with and what it changed, as plain values.
        score, scores: what decides, in words, and from the runs, best first.
    """

    def summary(runs: list[Run]) -> dict[str, Any]:
        head = {"torch": torch.__version__, "base": base, "changes": changes, "score": score}
        return {**head, "scores": scores(runs), "runs": runs}

    def keep(runs: list[Run]) -> None:
        path.write_text(json.dumps(summary(runs), indent=1) + "\n", encoding="utf-8")

    runs: list[Run] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = before["torch"] == torch.__version__ and before["base"] == base
        kept = [name for name, change in before["changes"].items() if same and change == changes.get(name)]
        runs = [one for one in before["runs"] if one["change"] in kept]
    done = {tuple(one[field] for field in fields) for one in runs}
    left = [job for job in jobs if job not in done]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for result in pool.imap(run, left):
            runs.append(result)
            print(f"{len(runs)} of {len(done) + len(left)}: {result}", flush=True)
            keep(runs)
    keep(runs)
    for change, reached in scores(runs).items():
        print(f"{reached:.4f}  {change}")


def means(runs: list[Run], key: str, *, every: int, higher: bool) -> dict[str, float]:
    """The mean of a figure over the runs of each change that has all `every` of them, best first."""
    found: dict[str, list[float]] = {}
    for one in runs:
        found.setdefault(one["change"], []).append(one[key])
    whole = {change: round(sum(each) / every, 4) for change, each in found.items() if len(each) == every}
    return dict(sorted(whole.items(), key=lambda item: -item[1] if higher else item[1]))
