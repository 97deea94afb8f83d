"""How each claim of the documents is looked up in a comparison: one function a claim, its rule in its docstring.

The words of the claims, and the verdict that findings add up to, are in `claims.py`.
"""

from collections.abc import Sequence

from relpos.report.evidence import (
    Finding,
    Probe,
    Speaks,
    ahead,
    ahead_words,
    best,
    fall,
    fall_words,
    farthest_size,
    lost,
    more_than,
    opposite,
    plain,
    position_parameters,
    size_words,
    sizes_timed,
    smaller_fall,
    timed,
    trained_probe,
    where,
)
from relpos.report.families import kind, of_family, relative, sums_of
from relpos.report.measure import measure_of
from relpos.report.results import Contender, Results, far_probe, largest_shift, outcomes, positions
from relpos.report.verdict import judge_probe

NOTICEABLE = 0.05
"""Five points, or a twentieth of a bit: to fall by less, or to be behind by less, counts as little."""
CLOSE = 0.01
"""A point, or a hundredth of a bit: to be behind by less is excellent still."""
CHEAP = 1.10
"""A step of at most 1.1 times that of none costs next to nothing."""
ALIBI = ("alibi", "alibi_manhattan")
"""With fixed slopes, as published."""
STEADY = 0.05
"""Seeds whose test accuracies lie within five points count as stable; it takes three of them."""


def position_matters(results: Results) -> list[Finding]:
    """Whether the best on the test images is ahead of none."""
    test = trained_probe(results)
    others = [name for name in positions(results) if name != "none"]
    first = best(results, others, test) if test is not None else None
    return _ahead(results, first, Contender("none"), test)


def absolute_falls(results: Results) -> list[Finding]:
    """Each absolute mechanism's fall at the largest shift."""
    return _falls(results, of_family(results, "absolute"), largest_shift(results), little=False)


def relative_keeps(results: Results) -> list[Finding]:
    """Each relative mechanism's fall at the largest shift."""
    return _falls(results, relative(results), largest_shift(results), little=True)


def relative_falls_less(results: Results) -> list[Finding]:
    """Each relative mechanism's fall at the largest shift beside that of the absolute mechanism that is best there."""
    return _falls_less(results, largest_shift(results))


def absolute_does_not_go_on(results: Results) -> list[Finding]:
    """Each absolute mechanism from the trained length to the longest."""
    return _falls(results, of_family(results, "absolute"), farthest_size(results), little=False)


def buckets_go_on(results: Results) -> list[Finding]:
    """T5's bias from the trained length to the longest."""
    return _falls(results, [name for name in positions(results) if name == "t5"], farthest_size(results), little=True)


def relative_grows_better(results: Results) -> list[Finding]:
    """The same on the largest canvas."""
    return _falls_less(results, farthest_size(results))


def no_interpolation_needed(results: Results) -> list[Finding]:
    """Clipped minus interpolated on the largest canvas, for biases that can do both."""
    probe = farthest_size(results)
    if probe is None:
        return []
    found = []
    for name in of_family(results, "bias"):
        difference = ahead(results, Contender(name, "clipped"), Contender(name, "interpolated"), probe)
        if difference is not None:
            speaks = more_than(results, difference, -NOTICEABLE)
            found.append(
                Finding(f"{name} (clipped)", ahead_words(difference, "interpolated", measure_of(results)), speaks)
            )
    return found


def rotation_extrapolates_best(results: Results) -> list[Finding]:
    """The best rotation against the best bias, on the largest canvas or in the longest text."""
    probe = farthest_size(results)
    if probe is None:
        return []
    rotation = best(results, of_family(results, "rotation"), probe)
    return _ahead(results, rotation, best(results, of_family(results, "bias"), probe), probe)


def alibi_extrapolates(results: Results) -> list[Finding]:
    """ALiBi's fall on the largest canvas, and whether what it keeps there is more than none has."""
    names, probe = [name for name in positions(results) if name in ALIBI], farthest_size(results)
    if probe is None:
        return []
    found = _falls(results, names, probe, little=True)
    for name in names:
        found += _ahead(results, plain(results, name, probe), plain(results, "none", probe), probe)
    return found


def without_parameters(results: Results) -> list[Finding]:
    """Learned numbers of rotations and of ALiBi."""
    names = [name for name in positions(results) if kind(name).family == "rotation" or name in ALIBI]
    found = []
    for name in names:
        count = position_parameters(results, name)
        if count is not None:
            found.append(Finding(name, f"{count:,} learned numbers", "for" if count == 0 else "against"))
    return found


