"""A comparison of anything but position as a table: a row a choice, each beside the first of its kind.

Quality is paired with the first's, unit by unit and seed by seed. Cost is at the task's own number of tokens as models
are trained, and at the largest; growth is the exponent p of figure = c * N^p, fitted by least squares on logarithms
over the sizes that differ in N alone, at least three.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos.report.measure import measure_of
from relpos.report.results import (
    Contender,
    Results,
    cost,
    diverged,
    name_of,
    outcomes,
    positions,
    probes,
    runs,
    token_counts,
)
from relpos.report.statistics import Interval

LENGTHS = 3
"""Sizes that a fit takes, at least."""


@dataclass(frozen=True)
class Row:
    """One choice.

    Attributes:
        reached: on the plain test. diverged: whether it has no such figure because its runs diverged.
        ahead: by how much it is better than the first there, None for the first itself.
        parameters: of the model. state: numbers that the optimizer keeps for each.
        trained, largest: costs at the task's own number of tokens and at the most, where they were measured.
        ratio: its time at the most as a multiple of the first's, and memory_ratio its memory.
        time_growth, memory_growth: exponents of N.
    """

    name: str
    reached: Interval | None
    diverged: bool
    ahead: Interval | None
    parameters: int | None
    state: float | None
    trained: Mapping[str, Any]
    largest: Mapping[str, Any]
    ratio: float | None
    memory_ratio: float | None
    time_growth: float | None
    memory_growth: float | None


def rows(results: Results) -> list[Row]:
    """Every choice, best first."""
    found = [_row(results, name) for name in positions(results)]
    measure = measure_of(results)
    return sorted(found, key=lambda row: measure.rank(None if row.reached is None else row.reached.mean))


def reached(results: Results, name: str) -> dict[int, Any]:
    """The outcomes of a choice on the plain test, by seed."""
    return outcomes(results, Contender(name), probes(results, "test")[0]["id"])


def ahead(results: Results, name: str) -> Interval | None:
    """By how much a choice is better than the first on the plain test; None where they share no seed."""
    own, first = reached(results, name), reached(results, positions(results)[0])
    return measure_of(results).ahead(own, first) if set(own) & set(first) else None


def grown_sizes(results: Results) -> list[int]:
    """The numbers of tokens that differ in nothing else, ascending: those of the commonest batch and depth."""
    found: dict[tuple[int, int], set[int]] = {}
    for entry in results["costs"]:
        found.setdefault((entry["batch_size"], entry["depth"]), set()).add(int(entry["tokens"]))
    return max((sorted(sizes) for sizes in found.values()), key=len, default=[])


def growth(results: Results, name: str, figure: str) -> float | None:
    """The exponent of N of "time" or "memory"; None with fewer than three sizes."""
    points = []
    for tokens in grown_sizes(results):
        value = amount(cost(results, name, tokens) or {}, figure)
        if value:
            points.append((tokens, value))
    if len(points) < LENGTHS:
        return None
    x, y = np.log(np.asarray(points, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def amount(entry: Mapping[str, Any], figure: str) -> float | None:
    """Milliseconds of a step, or MiB of its memory; None where it was not measured."""
    if figure == "memory":
        return entry.get("peak_memory_mib")
    step = entry.get("step_ms")
    return None if step is None else float(step["median"])


def _row(results: Results, name: str) -> Row:
    first, counts, lost = positions(results)[0], token_counts(results), diverged(results, name)
    finished = [*runs(results, name), *lost]
    trained, largest = ((cost(results, name, counts[end]) or {}) if counts else {} for end in (0, -1))
    beside = (cost(results, first, counts[-1]) or {}) if counts else {}
    measure, own = measure_of(results), reached(results, name)
    states = [entry["state_per_parameter"] for entry in results["costs"] if name_of(entry) == name]
    return Row(
        name=name,
        reached=measure.interval(own) if own else None,
        diverged=bool(lost) and not own,
        ahead=None if name == first else ahead(results, name),
        parameters=int(finished[0]["parameters"]["total"]) if finished else None,
        state=states[0] if states else None,
        trained=trained,
        largest=largest,
        ratio=largest.get("ratio"),
        memory_ratio=_by(amount(largest, "memory"), amount(beside, "memory")),
        time_growth=growth(results, name, "time"),
        memory_growth=growth(results, name, "memory"),
    )


def _by(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
