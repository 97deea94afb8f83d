"""What the comparison decides: on each headline probe, who is best, who cannot be told apart from it, who is worse.

The headline probes are the test images, the largest shift, and the largest canvas with the digit anywhere; of text, the
trained and the longest length. Contenders are ranked by their mean over the seeds that all of them have. Then each is
compared with the first in pairs:

    interval of (best - this) covers 0      "no difference"
    interval of (best - this) is above 0    "worse"

"No difference" is no claim that two are equal: it says that these images and seeds do not tell them apart. Chance is
treated alike, by the interval of an accuracy (bits per byte have no chance):

    above chance as a whole                 "above"
    at most 5 points above chance           "no better"
    else, it covers chance and much more    "unclear"

The words are made in `wording.py`; this file holds figures alone.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relpos.report.diverged import Diverged, all_diverged, find_diverged
from relpos.report.measure import Measure, measure_of
from relpos.report.results import (
    Contender,
    Results,
    contenders,
    cost,
    diverged,
    largest_canvas,
    largest_shift,
    longest,
    outcomes,
    positions,
    probes,
    runs,
    token_counts,
    unmeasured,
)
from relpos.report.statistics import Interval

Relation = Literal["best", "no difference", "worse"]
AgainstChance = Literal["above", "unclear", "no better"]
CLOSE_TO_CHANCE = 0.05
"""An interval that reaches no further above chance than this says that there is nothing worth having."""


@dataclass(frozen=True)
class Standing:
    """One contender on one probe. `difference` is how far the best is ahead, None for the best itself."""

    contender: Contender
    reached: Interval
    relation: Relation
    difference: Interval | None
    against_chance: AgainstChance


@dataclass(frozen=True)
class ProbeVerdict:
    """A probe's contenders, best first.

    `seeds` are those that every contender has, the only ones counted; `left_out_seeds` those that only some have. Where
    they share none, `standings` is empty. `unmeasured` names who has no figure here, with the reason.
    """

    probe: str
    group: str
    label: str
    x: float | None
    variant: str | None
    measure: Measure
    chance: float | None
    standings: tuple[Standing, ...]
    seeds: tuple[int, ...]
    left_out_seeds: tuple[int, ...]
    unmeasured: tuple[tuple[Contender, str], ...]

    @property
    def leaders(self) -> tuple[Standing, ...]:
        """The best and everyone who cannot be told apart from it."""
        return tuple(standing for standing in self.standings if standing.relation != "worse")

    @property
    def worse(self) -> tuple[Standing, ...]:
        """The standings below the best."""
        return tuple(standing for standing in self.standings if standing.relation == "worse")


@dataclass(frozen=True)
class Reversal:
    """`first` is better than `second` on one probe and worse on another, both beyond the interval."""

    first: str
    second: str
    here: ProbeVerdict
    here_difference: Interval
    there: ProbeVerdict
    there_difference: Interval


@dataclass(frozen=True)
class LeaderChange:
    """`first` leads with the recipe's position learning rate, by `ahead`; `second` at x 1, by `plain_ahead`."""

    first: str
    ahead: Interval
    second: str
    plain_ahead: Interval


@dataclass(frozen=True)
class RecipeEffect:
    """One mechanism trained at the recipe's position learning rate and at 1 x the learning rate of the rest.

    `difference` is by how much the recipe's is better. `leader_change` is about all mechanisms of this probe; None
    where the best under the two are one and the same, or cannot be told apart under either.
    """

    position: str
    multiplier: float
    probe: str
    recipe: Interval
    plain: Interval
    difference: Interval
    leader_change: LeaderChange | None


@dataclass(frozen=True)
class CostLine:
    """One mechanism's training step at one number of tokens; None where it was not measured, with the reason."""

    position: str
    tokens: int
    ratio: float | None
    milliseconds: float | None
    memory_mib: float | None
    reason: str | None


@dataclass(frozen=True)
class Verdict:
    """Everything the words are made of."""

    measure: Measure
    quick: bool
    seeds: int
    probes: tuple[ProbeVerdict, ...]
    reversals: tuple[Reversal, ...]
    recipe_effects: tuple[RecipeEffect, ...]
    without_growth: tuple[str, ...]
    costs: tuple[CostLine, ...]
    unfinished: int
    diverged: tuple[Diverged, ...]
    all_diverged: bool

    def probe(self, *groups: str) -> ProbeVerdict | None:
        """The headline probe of one of these groups, if the task has it."""
        return next((probe for probe in self.probes if probe.group in groups), None)


