"""The data of the page's interactive charts, in the shape that `templates/charts.js` draws.

A chart is `{"id", "title", "x", "xLabel", "yLabel", "ticks", "percent", "chance", "series"}`; a series is `{"label",
"mechanism", "style", "mean", "low", "high"}`, its lists as long as the chart's `x`, null where it has no point. `ticks`
maps a number on the axis to its label and is null where the axis is continuous.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from relpos.report.palette import dash_of_rule, style
from relpos.report.results import Results, positions, runs
from relpos.report.robustness import Curve, canvas_curves, shift_curves

Chart = dict[str, Any]


def robustness_charts(results: Results) -> list[Chart]:
    """Accuracy over the shift, then over the side of the canvas for each way of placing the digit."""
    chance = 1.0 / len(results["task"]["classes"])
    charts = []
    shifts = shift_curves(results)
    if shifts:
        charts.append(_curves(results, "shift", "Accuracy by shift", "pixels beyond training", shifts, chance))
    for index, (variant, curves) in enumerate(canvas_curves(results)):
        title = f"Accuracy by canvas, {variant}"
        charts.append(_curves(results, f"canvas-{index}", title, "side of the canvas, pixels", curves, chance))
    return charts


def training_charts(results: Results) -> list[Chart]:
    """Loss and validation accuracy over the steps, each mechanism the mean of its seeds."""
    loss = _training(results, "loss", "Training loss", "step", "loss")
    validation = _training(results, "validation", "Validation accuracy", "validation_step", "validation_accuracy")
    validation["percent"] = True
    validation["chance"] = 1.0 / len(results["task"]["classes"])
    return [chart for chart in (loss, validation) if chart["series"]]


def _curves(results: Results, name: str, title: str, label: str, curves: Sequence[Curve], chance: float) -> Chart:
    ticks = {point.x: point.label for curve in curves for point in curve.points}
    xs = sorted(ticks)
    series = []
    for curve in curves:
        at = {point.x: point for point in curve.points}
        points = [at.get(x) for x in xs]
        look = _style(results, curve.contender.position)
        if curve.rule_index is not None:
            look["dash"] = dash_of_rule(curve.rule_index)
        series.append(
            {
                "label": curve.contender.label,
                "mechanism": curve.contender.position,
                "style": look,
                "mean": [point and point.mean for point in points],
                "low": [point and point.low for point in points],
                "high": [point and point.high for point in points],
            }
        )
    return {
        "id": name,
        "title": title,
        "x": xs,
        "xLabel": label,
        "yLabel": "accuracy",
        "ticks": {f"{x:g}": ticks[x] for x in xs},
        "percent": True,
        "chance": chance,
        "series": series,
    }


def _training(results: Results, name: str, title: str, step_key: str, value_key: str) -> Chart:
    means = {}
    for position in positions(results):
        by_step = mean_curve([run["curve"] for run in runs(results, position)], step_key, value_key)
        if by_step:
            means[position] = by_step
    xs = sorted({step for by_step in means.values() for step in by_step})
    series = [
        {
            "label": position,
            "mechanism": position,
            "style": _style(results, position),
            "mean": [by_step.get(step) for step in xs],
            "low": None,
            "high": None,
        }
        for position, by_step in means.items()
    ]
    return {
        "id": name,
        "title": title,
        "x": xs,
        "xLabel": "training step",
        "yLabel": title.lower(),
        "ticks": None,
        "percent": False,
        "chance": None,
        "series": series,
    }


def mean_curve(curves: Sequence[Mapping[str, Any]], step_key: str, value_key: str) -> dict[int, float]:
    """Step to the mean over the curves, at the steps that all of them have."""
    tables = [dict(zip(curve[step_key], curve[value_key], strict=True)) for curve in curves]
    if not tables:
        return {}
    shared = [step for step in tables[0] if all(table.get(step) is not None for table in tables)]
    return {int(step): sum(table[step] for table in tables) / len(tables) for step in shared}


def _style(results: Results, position: str) -> dict[str, Any]:
    return asdict(style(positions(results).index(position)))
