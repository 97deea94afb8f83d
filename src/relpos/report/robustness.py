"""Accuracy as conditions leave those of training: curves over the shift, and over the side of the canvas.

Both start at the test images: shift 0, and the canvas of training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relpos.report.results import Contender, Results, contenders, outcomes, positions, probes
from relpos.report.statistics import mean_interval


@dataclass(frozen=True)
class Point:
    """One probe: `x` on the axis, `label` under it."""

    x: float
    label: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """One contender. `rule_index` counts the growth rules of its mechanism; None where no rule is at work."""

    contender: Contender
    rule_index: int | None
    points: tuple[Point, ...]


def shift_curves(results: Results) -> list[Curve]:
    """One curve a mechanism, from the test images to the largest shift."""
    shifts = probes(results, "shift")
    if not shifts:
        return []
    steps = [(probe, 0.0, "0, test") for probe in probes(results, "test")[:1]]
    steps += [(probe, float(probe["x"]), f"+{probe['x']:g}") for probe in shifts]
    found = []
    for position in positions(results):
        points = [_point(results, Contender(position), probe, x, label) for probe, x, label in steps]
        known = tuple(point for point in points if point is not None)
        if known:
            found.append(Curve(Contender(position), None, known))
    return found


def canvas_curves(results: Results) -> list[tuple[str, list[Curve]]]:
    """For each way of placing the digit, one curve a mechanism and growth rule, from the trained canvas on."""
    found = []
    canvases = probes(results, "canvas")
    for variant in dict.fromkeys(probe["variant"] for probe in canvases):
        chosen = [probe for probe in canvases if probe["variant"] == variant]
        curves = []
        for contender in dict.fromkeys(c for probe in chosen for c in contenders(results, probe["id"])):
            points: list[Point | None] = []
            for probe in probes(results, "test")[:1]:
                side = float(probe["image_size"][1])
                points.append(_point(results, Contender(contender.position), probe, side, f"{side:g}, trained"))
            points += [_point(results, contender, p, float(p["x"]), f"{p['x']:g}") for p in chosen]
            known = tuple(point for point in points if point is not None)
            curves.append(Curve(contender, _rule_index(results, contender), known))
        found.append((str(variant or "larger canvas"), curves))
    return found


def _point(results: Results, contender: Contender, probe: Mapping[str, Any], x: float, label: str) -> Point | None:
    by_seed = outcomes(results, contender, probe["id"])
    if not by_seed:
        return None
    interval = mean_interval(by_seed)
    return Point(x, label, interval.mean, interval.low, interval.high)


def _rule_index(results: Results, contender: Contender) -> int:
    rules = next(m["growth"] for m in results["mechanisms"] if m["name"] == contender.position)
    return rules.index(contender.growth) if contender.growth in rules else 0
