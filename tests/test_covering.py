"""Every two values of two factors meet, in about as many rows as the two largest factors have together."""

import itertools

import pytest

from covering import pairwise


@pytest.mark.parametrize("sizes", [(3,), (4, 3), (11, 9, 4), (27, 4, 3), (2, 2, 2, 2, 2), (3, 5, 4, 2)], ids=str)
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    factors = [[f"{number}:{value}" for value in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*factors)
    assert rows == pairwise(*factors)
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(factors[i], factors[j]))
    assert {row[0] for row in rows} == set(factors[0])
    largest = sorted([1, *sizes])[-2:]
    assert len(rows) <= 1.5 * largest[0] * largest[1] + 4