def table_smaller(results: Results) -> list[Finding]:
    """Learned numbers of relative mechanisms against those of learned vectors."""
    vectors = position_parameters(results, "learned") if "learned" in positions(results) else None
    found = []
    for name in relative(results) if vectors is not None else []:
        count = position_parameters(results, name)
        if count is not None and vectors is not None:
            words = f"{count:,} learned numbers, learned vectors {vectors:,}"
            found.append(Finding(name, words, "for" if count < vectors else "against"))
    return found


def absolute_is_cheap(results: Results) -> list[Finding]:
    """Step times of absolute mechanisms."""
    return _cheap(results, of_family(results, "absolute"))


def bias_is_cheap(results: Results) -> list[Finding]:
    """Step times of additive biases."""
    return _cheap(results, of_family(results, "bias"))


def alibi_is_fastest(results: Results) -> list[Finding]:
    """ALiBi's step against the quickest other relative mechanism's, at the largest size."""
    names = [name for name in relative(results) if kind(name).family != "sum"]
    rivals = [name for name in names if name not in ALIBI]
    found = []
    for tokens in sizes_timed(results, names)[-1:]:
        entries = timed(results, names, tokens)
        others = [name for name in rivals if name in entries]
        if not others:
            continue
        quickest = min(others, key=lambda name: float(entries[name]["step_ms"]["median"]))
        other = entries[quickest]["step_ms"]
        for name in (name for name in entries if name not in rivals):
            mine = entries[name]["step_ms"]
            speaks: Speaks = (
                "for" if mine["high"] < other["low"] else "against" if mine["low"] > other["high"] else "open"
            )
            words = f"{mine['median']:,.1f} ms at {tokens:,} tokens, {quickest} {other['median']:,.1f}"
            found.append(Finding(name, words, speaks))
    return found


def biases_are_stable(results: Results) -> list[Finding]:
    """How far apart the seeds of biases are on the test images, and whether some diverged."""
    test = trained_probe(results)
    if test is None:
        return []
    found = []
    for name in of_family(results, "bias"):
        by_seed = [float(values.mean()) for values in outcomes(results, Contender(name), test["id"]).values()]
        if by_seed:
            apart = max(by_seed) - min(by_seed)
            known = len(by_seed) >= 3 and not results["settings"]["quick"]
            speaks: Speaks = "open" if not known else "for" if apart <= STEADY else "against"
            words = f"{len(by_seed)} seeds within {measure_of(results).gap(apart)}"
            found.append(Finding(name, words, speaks))
        found += lost(results, name, some=True)
    return found


def grid_bias_is_ideal(results: Results) -> list[Finding]:
    """How far the 2-D bias is behind the best, on the test images and at the largest shift."""
    found = []
    for probe in (trained_probe(results), largest_shift(results)):
        standings = judge_probe(results, probe).standings if probe is not None else ()
        for standing in standings if len(standings) > 1 else ():
            if standing.contender.position != "relative_2d":
                continue
            assert probe is not None
            # The best is ahead of itself by nothing; how sure that is, is how sure it is to be ahead of the next.
            behind = standing.difference or standings[1].difference
            assert behind is not None
            decided = more_than(results, behind, NOTICEABLE)
            if standing.difference is None:
                next_best = standings[1].contender.label
                words, speaks = (
                    f"ahead of {next_best} by {size_words(behind, measure_of(results))}",
                    more_than(results, behind, -NOTICEABLE),
                )
            else:
                words = f"behind {standings[0].contender.label} by {size_words(behind, measure_of(results))}"
                speaks = opposite(decided)
            found.append(
                Finding(
                    "relative_2d",
                    f"{measure_of(results).figure(standing.reached.mean)} {where(probe)}, {words}",
                    speaks,
                )
            )
    return found


def rotation_and_bias_add_up(results: Results) -> list[Finding]:
    """Sums of a rotation and a bias against the better of their parts."""
    return _sums(results, sums_of(results, "rotation", "bias"))


def absolute_and_relative_add_up(results: Results) -> list[Finding]:
    """Sums of an absolute mechanism and a bias or rotation against the better of their parts."""
    return _sums(results, [*sums_of(results, "absolute", "bias"), *sums_of(results, "absolute", "rotation")])


