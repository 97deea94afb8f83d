"""What a comparison of anything but position says in words: quality, cost and growth, in sentences that claim no more.

Two whose interval covers 0 are "not told apart". Times whose middle halves overlap are not said to differ.
"""

from relpos.report.choices import Row, grown_sizes, rows
from relpos.report.diverged import all_diverged, find_diverged
from relpos.report.evidence import size_words
from relpos.report.results import Results, positions, probes
from relpos.report.verdict import ProbeVerdict, Standing, judge_probe
from relpos.report.wording import QUICK, listed

NAMES = {"attention": "kinds of attention", "norm": "norms", "optimizer": "optimizers"}


def choice_headline(results: Results) -> str:
    """Who is best on the test, and who is not told apart from it."""
    verdict = judge_probe(results, probes(results, "test")[0])
    if not verdict.standings:
        return "Every training run diverged." if all_diverged(results) else "No run has finished yet."
    best, *rest = verdict.leaders
    figure = verdict.measure.figure(best.reached.mean)
    if not rest:
        return f"{best.contender.label} is best on the test, at {figure}."
    if not verdict.worse:
        end = "highest" if verdict.measure.is_share else "lowest"
        return f"On the test none is told apart from {best.contender.label}, the {end} at {figure}."
    return f"{best.contender.label} comes first on the test, at {figure}; not told apart from it: {_names(rest)}."


def choice_sentences(results: Results) -> list[str]:
    """Statements on quality, time, memory and growth, each only where it was measured."""
    found, every = [], rows(results)
    verdict = judge_probe(results, probes(results, "test")[0])
    if verdict.worse:
        found.append(_behind(verdict))
    timed = [row for row in every if row.ratio is not None and row.name != positions(results)[0]]
    found += [_apart(results, timed)] if timed else []
    weighed = [row for row in every if row.memory_ratio is not None and row.name != positions(results)[0]]
    if weighed:
        parts = [f"{row.name} {row.memory_ratio:.2f}" for row in sorted(weighed, key=lambda row: row.memory_ratio or 0)]
        where = f"{weighed[0].largest['tokens']:,} tokens"
        found.append(f"Peak memory of a step at {where}, as a multiple of {positions(results)[0]}'s: {listed(parts)}.")
    grown = [row for row in every if row.time_growth is not None]
    if grown:
        sizes = grown_sizes(results)
        parts = [f"{row.name} {row.time_growth:.2f}" for row in sorted(grown, key=lambda row: row.time_growth or 0)]
        span = f"From {sizes[0]:,} to {sizes[-1]:,} tokens"
        found.append(f"{span} the time of a step grows as a power of their number: {listed(parts)}.")
    return found


def choice_cautions(results: Results) -> list[str]:
    """What a reader must know before believing the rest."""
    settings = results["settings"]
    found = [QUICK] if settings["quick"] else []
    if settings["seeds"] == 1:
        found.append("One seed: what differs from seed to seed is in no interval here. Ask for --seeds 3 or more.")
    found += [one.words() for one in find_diverged(results)]
    missing = settings["seeds"] * len(positions(results)) - len(results["records"])
    return [*found, f"Unfinished: {missing} of the training runs asked for are not there yet."] if missing else found


def _names(standings: list[Standing]) -> str:
    return listed([standing.contender.label for standing in standings])


def _behind(verdict: ProbeVerdict) -> str:
    behind = [
        f"{standing.contender.label} by {size_words(standing.difference, verdict.measure)}"
        for standing in verdict.worse
        if standing.difference is not None
    ]
    return f"Behind {verdict.standings[0].contender.label} on the test: {listed(behind)}."


def _apart(results: Results, timed: list[Row]) -> str:
    """Whose step takes less time than the first's at the most tokens, whose more, and whose is not told apart."""
    first = next(row for row in rows(results) if row.name == positions(results)[0])
    by: dict[str, list[str]] = {"less": [], "more": [], "open": []}
    for row in sorted(timed, key=lambda row: row.ratio or 0):
        own, other = row.largest["step_ms"], first.largest["step_ms"]
        side = "less" if own["high"] < other["low"] else "more" if own["low"] > other["high"] else "open"
        by[side].append(row.name if side == "open" else f"{row.name} ({row.ratio:.2f} times)")
    words = {"less": "less", "more": "more", "open": "not told apart"}
    parts = [f"{words[side]}, {listed(names)}" for side, names in by.items() if names]
    where = f"{first.largest['tokens']:,} tokens"
    return f"Time of a step at {where} beside {first.name}'s: {'; '.join(parts)}."
