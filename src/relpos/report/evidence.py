"""Figures that a statement about mechanisms rests on: how far one falls, how far one is ahead, and what that allows.

    fall      by how much a contender is worse on another probe than on the plain test, unit by unit
    ahead     by how much the first is better than the second on one probe, unit by unit

A unit is a test image, or a block of test text.

A finding speaks for a statement "more than L" where its whole interval is above L, against it where it is below L as a
whole, and is open else. From a quick run, and from one seed, every such finding is open: they are about the trained
models at hand and not about mechanisms.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relpos.report.measure import ACCURACY, Measure, measure_of
from relpos.report.results import (
    Contender,
    Results,
    contenders,
    cost,
    diverged,
    largest_canvas,
    longest,
    outcomes,
    probes,
    runs,
    token_counts,
)
from relpos.report.statistics import Interval, paired_difference
from relpos.report.wording import place_words, upright

Speaks = Literal["for", "against", "open"]
Probe = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One figure: whose, in words, and whether it speaks for the statement it was looked up for."""

    who: str
    figure: str
    speaks: Speaks


def more_than(results: Results, interval: Interval, limit: float) -> Speaks:
    """Whether the truth is above `limit`, as far as the interval tells."""
    if results["settings"]["quick"] or not interval.covers_seeds:
        return "open"
    return "for" if interval.low > limit else "against" if interval.high < limit else "open"


def opposite(speaks: Speaks) -> Speaks:
    """What speaks for a statement speaks against its opposite."""
    return "against" if speaks == "for" else "for" if speaks == "against" else "open"


def trained_probe(results: Results) -> Probe | None:
    """The plain test."""
    return next(iter(probes(results, "test")), None)


def farthest_size(results: Results) -> Probe | None:
    """The largest canvas, with the image anywhere where the task places it so; the longest text."""
    asked = probes(results, "canvas")
    largest = largest_canvas(results) or max(asked, key=lambda probe: float(probe["x"]), default=None)
    return largest or longest(results)


def where(probe: Probe) -> str:
    """ "at +3 pixels"."""
    return place_words(probe["group"], probe["label"], probe.get("x"))


def fall(results: Results, contender: Contender, probe: Probe) -> Interval | None:
    """By how much a contender is worse than on the plain test; None where it was not measured on both."""
    test = trained_probe(results)
    if test is None:
        return None
    before = outcomes(results, Contender(contender.position), test["id"])
    return _ahead(measure_of(results), before, outcomes(results, contender, probe["id"]))


def ahead(results: Results, first: Contender, second: Contender, probe: Probe) -> Interval | None:
    """By how much the first is better; None where they share no seed here."""
    return _ahead(measure_of(results), outcomes(results, first, probe["id"]), outcomes(results, second, probe["id"]))


def smaller_fall(results: Results, first: Contender, second: Contender, probe: Probe) -> Interval | None:
    """By how much the second falls further than the first."""
    test = trained_probe(results)
    if test is None:
        return None
    falls = []
    for contender in (second, first):
        before = outcomes(results, Contender(contender.position), test["id"])
        after = outcomes(results, contender, probe["id"])
        worse = 1 if measure_of(results).better == "higher" else -1
        falls.append({seed: worse * (before[seed] - after[seed]) for seed in set(before) & set(after)})
    return paired_difference(*falls) if set(falls[0]) & set(falls[1]) else None


def _ahead(measure: Measure, first: Any, second: Any) -> Interval | None:
    return measure.ahead(first, second) if set(first) & set(second) else None


def plain(results: Results, position: str, probe: Probe) -> Contender | None:
    """A mechanism on a probe by its own first rule, or, where that resamples its table, by one that does not.

    None where it has no figure.
    """
    found = [entry for entry in contenders(results, probe["id"]) if entry.position == position]
    own: list[str] = next((one["growth"] for one in results["mechanisms"] if one["name"] == position), [])
    first = [rule for rule in own if rule != "interpolated"]
    return min(found, key=lambda entry: first.index(entry.growth) if entry.growth in first else len(own), default=None)


def best(results: Results, names: Iterable[str], probe: Probe) -> Contender | None:
    """The contender of these mechanisms with the best mean on a probe."""
    allowed = set(names)
    found = [entry for entry in contenders(results, probe["id"]) if entry.position in allowed]
    measure = measure_of(results)

    def rank(entry: Contender) -> float:
        return measure.rank(measure.interval(outcomes(results, entry, probe["id"])).mean)

    return min(found, key=rank, default=None)


def lost(results: Results, name: str, *, some: bool = False) -> list[Finding]:
    """Against what is said of its quality where all of its runs diverged, or `some`; else nothing."""
    gone, left = diverged(results, name), runs(results, name)
    if not gone or (left and not some):
        return []
    settled = results["settings"]["seeds"] > 1 and not results["settings"]["quick"]
    figure = f"diverged in {len(gone)} of {len(gone) + len(left)} runs"
    return [Finding(name, figure, "against" if settled else "open")]


def fall_words(interval: Interval, measure: Measure = ACCURACY) -> str:
    """ "falls by 9.6 points (4 to 15)", "needs 0.12 bits more (0.10 to 0.14)"."""
    if measure.better == "lower":
        return f"needs {size_words(interval, measure)} {'more' if interval.mean >= 0 else 'fewer'}"
    verb = "falls" if interval.mean >= 0 else "rises"
    return f"{verb} by {size_words(interval, measure)}"


def ahead_words(interval: Interval, rival: str, measure: Measure = ACCURACY) -> str:
    """ "ahead of none by 3.1 points (1.2 to 5.0)", "behind none by ..."."""
    return f"{'ahead of' if interval.mean >= 0 else 'behind'} {rival} by {size_words(interval, measure)}"


def size_words(interval: Interval, measure: Measure = ACCURACY) -> str:
    """The size of a difference, with its interval."""
    size = upright(interval)
    return f"{measure.gap(size.mean)} ({measure.bounds(size)})"


def position_parameters(results: Results, position: str) -> int | None:
    """How many learned numbers describe position; None before a run has finished."""
    counts = [int(run["parameters"]["position"]) for run in results["records"] if run["position"] == position]
    return counts[0] if counts else None


def timed(results: Results, names: Sequence[str], tokens: int) -> dict[str, Mapping[str, Any]]:
    """The cost entries of those that were timed at a size."""
    entries = {name: cost(results, name, tokens) for name in names}
    return {name: entry for name, entry in entries.items() if entry is not None and entry.get("step_ms")}


def sizes_timed(results: Results, names: Sequence[str]) -> list[int]:
    """The smallest and the largest number of tokens at which any of these was timed."""
    found = [tokens for tokens in token_counts(results) if timed(results, names, tokens)]
    return sorted({found[0], found[-1]}) if found else []
