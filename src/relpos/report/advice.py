"""The first lines of the page: at most three of advice, then the cautions.

    a quick run                                   it works; nothing is ranked
    one seed                                      undecided: run with --seeds 3; who is ahead so far
    nothing above chance                          undecided: train longer
    `none` is tied with the best                  position does not matter here, or more tests are needed to know
    all are tied with the best                    undecided: more seeds
    one is tied with the best everywhere          choose it
    else                                          one choice if objects move (inputs grow), one if they do not

The last lines name the cheapest of those tied with the best, and say whether rankings flip under shift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from relpos.report.measure import Measure, measure_of, unit_of
from relpos.report.standings import Standing, Standings, contenders, far_probe, in_words, outcomes, stand
from relpos.report.verdict import ComparisonVerdict, undecided
from relpos.results import Results

NAMED_AT_MOST = 3
AS_FAST = 1.05
"""Up to this ratio, two times count as equal."""


@dataclass(frozen=True)
class Advice:
    """`lines` start the page, `named` are the mechanisms in them, `cautions` follow, `notes` accompany the table.

    `verdict` says the same as `lines`, with the command that would decide.
    """

    lines: tuple[str, ...]
    named: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: ComparisonVerdict = ComparisonVerdict(False, (), "")


def advise(results: Results) -> Advice:
    """The advice of a comparison, finished or not."""
    far = far_probe(results)
    test, away = stand(results, results.task.probes[0]), stand(results, far) if far is not None else None
    answer = _answer(results, test, away)
    notes = [] if results.settings.quick else [*_flips(test, away), *_plain_rate(results)]
    notes = [note for note in notes if note not in answer.lines]
    why = " ".join(answer.lines[:3])
    if answer.needs is not None:
        verdict = undecided(results, why, longer=answer.needs == "steps")
    else:
        verdict = ComparisonVerdict(bool(answer.choose), tuple(answer.choose), why)
    cautions = tuple(_cautions(results, test, away))
    return Advice(tuple(answer.lines[:3]), tuple(answer.named), cautions, tuple(notes), verdict)


def decided(results: Results) -> str | None:
    """The name of the one that is better than all others on the plain test; None while undecided.

    Undecided: a quick run, one seed, only one measured, a tie, or nothing better than chance.
    """
    test = stand(results, results.task.probes[0])
    if results.settings.quick or test is None or len(test.entries) < 2 or not test.best.reached.covers_seeds:
        return None
    return test.best.contender.name if len(test.tied) == 1 and test.beats_chance else None


def listed(names: Sequence[str], most: int = 99) -> str:
    """ "a", "a and b", "a, b and c", "a, b and 4 more"."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


@dataclass(frozen=True)
class _Answer:
    """The first lines, the names to mark, those to choose, and whether longer training or more seeds would decide."""

    lines: list[str]
    named: Sequence[str] = ()
    choose: Sequence[str] = ()
    needs: Literal["seeds", "steps"] | None = None


def _answer(results: Results, test: Standings | None, away: Standings | None) -> _Answer:
    if results.records and all(run.diverged is not None for run in results.records):
        return _Answer(["Every training run diverged."])
    if results.failed and not results.records:
        return _Answer(["Every training run failed."])
    if results.settings.quick:
        trained, asked = sum(bool(results.runs(name)) for name in results.names), len(results.names)
        lines = [
            f"It works: {trained} of {asked} trained, measured and drawn.",
            "A quick run trains too little to rank anything. Leave out --quick to compare.",
        ]
        return _Answer(lines, needs="seeds" if asked > 1 else None)
    if test is None:
        return _Answer(["There is nothing to compare yet."])
    figure = test.measure.figure
    if len(test.entries) == 1 and test.beats_chance:
        reached = figure(test.best.reached.mean)
        return _Answer([f"Only {test.best.contender.name} was measured: {reached} {in_words(test.probe)}."])
    if not test.beats_chance:
        return _at_chance(test)
    if away is not None and not away.beats_chance:
        away = None
    boards = [test] if away is None else [test, away]
    if results.settings.seeds == 1 or not test.best.reached.covers_seeds:
        named = list(dict.fromkeys(board.best.contender.name for board in boards if not board.all_tied))
        lead = "So far " + ", ".join(_ahead(board) for board in boards)
        left = "after one seed" if results.settings.seeds == 1 else "while only one seed has finished"
        return _Answer([f"Undecided {left}.", f"{lead}."], named, needs="seeds")
    if results.settings.what == "position" and all("none" in board.tied for board in boards):
        return _no_matter(boards)
    if all(board.all_tied for board in boards):
        return _all_tied(boards, results.settings.what)
    return _choose(results, test, away)


