"""The factored relative bias: a table an axis, added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import (
    FactoredBias,
    Grid,
    LineBias,
    Positions,
    RelativePositionBias,
    Sequence,
    Site,
    attention,
    count_parameters,
)
from relpos.core import Coordinates, expand
from relpos.testing import oracle


class TestFactored(LibrarySuite):
    alike = True
    axes = (1, 2, 3)
    translation_invariant = True
    preset = "factored_2d"

    def build(self, site: Site) -> FactoredBias:
        keys = site.queries if site.keys is None else site.keys
        return FactoredBias(site.num_heads, _cover(site.queries, keys), init_std=1.0)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        tables = list(mechanism.tables)
        entries = []
        for query in oracle.places(queries):
            for key in oracle.places(keys):
                total = torch.zeros_like(tables[0][0])
                if query is not None and key is not None:
                    for table, a, b in zip(tables, query, key, strict=True):
                        total = total + table[a - b + len(table) // 2]
                entries.append(total)
        return torch.stack(entries, dim=-1).view(-1, queries.count, keys.count)


def _cover(queries: Coordinates, keys: Coordinates) -> Any:
    """The window whose tables hold every offset that the coordinates' bounds allow."""
    return tuple(
        max(qh - kl, kh - ql) + 1 for ql, qh, kl, kh in zip(queries.low, queries.high, keys.low, keys.high, strict=True)
    )


# what it is beside a joint table


@pytest.mark.parametrize("window", [(1, 1), (4, 7), (14, 14), (2, 3, 4), (6,)])
def test_numbers_learned(window: tuple[int, ...]) -> None:
    own = FactoredBias(3, window)
    assert [len(table) for table in own.tables] == [2 * size - 1 for size in window]
    assert count_parameters(own)["position"].weights == 3 * sum(2 * size - 1 for size in window)
    if window == (14, 14):
        assert count_parameters(own)["position"].weights == 3 * 54
        assert count_parameters(RelativePositionBias(3, window))["position"].weights == 3 * 729


def test_it_is_a_joint_table_of_sums() -> None:
    """As `RelativePositionBias` whose every entry is the row's number plus the column's: values and gradients."""
    own = FactoredBias(2, (3, 4), init_std=1.0).double()
    rows, columns = own.tables
    joint = RelativePositionBias(2, (3, 4)).double()
    with torch.no_grad():
        joint.relative_position_bias_table.copy_((rows[:, None] + columns[None]).flatten(0, 1))
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64)
    ours, theirs = (attention(q, k, v, position=each, queries=Grid(3, 4)) for each in (own, joint))
    torch.testing.assert_close(ours, theirs)
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    upstream = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, [rows, columns], upstream)
    (other,) = torch.autograd.grad(theirs, [joint.relative_position_bias_table], upstream)
    both = other.unflatten(0, (5, 7))
    torch.testing.assert_close(mine[0], both.sum(dim=1))
    torch.testing.assert_close(mine[1], both.sum(dim=0))


def test_it_is_the_sum_of_two_biases() -> None:
    """One of the row alone and one of the column alone."""
    own = FactoredBias(2, (3, 4), init_std=1.0)
    parts = []
    for axis in range(2):
        part = FactoredBias(2, (3, 4), init_std=0.0)
        part.tables[axis].data.copy_(own.tables[axis].data)
        parts.append(part)
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64)
    together = attention(q, k, v, position=parts[0] + parts[1], queries=Grid(3, 4))
    torch.testing.assert_close(attention(q, k, v, position=own, queries=Grid(3, 4)), together, rtol=1e-6, atol=1e-6)


def test_it_cannot_single_out_one_diagonal_neighbour() -> None:
    """For any tables b(1, 1) + b(0, 0) = b(1, 0) + b(0, 1): a bump at (1, 1) alone is beyond it."""
    own = FactoredBias(4, (2, 2), init_std=1.0)
    (term,) = own.terms(Grid(2, 2)).of(LineBias)
    dense = expand(term.values, term.lines)
    torch.testing.assert_close(dense[:, 3, 0] + dense[:, 0, 0], dense[:, 2, 0] + dense[:, 1, 0])


def test_which_table_is_which() -> None:
    own = FactoredBias(1, (3, 3), init_std=0.0)
    with torch.no_grad():
        own.tables[0][3] = 5.0  # one row below the key
        own.tables[1][0] = 7.0  # two columns left of the key
    (term,) = own.terms(Grid(3, 3)).of(LineBias)
    dense = expand(term.values, term.lines)[0]
    assert dense[3, 2] == 12, "(1, 0) sees (0, 2)"
    assert dense[3, 0] == 5
    assert dense[0, 2] == 7
    assert dense[2, 3] == dense[0, 3] == dense[2, 0] == 0


