"""Learned absolute positions, on sequences and grids. Other sizes are in test_windows.py."""

from typing import Any

import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Grid, LearnedPositionEmbedding, Sequence, Site
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle


class TestLearnedSequence(LibrarySuite):
    axes = (1,)
    preset = "learned"

    def takes(self, case: SuiteCase) -> bool:
        return super().takes(case) and case.queries.low[0] >= 0

    def build(self, site: Site) -> LearnedPositionEmbedding:
        return LearnedPositionEmbedding(
            site.embed_dim, seq_len=site.queries.high[0] + 1, prefix=site.queries.prefix, init_std=1.0
        )

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        """Prefix tokens take the first rows, one each; the others the row of their number behind them."""
        prefix = coordinates.prefix
        rows = [n if at is None else prefix + at[0] for n, at in enumerate(oracle.raster(coordinates))]
        return oracle.learned_absolute(x, mechanism.pos_embed[0], rows)


class TestLearnedGrid(TestLearnedSequence):
    alike = True
    axes = (2, 3)
    irregular = False

    def build(self, site: Site) -> LearnedPositionEmbedding:
        assert isinstance(site.queries, Grid)
        return LearnedPositionEmbedding(
            site.embed_dim, grid_size=site.queries.sizes, prefix=site.queries.prefix, init_std=1.0
        )


def test_prefix_tokens_alone() -> None:
    learned = LearnedPositionEmbedding(4, seq_len=3, prefix=2, init_std=1.0)
    x = torch.randn(2, 2, 4)
    torch.testing.assert_close(learned.embed(x, Sequence(0, prefix=2)), x + learned.pos_embed[:, :2])
