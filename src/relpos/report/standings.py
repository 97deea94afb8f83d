"""The ranking on a probe: mechanisms, each by its best rule, sorted and compared in pairs with the best.

    interval of (best - this) covers 0      tied with the best
    interval of (best - this) is above 0    behind it

A tie does not mean that two are equal: these images and seeds do not distinguish them.
"""

from dataclasses import dataclass

import numpy as np

from relpos.report.measure import Measure, Scored, measure_of
from relpos.report.statistics import Interval
from relpos.results import Metric, ProbeRecord, Results


@dataclass(frozen=True, order=True)
class Contender:
    """A mechanism under one growth rule."""

    name: str
    growth: str | None = None

    @property
    def label(self) -> str:
        """The name, and the rule if there is one."""
        return self.name if self.growth is None else f"{self.name} ({self.growth})"


@dataclass(frozen=True)
class Standing:
    """A contender's result. `behind` is how far the best is ahead; None for the best itself."""

    contender: Contender
    reached: Interval
    behind: Interval | None

    @property
    def tied(self) -> bool:
        """Whether it is the best, or not distinguishable from it."""
        return self.behind is None or self.behind.covers_zero


@dataclass(frozen=True)
class Standings:
    """The contenders of a probe, best first, over the seeds that all have; other seeds are left out.

    `validated` says whether the best is above chance on the validation data, too.
    """

    probe: ProbeRecord
    measure: Measure
    chance: float | None
    entries: tuple[Standing, ...]
    left_out_seeds: tuple[int, ...]
    validated: bool = True

    @property
    def best(self) -> Standing:
        """The first."""
        return self.entries[0]

    @property
    def tied(self) -> list[str]:
        """The names of the best and of those tied with it."""
        return [entry.contender.name for entry in self.entries if entry.tied]

    def of(self, name: str) -> Standing | None:
        """A mechanism's entry."""
        return next((entry for entry in self.entries if entry.contender.name == name), None)

    @property
    def beats_chance(self) -> bool:
        """Whether the best's whole interval is above chance, and so is its figure on the validation data."""
        return self.chance is None or (self.validated and self.best.reached.low > self.chance)

    @property
    def all_tied(self) -> bool:
        """Whether nobody is behind the best."""
        return all(entry.tied for entry in self.entries)


def contenders(results: Results, probe: ProbeRecord, variant: str = "recipe") -> list[Contender]:
    """All contenders with a figure on a probe, in the order of mechanisms, then of their rules."""
    known: dict[Contender, None] = {}
    for name in results.names:
        for run in results.runs(name, variant):
            for metric in run.metrics:
                if metric.probe == probe.id and metric.reason is None:
                    known[Contender(name, metric.growth)] = None
    return list(known)


def outcomes(results: Results, contender: Contender, probe: ProbeRecord, variant: str = "recipe") -> Scored:
    """The outcome of each unit by seed: the share of an image's trials, or a block's bits per byte."""
    return {
        run.seed: _units(metric)
        for run in results.runs(contender.name, variant)
        for metric in run.metrics
        if (metric.probe, metric.growth) == (probe.id, contender.growth) and metric.reason is None
    }


def _units(metric: Metric) -> np.ndarray:
    if metric.values is not None:
        return np.asarray(metric.values, dtype=np.float64)
    return np.asarray(metric.correct, dtype=np.float64) / float(metric.trials or 1)


def reasons(results: Results, probe: ProbeRecord) -> dict[str, str]:
    """The reason for each mechanism that has no figure on a probe."""
    measured = {contender.name for contender in contenders(results, probe)}
    found = {}
    for name in results.names:
        if name not in measured:
            recorded = [
                metric.reason for run in results.runs(name) for metric in run.metrics if metric.probe == probe.id
            ]
            found[name] = without_runs(results, name) or next((reason for reason in recorded if reason), "not finished")
    return found


def without_runs(results: Results, name: str, variant: str = "recipe") -> str | None:
    """Why a name has no measured run: "diverged" or "failed"; None if it has some, or none has ended."""
    if results.runs(name, variant):
        return None
    ended = {"diverged": results.runs(name, variant, diverged=True), "failed": results.failures(name, variant)}
    return next((why for why, runs in ended.items() if runs), None)


def far_probe(results: Results) -> ProbeRecord | None:
    """The probe farthest from training: the largest shift, or the longest text."""
    return max([*results.probes("shift"), *results.probes("length")], key=lambda probe: probe.x, default=None)


def grown_probe(results: Results) -> ProbeRecord | None:
    """The probe of the largest size beyond training: the longest text, or the largest canvas, "anywhere" if present."""
    canvases = [probe for probe in results.probes("canvas") if probe.variant == "anywhere"] or results.probes("canvas")
    return max([*canvases, *results.probes("length")], key=lambda probe: probe.x, default=None)


def best_rules(results: Results) -> dict[str, str]:
    """Each mechanism's best growth rule at the largest size, chosen by the same figure that is reported."""
    probe, measure = grown_probe(results), measure_of(results)
    if probe is None:
        return {}

    def rank(contender: Contender) -> float:
        return measure.rank(measure.interval(outcomes(results, contender, probe)).mean)

    ranked = sorted(contenders(results, probe), key=rank, reverse=True)
    return {one.name: one.growth for one in ranked if one.growth is not None}


def stand(results: Results, probe: ProbeRecord) -> Standings | None:
    """The ranking on a probe; None if the contenders have no seed in common, or no figure yet."""
    measure, rules = measure_of(results), best_rules(results)
    entries = [one for one in contenders(results, probe) if one.growth in (None, rules.get(one.name))]
    scored = {entry: outcomes(results, entry, probe) for entry in entries}
    every = [set(by_seed) for by_seed in scored.values()]
    shared = set.intersection(*every) if every else set()
    if not shared:
        return None
    counted = {entry: {seed: by_seed[seed] for seed in shared} for entry, by_seed in scored.items()}
    reached = {entry: measure.interval(by_seed) for entry, by_seed in counted.items()}
    # Sorting is stable: exact ties keep the order in which mechanisms were requested.
    best, *rest = sorted(counted, key=lambda entry: measure.rank(reached[entry].mean))
    standings = [Standing(best, reached[best], None)]
    standings += [Standing(one, reached[one], measure.ahead(counted[best], counted[one])) for one in rest]
    left_out = tuple(sorted(set.union(*every) - shared))
    chance = chance_of(results)
    at = [run.validation for run in results.runs(best.name) if run.validation is not None and run.seed in shared]
    validated = chance is None or not at or sum(at) / len(at) > chance
    return Standings(probe, measure, chance, tuple(standings), left_out, validated)


def chance_of(results: Results) -> float | None:
    """The accuracy of guessing, always the largest class if that is better; None without classes or accuracy."""
    if not results.task.classes or not measure_of(results).is_share:
        return None
    return max(1.0 / len(results.task.classes), results.task.largest_class or 0.0)


def in_words(probe: ProbeRecord) -> str:
    """A probe in a sentence: "on the test images", "at +3 pixels", "on the canvas 24 x 24, anywhere"."""
    if probe.group == "test":
        what = "images" if probe.image_size else "data"
        return f"on the test {what}" if probe.length is None else f"at {probe.label}"
    if probe.group == "shift" and "px" in probe.label:
        return f"at +{probe.x:g} pixel" + ("" if probe.x == 1 else "s")
    return f"on the canvas {probe.label}" if probe.group == "canvas" else f"at {probe.label}"
