"""Pairwise covering arrays: few rows in which every two values of two factors meet.

    pairwise(("a", "b", "c"), (1, 2), (True, False))      # 6 rows instead of 12

Most faults take one value, or two together, to show (Kuhn, Wallace, Gallo 2004, "Software fault interactions and
implications for software testing"). Where three belong together, test those in a product of their own.
"""

import itertools
from collections.abc import Collection
from typing import Any


def pairwise(*factors: Collection[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each factor, always the same ones; two factors or fewer give their product."""
    values = [list(factor) for factor in factors]
    sizes = [len(factor) for factor in values]
    missing = {  # two cells, (factor, value) each, that have not met yet; a dict keeps their order
        ((i, a), (j, b)): None
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    if len(sizes) < 2:
        return [(value,) for factor in values for value in factor]
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for i in sorted(set(range(len(sizes))) - set(row), key=lambda i: -sizes[i]):
            met = [sum(_pair((i, a), cell) in missing for cell in row.items()) for a in range(sizes[i])]
            first = len(rows) % sizes[i]  # of equals, each in turn
            row[i] = max(range(sizes[i]), key=lambda a: (met[a], -((a - first) % sizes[i])))
        for one, other in itertools.combinations(row.items(), 2):
            missing.pop(_pair(one, other), None)
        rows.append(tuple(values[i][row[i]] for i in range(len(sizes))))
    return rows


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)
