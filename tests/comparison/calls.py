"""Comparisons by Python and by the command."""

from __future__ import annotations

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


def on_digits(out: Path) -> Compared:
    """A quick comparison of two positions with another recipe."""
    return compare(out, positions=["none", "relative_2d"], quick=True, recipe={"depth": 1}, lr=1e-3, batch_size=32)


RECIPE = ["--steps", "3", "--set", "recipe.depth=1", "--lr", "1e-3", "--batch-size", "32"]


def call(out: Path, *, positions: str = "none,relative_2d", recipe: list[str] = RECIPE) -> list[str]:
    """The command of the same, or nearly."""
    return ["compare", "--positions", positions, "--quick", "--device", "cpu", "--out", str(out), *recipe]
