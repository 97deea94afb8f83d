"""Vectors of which far offsets share one, in the streaming engine: such stretches of a window are multiplied once."""

import pytest
import torch
from engine_steps import assert_as_reference
from torch import Tensor

from covering import pairwise
from relpos.core import LineVectors, Mask, Sequence, Terms, lines
from relpos.engines.streaming.terms.vector_term import alike

FAST_CASES = 6  # of each of its tests, in the fast part

H, D, ROWS = 2, 4, 9
SIZES = [(300, 300), (1, 200), (130, 333), (280, 70), (600, 40)]


@pytest.mark.parametrize(
    ("size", "clip", "missing"),
    pairwise(SIZES, [(0.3, 0.6), (0.0, 0.1), (0.9, 1.0), (0.5, 0.5)], [False, True]),
    ids=str,
)
def test_far_offsets_that_share_a_vector(size: tuple[int, int], clip: tuple[float, float], missing: bool) -> None:
    """Vectors on every side, of one row up to the first part of the line and from the second on."""
    n, m = size
    low, high = (int(part * (n + m - 2)) for part in clip)
    line = lines(Sequence(n, start=max(0, m - n)), Sequence(m))
    index = (torch.arange(line.length) - low).clamp(0, high - low) % ROWS
    if missing:
        index[:low] = -1

    def terms(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Terms:
        met = zip((query, key), ("query", "key"), biases, strict=True)
        return Terms(*(LineVectors(x, index, line, side, bias=bias) for x, side, bias in met),
                     LineVectors(value, index, line, "value"))  # fmt: skip

    shapes = [(1, H, n, D), (1, H, m, D), (1, H, m, D), (1, ROWS, D), (H, ROWS, D), (1, ROWS, D), (H, D), (H, D)]
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_reference("streaming", leaves, terms, mask=Mask.causal() if n == m else None, rtol=1e-9, atol=1e-10)


def test_where_all_offsets_begin_and_end_to_be_alike() -> None:
    assert alike(torch.tensor([3, 3, 1, 2, 2, 2])) == (2, 3)
    assert alike(torch.tensor([3, 1, 2])) == (1, 2)
    assert alike(torch.tensor([5, 5])) == (2, 2)