def judge(results: Results) -> Verdict:
    """The verdict on a whole comparison, finished or not."""
    judged = tuple(judge_probe(results, probe) for probe in headline_probes(results))
    asked = int(results["settings"]["seeds"])
    ended = [len(runs(results, name)) + len(diverged(results, name)) for name in positions(results)]
    return Verdict(
        measure=measure_of(results),
        quick=bool(results["settings"]["quick"]),
        seeds=min((len(probe.seeds) for probe in judged if probe.standings), default=0),
        probes=judged,
        reversals=_reversals(results, judged),
        recipe_effects=_recipe_effects(results, judged),
        without_growth=_without_growth(results),
        costs=_costs(results),
        unfinished=sum(max(0, asked - count) for count in ended),
        diverged=find_diverged(results),
        all_diverged=all_diverged(results),
    )


def headline_probes(results: Results) -> list[Mapping[str, Any]]:
    """The plain test, the largest shift, the largest canvas (digit anywhere), the longest text: what there is."""
    chosen = [next(iter(probes(results, "test")), None), largest_shift(results), largest_canvas(results)]
    chosen.append(longest(results))
    return [probe for probe in chosen if probe is not None]


def judge_probe(results: Results, probe: Mapping[str, Any], variant: str = "recipe") -> ProbeVerdict:
    """Rank the contenders of one probe and compare each with the first."""
    measure, chance = measure_of(results), chance_of(results)
    entries = contenders(results, probe["id"], variant)
    scored = {entry: outcomes(results, entry, probe["id"], variant) for entry in entries}
    everyone = [set(by_seed) for by_seed in scored.values()]
    shared = set.intersection(*everyone) if everyone else set()
    left_out = set.union(*everyone) - shared if everyone else set()
    standings: list[Standing] = []
    if shared:
        counted = {entry: {seed: by_seed[seed] for seed in shared} for entry, by_seed in scored.items()}
        reached = {entry: measure.interval(by_seed) for entry, by_seed in counted.items()}
        # Sorting is stable: exact ties stay in the order the mechanisms were asked for.
        ranked = sorted(counted, key=lambda entry: measure.rank(reached[entry].mean))
        best = ranked[0]
        for entry in ranked:
            difference = None if entry == best else measure.ahead(counted[best], counted[entry])
            relation: Relation = "best"
            if difference is not None:
                relation = "no difference" if difference.covers_zero else "worse"
            beside = _against_chance(reached[entry], chance)
            standings.append(Standing(entry, reached[entry], relation, difference, beside))
    return ProbeVerdict(
        probe=probe["id"],
        group=probe["group"],
        label=probe["label"],
        x=probe.get("x"),
        variant=probe.get("variant"),
        measure=measure,
        chance=chance,
        standings=tuple(standings),
        seeds=tuple(sorted(shared)),
        left_out_seeds=tuple(sorted(left_out)),
        unmeasured=tuple(unmeasured(results, probe["id"]).items()),
    )


def chance_of(results: Results) -> float | None:
    """What guessing reaches; None where nothing is guessed."""
    return 1.0 / len(results["task"]["classes"]) if measure_of(results).is_share else None


def _against_chance(reached: Interval, chance: float | None) -> AgainstChance:
    if chance is None or reached.low > chance:
        return "above"
    return "no better" if reached.high <= chance + CLOSE_TO_CHANCE else "unclear"


def _reversals(results: Results, judged: tuple[ProbeVerdict, ...]) -> tuple[Reversal, ...]:
    """Pairs whose order on the plain test turns round on the largest shift, or in the longest text; largest turn first.

    Canvases are left out: there a mechanism appears once for every growth rule, and a pair has no one difference.
    """
    test = next((probe for probe in judged if probe.group == "test"), None)
    far = next((probe for probe in judged if probe.group in ("shift", "length")), None)
    if test is None or far is None:
        return ()
    # In the order of the plain test: whoever turns out better there stands first in a pair.
    ranks = {entry.contender.position: rank for rank, entry in enumerate(test.standings)}
    found: list[Reversal] = []
    entries = [entry.contender for entry in far.standings if entry.contender.position in ranks]
    for first, second in itertools.permutations(entries, 2):
        if ranks[first.position] >= ranks[second.position]:
            continue
        here = _ahead(results, Contender(first.position), Contender(second.position), test)
        there = _ahead(results, first, second, far)
        if here.low > 0.0 and there.high < 0.0:
            found.append(Reversal(first.label, second.label, test, here, far, there))
    return tuple(sorted(found, key=lambda reversal: reversal.there_difference.mean - reversal.here_difference.mean))


