"""What every page has: the standings of a probe, costs row by row, and how claims came out in a line."""

from collections import Counter
from typing import Any

from relpos.report.claims import Outcome
from relpos.report.palette import styles
from relpos.report.results import Results, cost, positions, token_counts
from relpos.report.verdict import ProbeVerdict
from relpos.report.wording import listed, place, unmeasured_words

STANDINGS_AT_MOST = 6
"""How many contenders of a probe stand open."""


def standings(results: Results, probe: ProbeVerdict) -> dict[str, Any]:
    """A card with the contenders of a probe, best first."""
    looks = styles(positions(results))
    entries = [
        {
            "label": standing.contender.label,
            "look": looks[standing.contender.position],
            "reached": standing.reached,
            "relation": standing.relation,
            "difference": standing.difference,
            "against_chance": standing.against_chance,
        }
        for standing in probe.standings
    ]
    where = place(probe)
    title = where[:1].upper() + where[1:]
    first, rest = entries[:STANDINGS_AT_MOST], entries[STANDINGS_AT_MOST:]
    missing = unmeasured_words(probe)
    most = 1.0 if probe.measure.is_share else max(standing.reached.high for standing in probe.standings)
    found = {"title": title, "chance": probe.chance, "first": first, "rest": rest, "missing": missing}
    return {**found, "scale": 100 / (most or 1.0)}


def costs(results: Results, ranked: list[str]) -> list[dict[str, Any]]:
    """One entry a mechanism and number of tokens that was asked for; what it does not have is None."""
    nothing = {"step_ms": None, "ratio": None, "peak_memory_mib": None, "reason": None}
    found = []
    for tokens in token_counts(results):
        for position in ranked:
            entry = cost(results, position, tokens)
            if entry is not None:
                found.append({**nothing, **entry})
    return found


def counts(claims: list[Outcome]) -> str:
    """ "2 held and 1 did not hold"."""
    return listed([f"{count} {word}" for word, count in Counter(one.word for one in claims).most_common()])