def _at_chance(test: Standings) -> _Answer:
    """Why the best is not above chance: on the validation data, by its interval, or by its figure."""
    chance, reached, best = test.chance or 0.0, test.best.reached, f"{_name(test.best, test)} {in_words(test.probe)}"
    said = test.measure.figure(chance)
    if reached.low > chance:
        line = f"Undecided: the best is {best}, but on the validation data it is not better than chance ({said})."
    elif reached.mean > chance + 2 * test.measure.little:
        line = f"Undecided: the best is {best}, but its interval includes chance ({said})."
        return _Answer([line, "More seeds would tell, more test data, or longer training."], needs="seeds")
    else:
        where = in_words(test.probe)
        line = f"Undecided: nothing is better than chance ({said}) {where}: the best is {_name(test.best, test)}."
    return _Answer([line, "Train longer (--steps), or check the labels."], needs="steps")


def _most(boards: list[Standings], name: str | None) -> float:
    """The most that another may be ahead of this one, by the intervals; without a name, the most between any two."""
    most = 0.0
    for board in boards:
        entry = None if name is None else board.of(name)
        if entry is not None and entry.behind is not None:
            most = max(most, entry.behind.high)
            continue
        behind = [one.behind for one in board.entries if one.behind is not None]
        most = max([most, *(-one.low for one in behind)])  # the best itself: others may be ahead of it
        if name is None:
            most = max([most, *(one.high for one in behind)])
    return min(most, 1.0) if boards[0].measure.is_share else most  # an interval of two seeds may exceed 1


def _no_matter(boards: list[Standings]) -> _Answer:
    """`none` is tied with the best everywhere: either the gain is small, or too few tests were made to see it."""
    measure, where = boards[0].measure, listed([in_words(board.probe) for board in boards])
    most = _most(boards, "none")
    if most <= 2 * measure.little:
        lines = [
            f"Position does not matter on these data: every mechanism is tied with none {where}.",
            f"Another position would gain at most {measure.gap(most)}. The cheapest is none.",
        ]
        return _Answer(lines, ["none"], ["none"])
    lines = [
        f"Undecided: none is tied with the best {where}, but a gain of up to {measure.gap(most)} is possible.",
        "More seeds would tell, or more test data.",
    ]
    return _Answer(lines, needs="seeds")


def _all_tied(boards: list[Standings], what: str) -> _Answer:
    """Nobody is behind the best anywhere."""
    measure, where = boards[0].measure, listed([in_words(board.probe) for board in boards])
    most, names = _most(boards, None), [entry.contender.name for entry in boards[0].entries]
    all_ = "both" if len(names) == 2 else f"all {len(names)}"
    line = f"Undecided: {all_} are tied {where} ({listed(names, NAMED_AT_MOST)}, up to {{}})."
    line = line.format(measure.figure(boards[0].best.reached.mean))
    if most <= 2 * measure.little:
        more = f"The {what} makes little difference here: no two can be more than {measure.gap(most)} apart."
    else:
        more = f"A difference of up to {measure.gap(most)} is possible. More seeds would tell, or more test data."
    return _Answer([line, more], needs="seeds")


