"""The charts of the page: figures over cost, shift, canvas, length, position and training.

Every mechanism is one line, by its best rule. A chart draws at most eight: those named in the advice, `none`, and the
best of this chart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from relpos.report.advice import Advice, cost_tokens, first_of, relative, step_cost
from relpos.report.drawing.charts import Chart, Point
from relpos.report.measure import measure_of, unit_of
from relpos.report.standings import Contender, best_rules, chance_of, far_probe, grown_probe, in_words, outcomes
from relpos.results import ProbeRecord, Results

AT_MOST = 8


def overview(results: Results, advice: Advice) -> dict[str, Chart]:
    """Figures against the cost of a training step, by name: `far-cost` on the probe farthest from training, `cost` on
    the plain test."""
    shown: dict[str, tuple[str, dict[str, list[Point]]]] = {}
    for key, probe in (("far-cost", far_probe(results)), ("cost", results.task.probes[0])):
        if probe is not None:
            lines = {name: [point] for name in results.names if (point := _point(results, name, probe, 0.0))}
            shown[key] = in_words(probe), {name: lines[name] for name in _front(results, lines, advice)}
    tokens = cost_tokens(results)
    if tokens is None:
        return {}
    unit = f"step time, times {first_of(results)}'s" if relative(results) else "step time, ms"
    charts = {}
    for key, (title, lines) in shown.items():
        costed = {
            name: [replace(point, x=cost, label="")]
            for name, (point,) in lines.items()
            if (cost := step_cost(results, name, tokens)) is not None
        }
        if not costed:
            return {}
        charts[key] = _chart(results, title, f"{unit}, at {tokens:,} tokens", costed, advice, chance=True)
    return charts


def curves(results: Results, advice: Advice) -> dict[str, Chart]:
    """The curves by name, in reading order."""
    test = results.task.probes[0]
    charts: dict[str, Chart | None] = {}
    for group, title, across in (
        ("shift", "Shifted farther than in training", "pixels"),
        ("canvas", "On larger canvases", "height of the canvas, pixels"),
        ("length", "The same text in longer pieces", f"{unit_of(results.task)} read at once"),
        ("rotation", "Rotated", "degrees counter-clockwise"),
    ):
        probes = results.probes(group)
        if group == "canvas" and (grown := grown_probe(results)):
            probes = [probe for probe in probes if probe.variant == grown.variant]
            title += f", {grown.variant}" if grown.variant else ""
        start = {"length": float(test.length or 0), "canvas": float((test.image_size or [0])[0])}.get(group, 0.0)
        asked = [(test, start), *((probe, probe.x) for probe in probes)]
        lines = _lines(results, asked) if probes else {}
        if lines:
            charts[group] = _chart(results, title, across, lines, advice, log=group == "length", chance=True)
    charts |= {"place": _by_position(results, advice), "training": _training(results, advice)}
    return {name: chart for name, chart in charts.items() if chart is not None}


def _lines(results: Results, asked: Sequence[tuple[ProbeRecord, float]]) -> dict[str, list[Point]]:
    lines = {}
    for name in results.names:
        points = [point for probe, x in asked if (point := _point(results, name, probe, x))]
        if len(points) > 1:
            lines[name] = points
    return lines


def _point(results: Results, name: str, probe: ProbeRecord, x: float) -> Point | None:
    rule = best_rules(results).get(name) if probe.group in ("canvas", "length") else None
    scored = outcomes(results, Contender(name, rule), probe)
    if not scored:
        return None
    interval = measure_of(results).interval(scored)
    label = f"{x:,g}" if probe.group != "test" or x else "0"
    return Point(x, interval.mean, interval.low, interval.high, label)


def _by_position(results: Results, advice: Advice) -> Chart | None:
    """Bits per byte at each position of the longest text."""
    unit = unit_of(results.task)
    probes = results.probes("length")
    if not probes:
        return None
    probe, rules, lines = max(probes, key=lambda one: one.x), best_rules(results), {}
    for name in results.names:
        by_seed = [
            metric.by_place
            for run in results.runs(name)
            for metric in run.metrics
            if (metric.probe, metric.growth) == (probe.id, rules.get(name)) and metric.by_place
        ]
        if by_seed:
            means = np.mean(by_seed, axis=0)
            width = probe.x / len(means)
            lines[name] = [Point((at + 0.5) * width, mean, mean, mean) for at, mean in enumerate(means.tolist())]
    return _chart(results, f"By position in {probe.x:,g} {unit}", f"position, {unit}", lines, advice) if lines else None


def _training(results: Results, advice: Advice) -> Chart | None:
    """Validation during training, averaged over seeds."""
    lines = {}
    for name in results.names:
        by_seed = [run.curve for run in results.runs(name) if run.curve.validation]
        if by_seed:
            least = min(len(curve.validation) for curve in by_seed)
            means = np.mean([curve.validation[:least] for curve in by_seed], axis=0).tolist()
            steps = by_seed[0].validation_step
            lines[name] = [Point(step, mean, mean, mean) for step, mean in zip(steps, means, strict=False)]
    return _chart(results, "Validation during training", "steps", lines, advice) if lines else None


def _chart(
    results: Results,
    title: str,
    across: str,
    lines: Mapping[str, Sequence[Point]],
    advice: Advice,
    *,
    log: bool = False,
    chance: bool = False,
) -> Chart:
    shown = {name: lines[name] for name in _front(results, lines, advice)}
    left_out = f" ({len(shown)} of {len(lines)})" if len(shown) < len(lines) else ""
    of_chance = chance_of(results) if chance else None
    measure = measure_of(results)
    figure = f"figure ({measure.better} is better)" if measure.key == "figure" else ""
    return Chart(title + left_out, across, shown, measure.is_share, log, of_chance, advice.named, figure)


def _front(results: Results, lines: Mapping[str, Sequence[Point]], advice: Advice) -> list[str]:
    """The mechanisms to draw, sorted by the last point of their lines, best first; in a quick run, as requested."""
    measure = measure_of(results)
    ranked = sorted(lines, key=lambda name: measure.rank(lines[name][-1].mean))
    if results.settings.quick:
        ranked = list(lines)
    wanted = [name for name in ranked if name in advice.named or name == "none"]
    chosen = [*wanted, *(name for name in ranked if name not in wanted)][:AT_MOST]
    return [name for name in ranked if name in chosen]
