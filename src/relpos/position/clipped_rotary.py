"""Clipped RoPE (CoPE of 2026): the slowest pairs rotate more and more slowly than their frequency, the last not at all.

    w'[p] = w[p] (1 + cos(pi r / (c - 1))) / 2        for the last c of P pairs, r = p - (P - c); the others are kept

These are the pairs whose wavelength exceeds the trained context: they never made a whole turn in training, and their
angles in longer contexts are new. Clipping them to 0 at once (`ProportionalScaling`) makes scores oscillate over
distances; the taper of half a cosine does not.

Source: Li et al. 2026 ("CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs"), and its code, which clips
20 of Llama 3's 64 pairs. Not to be confused with `cope`, contextual positions (Golovneva et al. 2024), nor with
`clipped`, a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relpos.core.checks import require_int
from relpos.position.base.angles import frequencies
from relpos.position.base.preset import Preset
from relpos.position.rotary import RotaryEmbedding, site_length
from relpos.position.scaling import RotaryScaling, Scaled, require_scaling


@dataclass(frozen=True)
class ClippedScaling:
    """The slowest pairs clipped softly: by half a cosine, from as they are to no rotation (CoPE, Clipped RoPE).

    Source: Li et al. 2026.

    Args:
        trained_length: of the contexts it was trained on.
        clipped: how many of the slowest pairs; None for those whose wavelength exceeds the trained length. The first
            of them is kept, the last does not rotate. The published Llama 3 has 20.
        scaling: whose frequencies are clipped; None for those of the base.

    Raises:
        ValueError: an argument out of its range.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(16, scaling=relpos.ClippedScaling(trained_length=64))
        >>> plain = relpos.RotaryEmbedding(16).bands(1)[0]
        >>> [round(one / other, 3) for one, other in zip(rotary.bands(1)[0], plain)]
        [1.0, 1.0, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    trained_length: int
    clipped: int | None = None
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        require_int(self.trained_length, "trained_length", at_least=1)
        if self.clipped is not None:
            require_int(self.clipped, "clipped", at_least=0)
        require_scaling(self.scaling)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        plain = frequencies(pairs, base)
        bands, magnitude = (plain, 1.0) if self.scaling is None else self.scaling(base, pairs, length)
        slow = sum(2 * math.pi / w > self.trained_length for w in plain) if self.clipped is None else self.clipped
        count = min(slow, pairs)

        def kept(p: int) -> float:
            r = p - (pairs - count)
            if r <= 0:
                return 1.0
            return (1 + math.cos(math.pi * r / (count - 1))) / 2 if r < count - 1 else 0.0

        return tuple(w * kept(p) for p, w in enumerate(bands)), magnitude


PRESETS = [
    Preset(
        name="rotary_clipped",
        title="Rotary (RoPE), 1-D, clipped",
        build=lambda site: RotaryEmbedding(site.head_dim, scaling=ClippedScaling(site_length(site))),
        summary="The rotation whose slowest pairs, which never make a whole turn in the trained context, are slowed "
        "to a standstill: longer inputs have fewer untrained angles.",
        source="Li et al. 2026 (CoPE, Clipped RoPE); base 10,000, half layout",
        token_axes=(1,),
        family="rotation",
        aliases=("clipped_rope",),
    )
]