def _choose(results: Results, test: Standings, away: Standings | None) -> _Answer:
    rank = away or test
    everywhere = [name for name in rank.tied if name in test.tied]
    if everywhere or away is None:
        board, pool = rank, everywhere
        name, chosen = pool[0], pool[:1]
        reached = [
            f"{one.measure.figure(entry.reached.mean)} {in_words(one.probe)}"
            for one in ([test] if away is None else [test, away])
            if (entry := one.of(name))
        ]
        tie = f", tied with {listed(pool[1:], NAMED_AT_MOST)}" if pool[1:] else ""
        lines, named = [f"Choose {name}: {' and '.join(reached)}{tie}."], [name]
    else:
        moves, stays = (
            ("objects move", "they never do")
            if test.measure.is_share
            else (f"inputs grow beyond {results.task.length:,} {unit_of(results.task)}", "they never do")
        )
        lines = [f"Choose {_best(away)} if {moves}.", f"Choose {_best(test)} if {stays}."]
        named = [away.best.contender.name, test.best.contender.name]
        board, pool, chosen = away, away.tied, list(named)
    cheap = _cheapest(results, pool)
    if cheap is not None and len(pool) > 1 and _apart(results, cheap[0], pool):
        name, words = cheap
        also = f"{name} also costs" if name in named else f"{name} costs"
        where = "" if everywhere else f" {in_words(board.probe)}"
        lines.append(f"{also} least among those tied with the best{where}: {words}.")
        named += [name]
    elif cheap is not None and len(pool) == len(lines) == 1 and name != first_of(results):
        lines.append(f"{cheap[1][0].upper()}{cheap[1][1:]}.")
    if len(lines) < 3:
        lines += _flips(test, away)[:1]
    return _Answer(lines, list(dict.fromkeys(named)), chosen)


def _best(board: Standings) -> str:
    tied = board.tied[1:]
    also = f"; tied with {listed(tied, NAMED_AT_MOST)}" if tied else ""
    return (
        f"{board.best.contender.name} ({board.measure.figure(board.best.reached.mean)} {in_words(board.probe)}{also})"
    )


def _ahead(board: Standings) -> str:
    """The one that is ahead after one seed, or those tied."""
    figure, tied = board.measure.figure(board.best.reached.mean), board.tied
    if len(tied) > 1:
        return f"{listed(tied, NAMED_AT_MOST)} are tied {in_words(board.probe)} (up to {figure})"
    by = next((one.behind for one in board.entries if one.behind is not None), None)
    margin = "" if by is None else f", by {board.measure.gap(by.mean)}, {board.measure.bounds(by)}"
    return f"{tied[0]} is ahead {in_words(board.probe)} ({figure}{margin})"


def _name(standing: Standing, board: Standings) -> str:
    return f"{standing.contender.name} ({board.measure.figure(standing.reached.mean)})"


def cost_tokens(results: Results) -> int | None:
    """The largest number of tokens at which every timed mechanism was timed. All sentences and pictures about cost use
    it, so that they agree."""
    timed = {size: {name for name in results.names if step_cost(results, name, size)} for size in results.token_counts}
    every = set().union(*timed.values())
    return max((tokens for tokens, names in timed.items() if every and names == every), default=None)


def first_of(results: Results) -> str:
    """The name of the one that times are relative to."""
    return "none" if results.settings.what == "position" else results.names[0]


def step_cost(results: Results, name: str, tokens: int) -> float | None:
    """Time of a step: relative to that of `first_of` if it was timed, else in milliseconds."""
    entry = results.cost(name, tokens)
    if entry is None or entry.step_ms is None:
        return None
    return entry.ratio if relative(results) else entry.step_ms.median


def relative(results: Results) -> bool:
    """Whether ratios to `first_of` exist; they differ less between machines than times do."""
    return any(entry.ratio is not None for entry in results.costs)


def _cheapest(results: Results, names: Sequence[str]) -> tuple[str, str] | None:
    tokens = cost_tokens(results)
    if tokens is None:
        return None
    costs = [(cost, name) for name in names if (cost := step_cost(results, name, tokens)) is not None]
    if not costs:
        return None
    cost, name = min(costs)
    words = f"{cost:,.1f} ms a step"
    if relative(results):
        times = f"{cost:.2f} times" if cost > AS_FAST else "about as long as"
        words = f"its training step takes {times} that of {first_of(results)}"
    return name, f"{words} at {tokens:,} tokens"


def _apart(results: Results, name: str, others: Sequence[str]) -> bool:
    """Whether a step with `name` is faster than with any other: its upper quartile is below their lower ones."""
    tokens = cost_tokens(results)
    costs = {other: results.cost(other, tokens) for other in others} if tokens is not None else {}
    times = {other: cost.step_ms for other, cost in costs.items() if cost is not None and cost.step_ms is not None}
    return name in times and all(times[name].high < time.low for other, time in times.items() if other != name)


