"""No position: attention alone."""

from __future__ import annotations

import pytest
import torch

from conformance.suite import LibrarySuite
from relpos import Grid, NoPosition, Sequence, Site, attention


class TestNoPosition(LibrarySuite):
    translation_invariant = True
    preset = "none"

    def build(self, site: Site) -> NoPosition:
        return NoPosition()


def test_shuffled_tokens_are_a_shuffled_output() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    order = torch.randperm(6)
    plain = attention(q, k, v, position=NoPosition(), queries=Sequence(6))
    shuffled = attention(*(x[:, :, order] for x in (q, k, v)), position=NoPosition(), queries=Sequence(6))  # type: ignore[misc]
    torch.testing.assert_close(shuffled, plain[:, :, order])


def test_says_nothing_and_grows_as_it_is() -> None:
    none = NoPosition.from_site(Site(3, 4, 12, Grid(2, 2)))
    assert len(none.terms(Sequence(3))) == 0
    assert not none.acts_in_attention
    assert not none.acts_on_tokens
    assert not list(none.parameters())
    assert none.grow(Grid(9, 9), "as is") is none
    with pytest.raises(ValueError, match="growth rule"):
        none.grow(Grid(9, 9), "interpolated")
