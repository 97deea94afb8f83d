"""The clipped relative bias: one number a distance up to R, one for all beyond."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from parity import agree
from position.suites import OffsetSuite
from relpos import ClippedBias, LineBias, Sequence, Site
from relpos.core import expand


class TestClipped(OffsetSuite):
    alike = True
    axes = (1, 2)
    raster = True
    translation_invariant = True
    preset = "clipped"
    reach: ClassVar[int] = 3  # so that the cases clip on both sides

    def build(self, site: Site) -> ClippedBias:
        return ClippedBias(site.num_heads, self.reach, init_std=1.0)

    def value(self, own: Any, *offset: int) -> Tensor:
        """Shaw et al. 2018, section 3.2: w[clip(offset, -k, k)], here a number a head."""
        row: Tensor = own.relative_position_bias_table[max(-self.reach, min(self.reach, offset[0])) + self.reach]
        return row


class TestClippedToOne(TestClipped):
    """At 0 all distances share one number, and attention is as without position."""

    sampled = 2
    row = "clipped (R = 0)"
    reach = 0


def test_worked_example() -> None:
    """The documents' seven tokens, R = 2. The upper right is the future: query 0 has all other keys after it."""
    own = ClippedBias(1, 2)
    with torch.no_grad():
        own.relative_position_bias_table.copy_(torch.tensor([[-0.3], [-0.2], [0.0], [0.2], [0.3]]))
    (term,) = own.terms(Sequence(7)).of(LineBias)
    wanted = torch.tensor(
        [
            [0.0, -0.2, -0.3, -0.3, -0.3, -0.3, -0.3],
            [0.2, 0.0, -0.2, -0.3, -0.3, -0.3, -0.3],
            [0.3, 0.2, 0.0, -0.2, -0.3, -0.3, -0.3],
            [0.3, 0.3, 0.2, 0.0, -0.2, -0.3, -0.3],
            [0.3, 0.3, 0.3, 0.2, 0.0, -0.2, -0.3],
            [0.3, 0.3, 0.3, 0.3, 0.2, 0.0, -0.2],
            [0.3, 0.3, 0.3, 0.3, 0.3, 0.2, 0.0],
        ]
    )
    found = expand(term.values, term.lines)[0].detach()
    agree("clipped", "worked example of 7 x 7", {"output": found}, {"output": wanted}, limit=0)