def _ahead(results: Results, first: Contender, second: Contender, probe: ProbeVerdict) -> Interval:
    one, other = (
        {seed: by_seed[seed] for seed in probe.seeds}
        for by_seed in (outcomes(results, first, probe.probe), outcomes(results, second, probe.probe))
    )
    return probe.measure.ahead(one, other)


def _recipe_effects(results: Results, judged: tuple[ProbeVerdict, ...]) -> tuple[RecipeEffect, ...]:
    found: list[RecipeEffect] = []
    measure = measure_of(results)
    for probe in judged:
        if probe.group in ("canvas", "length"):  # there one mechanism appears under several rules
            continue
        pairs = []
        for entry in probe.standings:
            by_seed = outcomes(results, entry.contender, probe.probe)
            plain_by_seed = outcomes(results, entry.contender, probe.probe, "x1")
            seeds = set(by_seed) & set(plain_by_seed)
            if not seeds:
                continue
            at_recipe = measure.interval({seed: by_seed[seed] for seed in seeds})
            at_plain = measure.interval({seed: plain_by_seed[seed] for seed in seeds})
            pairs.append((entry.contender, at_recipe, at_plain, measure.ahead(by_seed, plain_by_seed)))
        change = _leader_change(results, probe)
        for contender, at_recipe, at_plain, difference in pairs:
            multiplier = float(runs(results, contender.position)[0]["position_learning_rate_multiplier"])
            found.append(
                RecipeEffect(contender.label, multiplier, probe.probe, at_recipe, at_plain, difference, change)
            )
    return tuple(found)


def _leader_change(results: Results, probe: ProbeVerdict) -> LeaderChange | None:
    """Whether someone else leads at x 1, over the seeds that everyone has under both rates.

    What learns nothing about position is the same model under both. While the x 1 runs of a mechanism that learns are
    missing, who leads there is not known.
    """
    recipe = {s.contender: outcomes(results, s.contender, probe.probe) for s in probe.standings}
    plain = {
        entry: outcomes(results, entry, probe.probe, "x1") if _learns(results, entry.position) else by_seed
        for entry, by_seed in recipe.items()
    }
    seeds = set(probe.seeds).intersection(*plain.values())
    if not seeds:
        return None
    recipe, plain = (
        {entry: {seed: by_seed[seed] for seed in seeds} for entry, by_seed in scored.items()}
        for scored in (recipe, plain)
    )
    measure = probe.measure
    first = min(recipe, key=lambda entry: measure.rank(measure.interval(recipe[entry]).mean))
    second = min(plain, key=lambda entry: measure.rank(measure.interval(plain[entry]).mean))
    if first == second:
        return None
    ahead = measure.ahead(recipe[first], recipe[second])
    plain_ahead = measure.ahead(plain[second], plain[first])
    if ahead.low <= 0.0 or plain_ahead.low <= 0.0:
        return None
    return LeaderChange(first.label, ahead, second.label, plain_ahead)


def _learns(results: Results, position: str) -> bool:
    return int(runs(results, position)[0]["parameters"]["position"]) > 0


def _without_growth(results: Results) -> tuple[str, ...]:
    if not probes(results, "canvas") and not probes(results, "length"):
        return ()
    return tuple(mechanism["name"] for mechanism in results["mechanisms"] if not mechanism["growth"])


def _costs(results: Results) -> tuple[CostLine, ...]:
    lines: list[CostLine] = []
    for tokens in token_counts(results):
        for position in positions(results):
            entry = cost(results, position, tokens)
            if entry is None:
                lines.append(CostLine(position, tokens, None, None, None, "not measured"))
                continue
            step = entry.get("step_ms")
            lines.append(
                CostLine(
                    position=position,
                    tokens=tokens,
                    ratio=entry.get("ratio"),
                    milliseconds=None if step is None else float(step["median"]),
                    memory_mib=entry.get("peak_memory_mib"),
                    reason=(entry.get("reason") or "not measured") if step is None else None,
                )
            )
    return tuple(lines)
