"""No position at all: attention sees a set. The control of every comparison.

Without positions and without a causal mask, shuffling the tokens shuffles the output alike (Vaswani et al. 2017,
section 3.5, is why positions are added). With a causal mask a model can still count the tokens it sees, so `none` is
not blind there (Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn Positional
Information").
"""

from __future__ import annotations

from typing import Self

from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site


class NoPosition(Mechanism):
    """Says nothing to attention and adds nothing to tokens.

    The control of every comparison. Under a causal mask a model can still count the tokens it sees.

    Examples:
        >>> len(relpos.NoPosition().terms(relpos.Sequence(8)))
        0
    """

    growth = (AS_IS,)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls()


PRESETS = [
    Preset(
        name="none",
        title="No position",
        build=NoPosition.from_site,
        summary="Attention sees an unordered set of tokens: their content, but not their position. Only under a "
        "causal mask can it count them. It is the control against which every mechanism is measured.",
        source="Vaswani et al. 2017, section 3.5 (why positions are needed)",
        token_axes=(1, 2, 3),
        family="none",
        aliases=("nope",),
    )
]
