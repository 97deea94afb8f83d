"""Offsets: what moving tokens, taking a part of a grid, or leaving out a batch does not change."""

from __future__ import annotations

from dataclasses import replace

import torch

from relpos.core import Coordinates, Grid, Positions, Sequence
from relpos.testing.base import SuiteBase
from relpos.testing.calls import WIDTH, attend_under, make_inputs, require_close
from relpos.testing.cases import SuiteCase


class InvarianceTests(SuiteBase):
    """Translation, and independence of the batch."""

    def fitting(self, test: str) -> list[SuiteCase]:
        """Translation is tested where queries and keys can be moved."""
        if test == "test_translation":
            return [case for case in self.cases() if _moved(case) is not None]
        return super().fitting(test)

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Translation where it is declared to change nothing."""
        invariant = cls.translation_invariant
        prefixed = cls.prefixes and cls.cross and 1 in cls.axes
        return {
            **super().asked(),
            "test_translation": invariant and bool(cls().fitting("test_translation")),
            "test_a_part_of_a_grid_reads_the_same_numbers": invariant and 2 in cls.axes and cls.irregular,
            "test_prefixes_are_the_same_whatever_the_others_are": invariant and prefixed,
        }

    def test_translation(self, case: SuiteCase) -> None:
        """Moving queries and keys alike changes nothing, where that is declared."""
        moved = _moved(case)
        assert moved is not None
        mechanism, given = self.made(case, torch.float64), make_inputs(case, torch.float64)
        here, there = (
            attend_under(mechanism, given.q, given.k, given.v, queries=each.queries, keys=each.keys)
            for each in (case, moved)
        )
        require_close(there, here, 1e-12, f"moved by 3 on every axis ({case})")

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """A 2 x 3 corner of a 4 x 5 grid, wherever it lies, is a 2 x 3 grid to a translation-invariant mechanism."""
        mechanism = self.at(Grid(4, 5), None).double()
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH, dtype=torch.float64)
        cells = Grid(2, 3).tokens()
        alone = attend_under(mechanism, q, k, v, queries=Positions(cells, low=(0, 0), high=(3, 4)))
        for corner in ((1, 0), (2, 2), (0, 1)):
            moved = Positions(cells + torch.tensor(corner), low=(0, 0), high=(3, 4))
            found = attend_under(mechanism, q, k, v, queries=moved)
            require_close(found, alone, 1e-7, f"2 x 3 cells from {corner} on and from (0, 0) on")
        if self.axes != (1, 2):  # in raster order a smaller grid counts differently
            small = attend_under(mechanism, q, k, v, queries=Grid(2, 3))
            require_close(small, alone, 1e-7, "a grid of 2 x 3 and the same cells of a larger one")

    def test_each_of_a_batch_alone(self, case: SuiteCase) -> None:
        """An element of a batch has the same result alone."""
        mechanism, given = self.made(case, torch.float64), make_inputs(case, torch.float64, batch=3)
        together = attend_under(mechanism, given.q, given.k, given.v, queries=case.queries, keys=case.keys)
        for b in range(3):
            one = slice(b, b + 1)
            alone = attend_under(
                mechanism, given.q[one], given.k[one], given.v[one], queries=case.queries, keys=case.keys
            )
            require_close(together[one], alone, 1e-13, f"element {b} in a batch and alone ({case})")

    def test_prefixes_are_the_same_whatever_the_others_are(self) -> None:
        """Prefix tokens have no coordinates: what they read does not depend on where the others are."""
        mechanism = self.at(Sequence(5, prefix=2), None).double()
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH, dtype=torch.float64)
        one, other = (
            attend_under(mechanism, q[:, :, :2], k, v, queries=Sequence(0, prefix=2), keys=keys)
            for keys in (Sequence(4, prefix=2), Sequence(4, start=1, prefix=2))
        )
        require_close(one, other, 1e-7, "prefix tokens under keys that start at 0 and at 1")


def _moved(case: SuiteCase) -> SuiteCase | None:
    """The case with queries and keys moved by three on every axis; None where its coordinates cannot be moved."""
    moved: list[Coordinates | None] = []
    for one in (case.queries, case.keys):
        match one:
            case Sequence():
                moved.append(replace(one, start=one.start + 3))
            case Positions():
                values = one.values[..., 0] if one.axes == 1 else one.values
                low, high = (tuple(x + 3 for x in bounds) for bounds in (one.low, one.high))
                moved.append(
                    Positions(
                        values + 3,
                        low=low[0] if one.axes == 1 else low,
                        high=high[0] if one.axes == 1 else high,
                        prefix=one.prefix,
                    )
                )
            case None:
                moved.append(None)
            case _:
                return None
    assert moved[0] is not None
    return replace(case, queries=moved[0], keys=moved[1])
