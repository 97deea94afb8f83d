"""The factored relative bias: a table an axis, added up. Other windows are in test_windows.py."""

from typing import Any

import torch
from torch import Tensor

from position.suites import OffsetSuite, cover
from relpos import FactoredBias, Site


class TestFactored(OffsetSuite):
    alike = True
    axes = (1, 2, 3)
    translation_invariant = True
    preset = "factored_2d"

    def build(self, site: Site) -> FactoredBias:
        return FactoredBias(site.num_heads, cover(site), init_std=1.0)

    def value(self, own: Any, *offset: int) -> Tensor:
        rows = [table[n + len(table) // 2] for table, n in zip(own.tables, offset, strict=True)]
        return torch.stack(rows).sum(dim=0)
