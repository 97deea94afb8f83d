"""Figures that a claim rests on, each speaking for it, against it, or neither.

A finding speaks for "more than L" where its whole 95% interval lies above L, against it where it lies below, and is
open else. From a quick run and from one seed every such finding is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from relpos.position.base.preset import find
from relpos.report.measure import Scored, measure_of
from relpos.report.standings import Contender, contenders, far_probe, grown_probe, in_words, outcomes
from relpos.report.statistics import Interval, paired_difference
from relpos.results import ProbeRecord, Results

Speaks = Literal["for", "against", "open"]
RELATIVE = {"bias", "rotation", "vectors"}
CHEAP = 1.10
"""A step of at most 1.1 times that of none costs next to nothing."""


@dataclass(frozen=True)
class Finding:
    """One figure: whose, in words, and whether it speaks for the claim."""

    who: str
    figure: str
    speaks: Speaks


def of_family(results: Results, *families: str) -> list[str]:
    """The compared mechanisms of some families."""
    return [one.name for one in results.mechanisms if one.family in families]


def relative(results: Results) -> list[str]:
    """Biases, rotations, vectors, and sums of those."""
    return [name for name in results.names if {find(part).family for part in name.split("+")} <= RELATIVE]


def alibis(results: Results) -> list[str]:
    """ALiBi with fixed slopes, as published."""
    return [name for name in results.names if name in ("alibi", "alibi_manhattan")]


def test(results: Results) -> ProbeRecord:
    """The plain test."""
    return results.task.probes[0]


def more_than(results: Results, interval: Interval, limit: float) -> Speaks:
    """Whether the truth is above `limit`, as far as the interval tells."""
    if results.settings.quick or not interval.covers_seeds:
        return "open"
    return "for" if interval.low > limit else "against" if interval.high < limit else "open"


def own_rule(results: Results, name: str, probe: ProbeRecord) -> Contender | None:
    """A mechanism by its own first rule, or, where that resamples its table, by one that does not."""
    found = [one for one in contenders(results, probe) if one.name == name]
    rules = [rule for rule in results.mechanism(name).growth if rule != "interpolated"]
    return min(found, key=lambda one: rules.index(one.growth) if one.growth in rules else len(rules), default=None)


def best(results: Results, names: Iterable[str], probe: ProbeRecord) -> Contender | None:
    """The best of these on a probe, by whatever rule."""
    measure, allowed = measure_of(results), set(names)
    found = [one for one in contenders(results, probe) if one.name in allowed]
    return min(found, key=lambda one: measure.rank(measure.interval(outcomes(results, one, probe)).mean), default=None)


def ahead(
    results: Results, first: Contender | None, second: Contender | None, probe: ProbeRecord | None, limit: float = 0.0
) -> list[Finding]:
    """Whether the first is ahead of the second by more than `limit`, which may be below 0."""
    if first is None or second is None or probe is None or first == second:
        return []
    one, other = outcomes(results, first, probe), outcomes(results, second, probe)
    if not set(one) & set(other):
        return []
    measure = measure_of(results)
    found = measure.ahead(one, other)
    side = "ahead of" if found.mean >= 0 else "behind"
    words = f"{side} {second.label} by {measure.gap(abs(found.mean))} {in_words(probe)}"
    return [Finding(first.label, words, more_than(results, found, limit))]


def falls(
    results: Results, names: Sequence[str], probe: ProbeRecord | None, limit: float, *, little: bool
) -> list[Finding]:
    """How much worse than on the plain test: more than `limit`, or, where it is to be `little`, less."""
    found = []
    for name in names if probe is not None else ():
        assert probe is not None
        contender = own_rule(results, name, probe)
        before = outcomes(results, Contender(name), test(results))
        after = {} if contender is None else outcomes(results, contender, probe)
        if contender is None or not set(before) & set(after):
            continue
        fall = measure_of(results).ahead(before, after)
        speaks = more_than(results, fall, limit)
        turned: dict[Speaks, Speaks] = {"for": "against", "against": "for", "open": "open"}
        words = f"worse by {measure_of(results).gap(fall.mean)} {in_words(probe)}"
        found.append(Finding(contender.label, words, turned[speaks] if little else speaks))
    return found


def _lost(results: Results, contender: Contender, probe: ProbeRecord) -> Scored:
    """What each unit loses from the plain test to a probe, by seed."""
    before, after = outcomes(results, Contender(contender.name), test(results)), outcomes(results, contender, probe)
    worse = 1 if measure_of(results).is_share else -1
    return {seed: worse * (before[seed] - after[seed]) for seed in set(before) & set(after)}


def falls_less(results: Results, probe: ProbeRecord | None) -> list[Finding]:
    """How much less each relative mechanism loses than the absolute one that is best there."""
    rival = None if probe is None else best(results, of_family(results, "absolute"), probe)
    found = []
    for name in relative(results) if rival is not None else ():
        assert probe is not None
        assert rival is not None
        contender = own_rule(results, name, probe)
        lost = [_lost(results, one, probe) for one in (rival, contender) if one is not None]
        if contender is not None and set(lost[0]) & set(lost[1]):
            less = paired_difference(*lost, share=False)
            words = f"loses {measure_of(results).gap(less.mean)} less than {rival.label} {in_words(probe)}"
            found.append(Finding(contender.label, words, more_than(results, less, 0.0)))
    return found


def ends(results: Results, names: Sequence[str]) -> list[int]:
    """The smallest and the largest number of tokens at which any of these was timed."""
    timed = sorted({one.tokens for one in results.costs if one.name in names and one.step_ms is not None})
    return sorted({timed[0], timed[-1]}) if timed else []


def cheap(results: Results, names: Sequence[str], most: float = CHEAP) -> list[Finding]:
    """Step times, as a multiple of the first's."""
    found = []
    for tokens in ends(results, names):
        for name in names:
            entry = results.cost(name, tokens)
            if entry is not None and entry.ratio is not None:
                words = f"{entry.ratio:.2f} times the step at {tokens:,} tokens"
                found.append(Finding(name, words, "for" if entry.ratio <= most else "against"))
    return found


def light(results: Results, names: Sequence[str], most: float = CHEAP) -> list[Finding]:
    """Memory at the most tokens, as a multiple of the first's."""
    found, first = [], "none" if results.settings.what == "position" else results.names[0]
    for tokens in ends(results, names)[-1:]:
        beside = results.cost(first, tokens)
        for name in names:
            entry = results.cost(name, tokens)
            if entry and beside and entry.peak_memory_mib and beside.peak_memory_mib and name != first:
                share = entry.peak_memory_mib / beside.peak_memory_mib
                words = f"{share:.2f} times the memory of {first} at {tokens:,} tokens"
                found.append(Finding(name, words, "for" if share <= most else "against"))
    return found


def parameters(results: Results, names: Sequence[str], fewer_than: int | None) -> list[Finding]:
    """Position parameters: none, or fewer than so many."""
    found = []
    for name in names:
        own = next((run.parameters.position for run in results.records if run.name == name), None)
        if own is not None:
            right = own == 0 if fewer_than is None else own < fewer_than
            found.append(Finding(name, f"{own:,} position parameters", "for" if right else "against"))
    return found


def behind_first(results: Results, names: Sequence[str], limit: float) -> list[Finding]:
    """Whether choices are behind the first of their kind by at most `limit` on the plain test."""
    asked = [name for name in names if name in results.names]
    return [
        one
        for name in asked
        for one in ahead(results, Contender(name), Contender(results.names[0]), test(results), -limit)
    ]


far, grown = far_probe, grown_probe
