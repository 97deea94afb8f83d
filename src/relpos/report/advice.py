"""The first lines of the page: at most three of advice, then the cautions.

    a quick run                                   it works; nothing is ranked
    one seed                                      undecided: run with --seeds 3; who is ahead so far
    nothing above chance                          train longer
    `none` is tied with the best                  position does not matter here, or more tests are needed to know
    one is tied with the best everywhere          choose it
    else                                          one choice if objects move (inputs grow), one if they do not

The last lines name the cheapest of those tied with the best, and say whether rankings flip under shift.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from relpos.report.measure import Measure, measure_of
from relpos.report.standings import Standing, Standings, contenders, far_probe, in_words, outcomes, stand
from relpos.results import Results

NAMED_AT_MOST = 3
AS_FAST = 1.05
"""Up to this ratio, two times count as equal."""


@dataclass(frozen=True)
class Advice:
    """`lines` start the page, `named` are the mechanisms in them, `cautions` follow, `notes` accompany the table."""

    lines: tuple[str, ...]
    named: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def advise(results: Results) -> Advice:
    """The advice of a comparison, finished or not."""
    far = far_probe(results)
    test, away = stand(results, results.task.probes[0]), stand(results, far) if far is not None else None
    lines, named = _lines(results, test, away)
    notes = [] if results.settings.quick else [*_flips(test, away), *_plain_rate(results)]
    notes = [note for note in notes if note not in lines]
    return Advice(tuple(lines[:3]), tuple(named), tuple(_cautions(results, test, away)), tuple(notes))


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


def _lines(results: Results, test: Standings | None, away: Standings | None) -> tuple[list[str], list[str]]:
    if results.records and all(run.diverged is not None for run in results.records):
        return ["Every training run diverged."], []
    if results.settings.quick:
        trained, asked = sum(bool(results.runs(name)) for name in results.names), len(results.names)
        return [
            f"It works: {trained} of {asked} trained, measured and drawn.",
            "A quick run trains too little to rank anything. Leave out --quick to compare.",
        ], []
    if test is None:
        return ["There is nothing to compare yet."], []
    figure = test.measure.figure
    if not test.beats_chance:
        chance, reached = figure(test.chance or 0.0), test.best.reached
        if reached.mean > (test.chance or 0.0) + 2 * test.measure.little:
            best = f"{_name(test.best, test)} {in_words(test.probe)}"
            line = f"Undecided: the best is {best}, but its interval includes chance ({chance})."
            return [line, "Run more seeds (--seeds 5), test on more data, or train longer (--steps)."], []
        line = f"Nothing is better than chance ({chance}) {in_words(test.probe)}: the best is {_name(test.best, test)}."
        return [line, "Train longer (--steps), or check the labels."], []
    if away is not None and not away.beats_chance:
        away = None
    if len(test.entries) == 1:
        return [
            f"Only {test.best.contender.name} was measured: {figure(test.best.reached.mean)} {in_words(test.probe)}."
        ], []
    if results.settings.seeds == 1 or not test.best.reached.covers_seeds:
        boards = [test] if away is None else [test, away]
        named = list(dict.fromkeys(board.best.contender.name for board in boards))
        lead = "So far " + ", ".join(_ahead(board) for board in boards)
        left = "after one seed" if results.settings.seeds == 1 else "while only one seed has finished"
        line = f"Undecided {left}: run the same command with --seeds {max(3, results.settings.seeds)}."
        return [line, f"{lead}."], named
    boards = [test] if away is None else [test, away]
    if results.settings.what == "position" and all("none" in board.tied for board in boards):
        return _no_matter(boards), ["none"]
    return _choose(results, test, away)


def _no_matter(boards: list[Standings]) -> list[str]:
    """`none` is tied with the best everywhere: either the gain is small, or too few tests were made to see it."""
    measure, where = boards[0].measure, listed([in_words(board.probe) for board in boards])
    most = 0.0
    for board in boards:
        of_none = board.of("none")
        if of_none is not None and of_none.behind is not None:
            most = max(most, of_none.behind.high)
        else:  # `none` is the best: the most that others may be ahead
            most = max([most, *(-entry.behind.low for entry in board.entries if entry.behind is not None)])
    most = min(most, 1.0) if measure.is_share else most  # an interval of two seeds may exceed 1
    if most <= 2 * measure.little:
        return [
            f"Position does not matter on these data: every mechanism is tied with none {where}.",
            f"Another position would gain at most {measure.gap(most)}. Choose none, which costs nothing.",
        ]
    return [
        f"Undecided: none is tied with the best {where}, but a gain of up to {measure.gap(most)} is possible.",
        "Run more seeds (--seeds 5), or test on more data.",
    ]


def _choose(results: Results, test: Standings, away: Standings | None) -> tuple[list[str], list[str]]:
    rank = away or test
    everywhere = [name for name in rank.tied if name in test.tied]
    if everywhere or away is None:
        board, pool = rank, everywhere
        name = pool[0]
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
            else (f"inputs grow beyond {results.task.length:,} bytes", "they never do")
        )
        lines = [f"Choose {_best(away)} if {moves}.", f"Choose {_best(test)} if {stays}."]
        named = [away.best.contender.name, test.best.contender.name]
        board, pool = away, away.tied
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
    return lines, list(dict.fromkeys(named))


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
    return f"{tied[0]} is ahead {in_words(board.probe)} ({figure})"


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
    ended = [len(results.runs(name)) + len(results.runs(name, diverged=True)) for name in results.names]
    if missing := sum(max(0, settings.seeds - count) for count in ended):
        cautions.append(f"Unfinished: {missing} of the requested training runs are missing.")
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
