"""The verdict in words: short sentences, each with its figure and its interval.

Accuracies are percent, their differences percentage points; text is measured in bits per byte. The sentences claim no
more than `verdict.py` decided: "cannot be told apart" is what an interval that covers zero allows one to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relpos.report.measure import ACCURACY, Measure
from relpos.report.results import Contender
from relpos.report.statistics import Interval
from relpos.report.verdict import CostLine, ProbeVerdict, RecipeEffect, Reversal, Standing, Verdict

NAMED_AT_MOST = 4
"""How many worse contenders, or costs, a sentence names one by one before it sums them up."""

MANY = 6
"""Above so many contenders a sentence names no more than two one by one."""

DECISIVE = 0.02
"""Below this difference, two percentage points or a fiftieth of a bit, no sentence says that the recipe decides."""

QUICK = "This was a quick run with less training: it shows that everything works and is no verdict."


@dataclass(frozen=True)
class Sentence:
    """One statement, and what it is about: "test", "shift", "canvas", "length", "order",
    "growth", "recipe", "cost", "memory"."""

    topic: str
    text: str


def interval_words(interval: Interval, measure: Measure = ACCURACY) -> str:
    """The interval, named for what it is over: with one seed, less than one may think."""
    return f"95% {'interval' if interval.covers_seeds else f'{measure.unit} interval'} {measure.bounds(interval)}"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def place(probe: ProbeVerdict) -> str:
    """Where a sentence speaks of: "on the test images", "at +3 pixels", "on the canvas 24 x 24, anywhere"."""
    return place_words(probe.group, probe.label, probe.x)


def place_words(group: str, label: str, x: float | None) -> str:
    """The same for a probe's fields."""
    if group == "test" and label == "test":
        return "on the test images"
    if group == "shift" and x is not None and "px" in label:
        return f"at +{x:g} pixel" + ("" if x == 1 else "s")
    if group == "canvas":
        return f"on the canvas {label}"
    return f"at {label}"


def headline(verdict: Verdict) -> str:
    """The answer in one line."""
    return ("Quick run, no verdict: " if verdict.quick else "") + _answer(verdict)


def _answer(verdict: Verdict) -> str:
    test, far, figure_of = verdict.probe("test"), verdict.probe("shift", "length"), verdict.measure.figure
    shown = [probe for probe in (far, test) if probe is not None and probe.standings]
    if not shown:
        why = "every training run diverged." if verdict.all_diverged else "there is nothing to compare yet."
        return why if verdict.quick else capital(why)
    first = shown[0]
    best = first.standings[0]
    if len(first.standings) == 1:
        figures = listed([f"{figure_of(probe.standings[0].reached.mean)} {place(probe)}" for probe in reversed(shown)])
        return f"{best.contender.label} alone was measured: {figures}."
    if _nobody(first):
        return f"{capital(place(first))} nobody is better than chance ({_chance(first)})."
    once = "" if verdict.seeds > 1 else " in this one seed"
    if best.against_chance != "above":
        rivals = [standing.contender.label for standing in first.leaders[1:]]
        nor = f" nor from {_some(rivals)}" if rivals else ""
        highest = f"{best.contender.label} is highest {place(first)} with {figure_of(best.reached.mean)}{once}"
        return f"{highest}, but cannot be told apart from chance ({_chance(first)}){nor}."
    figure = f"{figure_of(best.reached.mean)} {place(first)}"
    if len(first.leaders) > 1:
        names = [standing.contender.label for standing in first.leaders]
        told = listed(names) if len(names) <= NAMED_AT_MOST else f"{names[0]} and {len(names) - 1} others"
        low, high = sorted((first.leaders[-1].reached.mean, best.reached.mean))
        spread = verdict.measure.span(low, high)
        return f"{told} cannot be told apart {place(first)} ({spread}){once}."
    if len(shown) == 1:
        return f"{best.contender.label} is best{once}: {figure}."
    on_test = next((s for s in shown[1].leaders if s.contender.position == best.contender.position), None)
    if on_test is None:
        leader = shown[1].standings[0]
        other = f"{figure_of(leader.reached.mean)} {place(shown[1])}"
        return f"{best.contender.label} is best{once} with {figure}, but {leader.contender.label} leads with {other}."
    rivals = [s.contender.label for s in shown[1].leaders if s.contender.position != best.contender.position]
    beside = f", where {_some(rivals)} cannot be told apart from it" if rivals else ""
    also = f"{figure_of(on_test.reached.mean)} {place(shown[1])}"
    return f"{best.contender.label} is best{once}: {figure}, and {also}{beside}."