def vectors_say_more(results: Results) -> list[Finding]:
    """Relative vectors against the best additive bias on the test images."""
    test = trained_probe(results)
    names = of_family(results, "vectors")
    if test is None or not names:
        return []
    return _ahead(results, best(results, names, test), best(results, of_family(results, "bias"), test), test)


def rotation_in_the_table(results: Results) -> list[Finding]:
    """Memory, steps and distance from the best of rotations."""
    return _low_fast_near(results, of_family(results, "rotation"), CLOSE)


def alibi_in_the_table(results: Results) -> list[Finding]:
    """Memory, steps and distance from the best of ALiBi."""
    return _low_fast_near(results, [name for name in positions(results) if name in ALIBI], NOTICEABLE)


def _low_fast_near(results: Results, names: Sequence[str], little: float) -> list[Finding]:
    """Memory beside none's, steps beside none's, and how far behind the best on the plain test."""
    test = trained_probe(results)
    first = None if test is None else best(results, positions(results), test)
    found = []
    for tokens in sizes_timed(results, names)[-1:]:
        beside = (timed(results, ["none"], tokens).get("none") or {}).get("peak_memory_mib")
        for name, entry in timed(results, names, tokens).items():
            if beside and entry.get("peak_memory_mib"):
                share = entry["peak_memory_mib"] / beside
                words = f"{share:.2f} times none's memory at {tokens:,} tokens"
                found.append(Finding(name, words, "for" if share <= CHEAP else "against"))
    found += _cheap(results, names)
    for name in names:
        found += lost(results, name)
        own = None if test is None else plain(results, name, test)
        if own is None or first is None or test is None:
            continue
        if own == first:
            found.append(Finding(own.label, "is the best on the test", "for"))
        elif (behind := ahead(results, own, first, test)) is not None:
            words = f"{ahead_words(behind, first.label, measure_of(results))} {where(test)}"
            found.append(Finding(own.label, words, more_than(results, behind, -little)))
    return found


def nothing(results: Results) -> list[Finding]:
    """No comparison of images can say."""
    return []


def _falls(results: Results, names: Sequence[str], probe: Probe | None, *, little: bool) -> list[Finding]:
    if probe is None:
        return []
    found = []
    for name in names:
        contender = plain(results, name, probe)
        interval = None if contender is None else fall(results, contender, probe)
        if contender is not None and interval is not None:
            speaks = more_than(results, interval, NOTICEABLE)
            words = f"{fall_words(interval, measure_of(results))} {where(probe)}"
            found.append(Finding(contender.label, words, opposite(speaks) if little else speaks))
    return found


def _falls_less(results: Results, probe: Probe | None) -> list[Finding]:
    rival = None if probe is None else best(results, of_family(results, "absolute"), probe)
    if probe is None or rival is None:
        return []
    found = []
    for name in relative(results):
        contender = plain(results, name, probe)
        less = None if contender is None else smaller_fall(results, contender, rival, probe)
        if contender is not None and less is not None:
            more = "less" if less.mean >= 0 else "more"
            words = f"loses {size_words(less, measure_of(results))} {more} than {rival.label} {where(probe)}"
            found.append(Finding(contender.label, words, more_than(results, less, 0.0)))
    return found


def _ahead(results: Results, first: Contender | None, second: Contender | None, probe: Probe | None) -> list[Finding]:
    if first is None or second is None or probe is None:
        return []
    difference = ahead(results, first, second, probe)
    if difference is None:
        return []
    words = f"{ahead_words(difference, second.label, measure_of(results))} {where(probe)}"
    return [Finding(first.label, words, more_than(results, difference, 0.0))]


def _cheap(results: Results, names: Sequence[str]) -> list[Finding]:
    found = []
    for tokens in sizes_timed(results, names):
        for name, entry in timed(results, names, tokens).items():
            if entry.get("ratio") is not None:
                words = f"{entry['ratio']:.2f} times none's step at {tokens:,} tokens"
                found.append(Finding(name, words, "for" if entry["ratio"] <= CHEAP else "against"))
    return found


def _sums(results: Results, names: Sequence[str]) -> list[Finding]:
    found = []
    for name in names:
        for probe in (trained_probe(results), far_probe(results)):
            part = best(results, kind(name).parts, probe) if probe is not None else None
            whole = plain(results, name, probe) if probe is not None else None
            found += _ahead(results, whole, part, probe)
    return found
