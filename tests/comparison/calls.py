"""Comparisons by Python and by the command."""

from pathlib import Path
from typing import Any

import relpos
from relpos.comparison.display import Display

Compared = tuple[relpos.ComparisonResult, list[str]]


def compare(out: Path | None, *arguments: Any, **options: Any) -> Compared:
    """A comparison on the CPU and the lines that it showed."""
    lines: list[str] = []
    options = {"device": "cpu", "steps": 3, "out": out, "display": Display(lines.append), **options}
    return relpos.compare(*arguments, **options), lines


def on_digits(out: Path, **options: Any) -> Compared:
    """A quick comparison of two positions with another recipe."""
    of_recipe = {"recipe": {"depth": 1}, "lr": 1e-3, "batch_size": 32}
    return compare(out, positions=["none", "relative_2d"], quick=True, **of_recipe, **options)


RECIPE = ["--steps", "3", "--set", "recipe.depth=1", "--lr", "1e-3", "--batch-size", "32"]


def call(out: Path, *, positions: str = "none,relative_2d", recipe: list[str] = RECIPE) -> list[str]:
    """The command of the same, or nearly."""
    return ["compare", "--positions", positions, "--quick", "--device", "cpu", "--out", str(out), *recipe]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and modification times: a file written again shows even where its bytes are the same."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")}