def cautions(verdict: Verdict) -> list[str]:
    """What the reader must know before believing the rest."""
    found: list[str] = []
    if verdict.quick:
        found.append(QUICK)
    if verdict.seeds == 1:
        found.append(
            f"One seed: the intervals cover the choice of {verdict.measure.tested}, but seed-to-seed variation is not "
            "covered, and it can be larger than the differences here. Ask for --seeds 3 or more before deciding."
        )
    elif 1 < verdict.seeds < 5:
        found.append(
            f"{verdict.seeds} seeds say little about how much results vary from seed to seed, so intervals are wide "
            "where seeds differ; more seeds may tell apart what cannot be told apart here."
        )
    if verdict.unfinished:
        found.append(f"Unfinished: {verdict.unfinished} of the training runs asked for are not there yet.")
    found += [one.words() for one in verdict.diverged]
    for probe in verdict.probes:
        if probe.left_out_seeds:
            seeds = listed([str(seed) for seed in probe.left_out_seeds])
            many = "seeds" if len(probe.left_out_seeds) > 1 else "seed"
            what = f"{many} {seeds} left out: not every mechanism has finished there"
            if not probe.standings:
                what = "no comparison: the mechanisms share no finished seed"
            found.append(f"{capital(place(probe))}, {what}.")
    return found


def sentences(verdict: Verdict) -> list[Sentence]:
    """The whole verdict, in the order one reads it."""
    test = verdict.probe("test")
    on_test = {} if test is None else {s.contender.position: s.reached.mean for s in test.standings}
    found = [Sentence(probe.group, probe_sentence(probe, on_test)) for probe in verdict.probes if probe.standings]
    if verdict.reversals:
        more = len(verdict.reversals) - 1
        also = "" if not more else f" So do {more} more pairs." if more > 1 else " So does one more pair."
        found.append(Sentence("order", _reversal_sentence(verdict.reversals[0]) + also))
    if verdict.without_growth:
        who = f"{listed(verdict.without_growth)} {'has' if len(verdict.without_growth) == 1 else 'have'}"
        beyond = "a larger grid" if verdict.measure.is_share else "longer inputs"
        found.append(Sentence("growth", f"{who} no rule for {beyond}, and so no figure there."))
    for probe in verdict.probes:
        effects = [effect for effect in verdict.recipe_effects if effect.probe == probe.probe]
        if effects:
            found.append(Sentence("recipe", recipe_sentence(effects, place(probe), verdict.measure)))
    found.extend(_cost_sentences(verdict.costs))
    return found


def probe_sentence(probe: ProbeVerdict, on_test: dict[str, float] | None = None) -> str:
    """One probe: its leaders, then who is worse and by how much. `on_test` lets it say "keeps" and "falls to"."""
    best = probe.standings[0]
    start = f"{capital(place(probe))}{':' if probe.group == 'canvas' else ''} "
    if len(probe.standings) == 1:
        words = interval_words(best.reached, probe.measure)
        figure = f"{_reaches(best, probe, on_test)} ({words}{_against_chance(best, probe)})"
        return f"{start}{figure}; nothing to compare it with."
    if _nobody(probe):
        found = f"{best.contender.label}, has {probe.measure.figure(best.reached.mean)}"
        return f"{start}nobody is better than chance ({_chance(probe)}); the best, {found}."
    lead = (
        start + (_reaches(best, probe, on_test) if len(probe.leaders) == 1 else _tie(probe)) + _leaders_at_chance(probe)
    )
    worse = probe.worse
    if not worse:
        return lead + "."
    if len(worse) <= _named(probe):
        told = [f"{_reaches(s, probe, on_test)} ({_behind(s, probe, full=s is worse[0])})" for s in worse]
        return "; ".join([lead, *told]) + "."
    nearest, furthest = (
        f"{probe.measure.figure(s.reached.mean)} with {s.contender.label} ({_behind(s, probe, full=s is worse[0])})"
        for s in (worse[0], worse[-1])
    )
    towards = "down" if probe.measure.better == "higher" else "up"
    return f"{lead}; the other {len(worse)} are worse, from {nearest} {towards} to {furthest}."