# offsets beyond the tables


def test_beyond_raises_or_clips() -> None:
    with pytest.raises(ValueError, match="offsets from -2 to 2 on axis 1; got -3 to 3"):
        FactoredBias(2, (4, 3)).terms(Grid(4, 4))
    with pytest.raises(ValueError, match="offsets from -3 to 3 on axis 0; got 1 to 4"):
        FactoredBias(2, (4,)).terms(Sequence(1, start=4), Sequence(4))
    clipping = FactoredBias(2, (2, 3), init_std=1.0, beyond="clip")
    (term,) = clipping.terms(Grid(4, 4)).of(LineBias)
    values = term.values.unflatten(1, (7, 7))
    rows, columns = clipping.tables
    for dy in range(-3, 4):
        for dx in range(-3, 4):
            wanted = rows[min(max(dy, -1), 1) + 1] + columns[min(max(dx, -2), 2) + 2]
            assert torch.equal(values[:, dy + 3, dx + 3], wanted)


def test_resize_by_loops() -> None:
    """Each table by linear interpolation between the centres of cells; the mechanism itself is left as it is."""
    own = FactoredBias(2, (3, 4), init_std=1.0)
    before = [table.detach().clone() for table in own.tables]
    grown = own.resize((5, 2))
    assert grown.sizes == (5, 2)
    assert own.sizes == (3, 4)
    for old, table in zip(before, grown.tables, strict=True):
        new = table.detach()
        for row in range(len(new)):
            place = min(max((row + 0.5) * len(old) / len(new) - 0.5, 0), len(old) - 1)
            low = min(int(place), len(old) - 2)
            torch.testing.assert_close(new[row], old[low] * (1 - place + low) + old[low + 1] * (place - low))
    for table, old in zip(own.tables, before, strict=True):
        assert torch.equal(table, old)
    for table, old in zip(own.resize((3, 4)).tables, before, strict=True):
        torch.testing.assert_close(table.detach(), old)
    grown.terms(Grid(5, 2))
    assert list(grown.state_dict()) == ["tables.0", "tables.1"]


def test_resize_keeps_dtype_and_what_is_frozen() -> None:
    own = FactoredBias(2, (3, 1), init_std=1.0).to(torch.bfloat16)
    own.tables[0].requires_grad_(False)
    grown = own.resize((4, 6))
    assert [table.dtype for table in grown.tables] == [torch.bfloat16] * 2
    assert [table.requires_grad for table in grown.tables] == [False, True]
    assert torch.equal(grown.tables[1], own.tables[1].expand(11, 2)), "one offset goes on"


def test_grow() -> None:
    own = FactoredBias(3, (3, 3), init_std=1.0)
    assert own.growth == ("interpolated", "clipped")
    grown = own.grow(Grid(5, 4, prefix=1), "interpolated")
    assert isinstance(grown, FactoredBias)
    assert (grown.sizes, grown.beyond) == ((5, 4), "raise")
    grown.terms(Grid(5, 4, prefix=1))
    clipped = own.grow(Grid(5, 4), "clipped")
    assert isinstance(clipped, FactoredBias)
    assert (clipped.sizes, clipped.beyond, own.beyond) == ((3, 3), "clip", "raise")
    assert all(torch.equal(a, b) for a, b in zip(clipped.tables, own.tables, strict=True))
    clipped.terms(Grid(5, 4))
    with pytest.raises(ValueError, match="interpolated, clipped"):
        own.grow(Grid(5, 5), "extended")
    with pytest.raises(ValueError, match="a grid for a factored bias to grow to; got Sequence"):
        own.grow(Sequence(9), "interpolated")


@pytest.mark.parametrize(
    ("queries", "keys", "sizes"),
    [
        (Grid(2, 5, prefix=1), None, (2, 5)),
        (Grid(2, 3), Grid(4, 2), (4, 3)),
        (Grid(2, 3), Positions(torch.tensor([[5, 0]]), low=(0, 0), high=(5, 2)), (6, 3)),
        (Grid(2, 3, 4), None, (2, 3, 4)),
    ],
)
def test_from_site_covers_both_sides(queries: Any, keys: Coordinates | None, sizes: tuple[int, ...]) -> None:
    own = FactoredBias.from_site(Site(3, 4, 12, queries, keys))
    assert own.sizes == sizes
    own.terms(queries, keys)
