"""What is measured as conditions leave those of training: over the shift, the canvas, the length of a text, and more.

All start at the plain test: shift 0, the canvas or length of training, 0 degrees.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relpos.report.measure import measure_of
from relpos.report.results import Contender, Results, contenders, longest, outcomes, positions, probes, runs

KNOWN_GROUPS = ("test", "shift", "canvas", "length")


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
    """One contender. `rule_index` counts the growth rules of the comparison; None where no rule is at work."""

    contender: Contender
    rule_index: int | None
    points: tuple[Point, ...]


def shift_curves(results: Results) -> list[Curve]:
    """One curve a mechanism, from the test images to the largest shift."""
    return _from_zero(results, "shift", sign="+")


def other_curves(results: Results) -> list[tuple[str, list[Curve]]]:
    """The curves of each further group of probes that a task has, such as "rotation"."""
    groups = dict.fromkeys(probe["group"] for probe in results["task"]["probes"])
    return [(str(group), _from_zero(results, group, sign="")) for group in groups if group not in KNOWN_GROUPS]


def _from_zero(results: Results, group: str, *, sign: str) -> list[Curve]:
    """One curve a mechanism over the `x` of a group's probes, which is 0 at the test images."""
    asked = probes(results, group)
    if not asked:
        return []
    steps = [(probe, 0.0, "0, test") for probe in probes(results, "test")[:1]]
    steps += [(probe, float(probe["x"]), f"{sign}{probe['x']:g}") for probe in asked]
    found = []
    for position in positions(results):
        points = [_point(results, Contender(position), probe, x, label) for probe, x, label in steps]
        known = tuple(point for point in points if point is not None)
        if known:
            found.append(Curve(Contender(position), None, known))
    return found


def canvas_curves(results: Results) -> list[tuple[str, list[Curve]]]:
    """For each way of placing the picture, one curve a mechanism and growth rule, from the trained canvas on."""
    found = []
    canvases = probes(results, "canvas")
    for variant in dict.fromkeys(probe["variant"] for probe in canvases):
        chosen = [probe for probe in canvases if probe["variant"] == variant]
        curves = []
        for contender in dict.fromkeys(c for probe in chosen for c in contenders(results, probe["id"])):
            points: list[Point | None] = []
            for probe in probes(results, "test")[:1]:
                side = float(probe["image_size"][0])
                points.append(_point(results, Contender(contender.position), probe, side, f"{side:g}, trained"))
            points += [_point(results, contender, p, float(p["x"]), f"{p['x']:g}") for p in chosen]
            known = tuple(point for point in points if point is not None)
            curves.append(Curve(contender, _rule_index(results, contender), known))
        if curves:
            found.append((str(variant or "larger canvas"), curves))
    return found


def length_curves(results: Results) -> list[Curve]:
    """One curve a mechanism and growth rule over the length of the text, from the trained length on."""
    asked = probes(results, "length")
    curves = []
    for contender in dict.fromkeys(c for probe in asked for c in contenders(results, probe["id"])):
        points = [
            _point(results, Contender(contender.position), probe, float(probe["x"]), f"{probe['x']:,}, trained")
            for probe in probes(results, "test")[:1]
        ]
        points += [_point(results, contender, probe, float(probe["x"]), f"{probe['x']:,}") for probe in asked]
        known = tuple(point for point in points if point is not None)
        curves.append(Curve(contender, _rule_index(results, contender), known))
    return curves


def place_curves(results: Results) -> list[Curve]:
    """One curve a mechanism and growth rule: bits of the bytes at each place of the longest text."""
    probe = longest(results)
    if probe is None:
        return []
    curves = []
    for contender in contenders(results, probe["id"]):
        by_seed = [
            metric["by_place"]
            for run in runs(results, contender.position)
            for metric in run["metrics"]
            if metric["probe"] == probe["id"] and metric["growth"] == contender.growth and "by_place" in metric
        ]
        if not by_seed:
            continue
        means = [sum(values) / len(values) for values in zip(*by_seed, strict=True)]
        width = probe["x"] / len(means)
        points = tuple(
            Point((place + 0.5) * width, f"{place * width:,.0f} to {(place + 1) * width:,.0f}", mean, mean, mean)
            for place, mean in enumerate(means)
        )
        curves.append(Curve(contender, _rule_index(results, contender), points))
    return curves


def _point(results: Results, contender: Contender, probe: Mapping[str, Any], x: float, label: str) -> Point | None:
    by_seed = outcomes(results, contender, probe["id"])
    if not by_seed:
        return None
    interval = measure_of(results).interval(by_seed)
    return Point(x, label, interval.mean, interval.low, interval.high)


def rules(results: Results) -> list[str]:
    """The growth rules of the comparison, in the order in which they are met."""
    return list(dict.fromkeys(rule for mechanism in results["mechanisms"] for rule in mechanism["growth"]))


def _rule_index(results: Results, contender: Contender) -> int:
    return rules(results).index(contender.growth) if contender.growth in rules(results) else 0