def recipe_sentence(effects: Sequence[RecipeEffect], where: str, measure: Measure = ACCURACY) -> str:
    """The recipe's position learning rate against x 1 on one probe, for the mechanisms trained with both."""
    times = "\N{MULTIPLICATION SIGN}"
    start = f"Position learning rate {times}1 instead of {times}{effects[0].multiplier:g}, {where}: "
    changed = sorted((e for e in effects if not e.difference.covers_zero), key=lambda e: -abs(e.difference.mean))
    same = [effect.position for effect in effects if effect.difference.covers_zero]
    parts = []
    for effect in changed[:NAMED_AT_MOST]:
        size = upright(effect.difference)
        verb = "falls" if effect.plain.mean < effect.recipe.mean else "rises"
        figures = f"from {measure.figure(effect.recipe.mean)} to {measure.figure(effect.plain.mean)}"
        gap = f"difference {measure.gap(size.mean)}, {interval_words(size, measure)}"
        parts.append(f"{effect.position} {verb} {figures} ({gap})")
    if len(changed) > NAMED_AT_MOST:
        parts.append(f"{len(changed) - NAMED_AT_MOST} more differ by less")
    if same:
        rest = f"{len(same)} others" if changed else f"any of {len(same)}"
        parts.append(f"no difference for {listed(same) if len(same) <= NAMED_AT_MOST else rest}")
    change = effects[0].leader_change
    decided = [effect.position for effect in changed if abs(effect.difference.mean) >= DECISIVE]
    close = ""
    if change is not None:
        with_recipe = f"{times}{effects[0].multiplier:g} ({_by(change.ahead, measure)})"
        with_plain = f"{times}1 ({_by(change.plain_ahead, measure)})"
        close = f" The recipe decides who leads: {change.first} with {with_recipe}, {change.second} with {with_plain}."
    elif decided:
        close = f" For {_some(decided)} the recipe decides."
    return f"{start}{'; '.join(parts)}.{close}"


def _reversal_sentence(reversal: Reversal) -> str:
    measure = reversal.here.measure
    there = "on the largest shift" if reversal.there.group == "shift" else place(reversal.there)
    return (
        f"The order turns round: {reversal.first} is ahead of {reversal.second} {place(reversal.here)} "
        f"({measure.gap(reversal.here_difference.mean)}, {interval_words(reversal.here_difference, measure)}) "
        f"and behind it {there} ({measure.gap(-reversal.there_difference.mean)}, "
        f"{interval_words(upright(reversal.there_difference), measure)})."
    )


def _cost_sentences(costs: Sequence[CostLine]) -> list[Sentence]:
    found: list[Sentence] = []
    for tokens in sorted({line.tokens for line in costs}):
        here = [line for line in costs if line.tokens == tokens]
        where = f"at {tokens:,} tokens"
        compared = [line for line in here if line.position != "none"]
        ratios = sorted((line.ratio, line.position) for line in compared if line.ratio is not None)
        if ratios:
            text = _figures([(f"{ratio:.2f}", name) for ratio, name in ratios])
            found.append(Sentence("cost", f"Time of a training step {where}, as a multiple of none's: {text}."))
        else:
            times = sorted((line.milliseconds, line.position) for line in here if line.milliseconds is not None)
            if times:
                text = _figures([(f"{time:.1f} ms", name) for time, name in times])
                found.append(Sentence("cost", f"Time of a training step {where}: {text}."))
        left_out = [line for line in here if line.reason is not None]
        for reason in dict.fromkeys(line.reason for line in left_out):
            names = listed([line.position for line in left_out if line.reason == reason])
            found.append(Sentence("cost", f"Not timed {where}: {names} ({reason})."))
    measured = [(line.memory_mib, line.position, line.tokens) for line in costs if line.memory_mib is not None]
    if measured:
        most = max(tokens for _, _, tokens in measured)
        memory = sorted((mib, name) for mib, name, tokens in measured if tokens == most)
        text = _figures([(f"{mib:,.0f} MiB", name) for mib, name in memory])
        found.append(Sentence("memory", f"Peak memory of a training step at {most:,} tokens: {text}."))
    return found


def _figures(figures: Sequence[tuple[str, str]]) -> str:
    """Sorted figures with their names, all of them or the two ends."""
    if len(figures) <= NAMED_AT_MOST:
        return listed([f"{figure} with {name}" for figure, name in figures])
    (low, cheapest), (high, dearest) = figures[0], figures[-1]
    return f"between {low} ({cheapest}) and {high} ({dearest})"


