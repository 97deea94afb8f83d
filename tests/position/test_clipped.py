"""The clipped relative bias: one number a distance up to R, one for all beyond."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from parity import agree
from relpos import ClippedBias, Grid, LineBias, Mask, Positions, RelativePositionBias, Sequence, Site, attention
from relpos.core import Coordinates, expand
from relpos.engines import attention_weights
from relpos.testing import oracle


class TestClipped(LibrarySuite):
    alike = True
    axes = (1, 2)
    translation_invariant = True
    preset = "clipped"
    reach: ClassVar[int] = 3  # so that the cases clip on both sides

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> ClippedBias:
        return ClippedBias(site.num_heads, self.reach, init_std=1.0)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Shaw et al. 2018, section 3.2: w[clip(offset, -k, k)], here a number a head."""
        table: Tensor = mechanism.relative_position_bias_table
        entries = []
        for query in oracle.raster(queries):
            for key in oracle.raster(keys):
                if query is None or key is None:
                    entries.append(torch.zeros_like(table[0]))
                else:
                    entries.append(table[max(-self.reach, min(self.reach, query[0] - key[0])) + self.reach])
        return torch.stack(entries, dim=-1).view(-1, queries.count, keys.count)

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestClippedToOne(TestClipped):
    """At 0 all distances share one number, and attention is as without position."""

    sampled = 2
    row = "clipped (R = 0)"
    reach = 0

    def test_it_says_nothing(self) -> None:
        q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
        own = ClippedBias(2, 0, init_std=1.0)
        torch.testing.assert_close(attention(q, k, v, position=own, queries=Sequence(6)), attention(q, k, v))


# the documents' example


def worked() -> ClippedBias:
    own = ClippedBias(1, 2)
    with torch.no_grad():
        own.relative_position_bias_table.copy_(torch.tensor([[-0.3], [-0.2], [0.0], [0.2], [0.3]]))
    return own


def test_worked_example() -> None:
    """Seven tokens, R = 2, written out. The upper right is the future: query 0 has all other keys after it."""
    (term,) = worked().terms(Sequence(7)).of(LineBias)
    wanted = [
        [0.0, -0.2, -0.3, -0.3, -0.3, -0.3, -0.3],
        [0.2, 0.0, -0.2, -0.3, -0.3, -0.3, -0.3],
        [0.3, 0.2, 0.0, -0.2, -0.3, -0.3, -0.3],
        [0.3, 0.3, 0.2, 0.0, -0.2, -0.3, -0.3],
        [0.3, 0.3, 0.3, 0.2, 0.0, -0.2, -0.3],
        [0.3, 0.3, 0.3, 0.3, 0.2, 0.0, -0.2],
        [0.3, 0.3, 0.3, 0.3, 0.3, 0.2, 0.0],
    ]
    found = expand(term.values, term.lines)[0].detach()
    assert torch.equal(found, torch.tensor(wanted))
    agree("clipped", "worked example of 7 x 7", {"output": found}, {"output": torch.tensor(wanted)}, limit=0)


def test_worked_example_in_attention() -> None:
    """Equal content: the weights of token 3 are softmax(0.3, 0.3, 0.2, 0, -0.2, -0.3, -0.3)."""
    zeros = torch.zeros(1, 1, 7, 4)
    row = [math.exp(x) for x in (0.3, 0.3, 0.2, 0.0, -0.2, -0.3, -0.3)]
    weights = attention_weights(zeros, zeros, position=worked().terms(Sequence(7)))[0, 0, 3]
    assert weights.tolist() == pytest.approx([x / sum(row) for x in row], rel=1e-6)
    causal = attention_weights(zeros, zeros, position=worked().terms(Sequence(7)), mask=Mask.causal())[0, 0, 3]
    assert causal.tolist() == pytest.approx([*(x / sum(row[:4]) for x in row[:4]), 0, 0, 0], rel=1e-6)


# what it holds


@pytest.mark.parametrize("reach", [0, 1, 16])
def test_numbers_a_head_whatever_the_length(reach: int) -> None:
    """2 R + 1, where the documents once say 2 R + 14."""
    own = ClippedBias(3, reach)
    assert own.relative_position_bias_table.shape == (2 * reach + 1, 3)
    for length in (1, 100):
        (term,) = own.terms(Sequence(length)).of(LineBias)
        assert term.values.shape == (3, 2 * length - 1)


def test_only_far_offsets_are_shared() -> None:
    """Up to R it is the table of its own length; beyond, both ends go on and stay apart."""
    own = ClippedBias(2, 4, init_std=1.0)
    table = RelativePositionBias(2, seq_len=5)
    table.load_state_dict(own.state_dict())
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    ours, theirs = (attention(q, k, v, position=each, queries=Sequence(5)) for each in (own, table))
    assert torch.equal(ours, theirs)  # type: ignore[arg-type]
    (term,) = own.terms(Positions(torch.tensor([0, 10**6]), low=0, high=10**6), Sequence(2)).of(LineBias)
    values = term.values[:, term.lines.index()]
    first, last = own.relative_position_bias_table[0], own.relative_position_bias_table[-1]
    assert torch.equal(values[:, 1], last[:, None].expand(2, 2)), "a million tokens back"
    (term,) = own.terms(Sequence(1), Sequence(1, start=10**6)).of(LineBias)
    assert torch.equal(term.values[:, 0], first)
    assert not torch.equal(first, last)


def test_gradient_of_the_ends_is_a_sum() -> None:
    """Of seven keys a query, the pairs at 2 or more on one side: 5 + 4 + 3 + 2 + 1."""
    own = worked()
    (term,) = own.terms(Sequence(7)).of(LineBias)
    (gradient,) = torch.autograd.grad(expand(term.values, term.lines).sum(), own.relative_position_bias_table)
    assert gradient[:, 0].tolist() == [15, 6, 7, 6, 15]


def test_from_site_and_growth() -> None:
    own = ClippedBias.from_site(Site(6, 4, 24, Grid(2, 2), init_std=0.5))
    assert (own.max_distance, own.relative_position_bias_table.shape) == (16, (33, 6))
    assert own.relative_position_bias_table.std() > 0.3
    assert not ClippedBias(2, init_std=0).relative_position_bias_table.any()
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "clipped")


def test_it_says_its_heads_and_distance() -> None:
    assert repr(ClippedBias(8, max_distance=12)) == "ClippedBias(num_heads=8, max_distance=12)"