def _flips(test: Standings | None, away: Standings | None) -> list[str]:
    """A sentence on a flip: one tied with the best on the plain test falls furthest behind under shift or length."""
    if test is None or away is None or not (test.beats_chance and away.beats_chance):
        return []
    if not away.best.reached.covers_seeds:
        return []
    leader = test.of(away.best.contender.name)
    fallen = [
        (entry.behind.mean, entry.contender.name, "the best" if here.behind is None else "tied with the best")
        for entry in away.entries
        if not entry.tied and entry.behind is not None and (here := test.of(entry.contender.name)) is not None
        if here.tied and leader is not None and _at_least(test.measure, here, leader)
    ]
    if not fallen:
        return []
    gap, name, stood = max(fallen)
    under = "shift" if away.probe.group == "shift" else "length"
    verb = "scores" if away.measure.is_share else "needs"
    worse = "below" if away.measure.is_share else "more than"
    return [
        f"Rankings flip under {under}: {name}, {stood} {in_words(test.probe)}, {verb} {away.measure.gap(gap)} "
        f"{worse} {away.best.contender.name} {in_words(away.probe)}."
    ]


def _at_least(measure: Measure, first: Standing, second: Standing) -> bool:
    """Whether the first is at least as good as the second."""
    return measure.rank(first.reached.mean) <= measure.rank(second.reached.mean)


def _plain_rate(results: Results) -> list[str]:
    """Differences beyond the interval without the recipe's position learning rate."""
    measure, times = measure_of(results), results.settings.recipe.position_learning_rate_multiplier
    sentences = []
    for probe in [results.task.probes[0], *filter(None, [far_probe(results)])]:
        parts = []
        for contender in contenders(results, probe, "x1"):
            recipe, without = (outcomes(results, contender, probe, variant) for variant in ("recipe", "x1"))
            if set(recipe) & set(without) and not (ahead := measure.ahead(recipe, without)).covers_zero:
                direction = "below" if (ahead.mean > 0) == measure.is_share else "above"
                parts.append((abs(ahead.mean), f"{contender.label} scores {measure.gap(abs(ahead.mean))} {direction}"))
        if parts:
            words = listed([text for _, text in sorted(parts, reverse=True)], NAMED_AT_MOST)
            sentences.append(
                f"Without the {times:g}x position learning rate, {in_words(probe)}: {words} the figure with it."
            )
    return sentences


def _cautions(results: Results, *boards: Standings | None) -> list[str]:
    cautions, settings = [], results.settings
    ended = [
        len(results.runs(name)) + len(results.runs(name, diverged=True)) + len(results.failures(name))
        for name in results.names
    ]
    if missing := sum(max(0, settings.seeds - count) for count in ended):
        cautions.append(f"Unfinished: {missing} of the requested training runs are missing.")
    if results.failed:
        which = listed([one.id for one in results.failed], NAMED_AT_MOST)
        cautions.append(f"Failed: {which}. The reasons are under Machines; the same command tries again.")
    for name in results.names:
        every = [run for run in results.records if run.name == name]
        lost = [run for run in every if run.diverged is not None]
        if lost and (where := lost[0].diverged):
            many = f"{len(lost)} of its {len(every)} runs" if len(every) > 1 else "its only run"
            left = "it has no figure" if len(lost) == len(every) else "its figures are only from the others"
            cautions.append(
                f"{name} diverged in {many}: with seed {lost[0].seed} the {where.what} was {where.value} at step "
                f"{where.step}, at the learning rate {where.rate:.1e}; {left}."
            )
    if settings.seeds == 2 and not settings.quick:
        cautions.append("Two seeds are few: for a reliable result, run the same command with --seeds 5.")
    for board in boards:
        if board is not None and board.left_out_seeds:
            seeds = listed([str(seed) for seed in board.left_out_seeds])
            left_out = f"Seeds {seeds} are" if len(board.left_out_seeds) > 1 else f"Seed {seeds} is"
            cautions.append(f"{left_out} left out {in_words(board.probe)}: not all runs have finished.")
    return cautions