def _reaches(standing: Standing, probe: ProbeVerdict, on_test: dict[str, float] | None) -> str:
    """ "keeps" from nine tenths of its own test accuracy upward, "falls to" below; elsewhere plainly "has"."""
    label, reached, figure = standing.contender.label, standing.reached.mean, probe.measure.figure
    if not probe.measure.is_share:
        return f"{label} needs {figure(reached)}"
    before = (on_test or {}).get(standing.contender.position)
    if probe.group != "shift" or before is None:
        return f"{label} has {figure(reached)}"
    verb = "keeps" if reached >= 0.9 * before else "falls to"
    return f"{label} {verb} {figure(reached)}"


def _behind(standing: Standing, probe: ProbeVerdict, *, full: bool) -> str:
    """How far behind the best; the first of a sentence says what the figures are, the others follow its pattern."""
    assert standing.difference is not None
    measure, size = probe.measure, probe.measure.gap(standing.difference.mean)
    words = f"difference {size}, {interval_words(standing.difference, measure)}"
    if not full:
        words = f"{size}, {measure.bounds(standing.difference)}"
    return words + _against_chance(standing, probe)


def _by(interval: Interval, measure: Measure) -> str:
    return f"by {measure.gap(interval.mean)}, {interval_words(interval, measure)}"


def _chance(probe: ProbeVerdict) -> str:
    return "" if probe.chance is None else probe.measure.figure(probe.chance)


def _nobody(probe: ProbeVerdict) -> bool:
    """Whether everyone's whole interval lies close to chance or below: a claim, unlike a failure to tell apart."""
    return all(standing.against_chance == "no better" for standing in probe.standings)


def _against_chance(standing: Standing, probe: ProbeVerdict) -> str:
    """The end of a bracket; empty for who is above chance."""
    if standing.against_chance == "above":
        return ""
    words = "no better than" if standing.against_chance == "no better" else "cannot be told apart from"
    return f"; {words} chance, {_chance(probe)}"


def _leaders_at_chance(probe: ProbeVerdict) -> str:
    """Which of the leaders are not above chance, with their intervals: their brackets hold differences."""
    told = ""
    for state, words in (("unclear", "cannot be told apart from"), ("no better", "no better than")):
        found = [standing for standing in probe.leaders if standing.against_chance == state]
        if found:
            names = _some([f"{s.contender.label} ({interval_words(s.reached, probe.measure)})" for s in found])
            be = "" if state == "unclear" else "is " if len(found) == 1 else "are "
            told += f"; {names} {be}{words} chance, {_chance(probe)}"
    return told


def _tie(probe: ProbeVerdict) -> str:
    (best, *rivals), measure = probe.leaders, probe.measure
    if all(rival.difference is not None and rival.difference.mean == 0.0 for rival in rivals):
        names = [standing.contender.label for standing in probe.leaders]
        return f"{_some(names)} tie at {measure.figure(best.reached.mean)}"
    first = f"{best.contender.label} ({measure.figure(best.reached.mean)})"
    if len(rivals) > _named(probe):
        last = rivals[-1]
        return (
            f"{first} cannot be told apart from {len(rivals)} others, {'down' if measure.is_share else 'up'} to "
            f"{last.contender.label} ({measure.figure(last.reached.mean)}): no difference"
        )
    others = []
    for rival in rivals:
        assert rival.difference is not None
        gap = f"difference {measure.gap(rival.difference.mean)}, {interval_words(rival.difference, measure)}"
        others.append(f"{rival.contender.label} ({measure.figure(rival.reached.mean)}, {gap})")
    return f"{listed([first, *others])} cannot be told apart: no difference"


def _named(probe: ProbeVerdict) -> int:
    return NAMED_AT_MOST if len(probe.standings) <= MANY else 2


def _some(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= NAMED_AT_MOST else f"{', '.join(names[:2])} and {len(names) - 2} more"


def upright(interval: Interval) -> Interval:
    """The interval of the difference's size: turned round where the difference is negative."""
    if interval.mean >= 0.0:
        return interval
    return replace(interval, mean=-interval.mean, low=-interval.high, high=-interval.low)


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return text[:1].upper() + text[1:]


def unmeasured_words(probe: ProbeVerdict) -> list[str]:
    """ "name: reason", one for each reason."""
    by_reason: dict[str, list[Contender]] = {}
    for contender, reason in probe.unmeasured:
        by_reason.setdefault(reason, []).append(contender)
    return [f"{listed([contender.label for contender in found])}: {reason}" for reason, found in by_reason.items()]
