"""Resonance RoPE: wavelengths are rounded to whole numbers of tokens, so that a pair repeats its angles exactly.

    w'[p] = 2 pi / max(1, round(2 pi / w[p]))        w of plain frequencies, or of another scaling (Resonance YaRN)

A pair that makes many turns in the trained context then has no other angles in a longer one: only pairs whose
wavelength exceeds the trained context meet new angles. Rounding changes the fastest pairs most (the first: 6.28 tokens
to 6), so the model is trained, or trained further, with it.

Source: Wang et al. 2024 ("Resonance RoPE"), section 4, and its code, which rounds every pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relpos.position.base.angles import frequencies
from relpos.position.base.preset import Preset
from relpos.position.rotary import RotaryEmbedding
from relpos.position.scaling import RotaryScaling, Scaled, require_scaling


@dataclass(frozen=True)
class ResonanceScaling:
    """Wavelengths rounded to whole numbers of tokens, at least 1; those of another scaling if one is given.

    Source: Wang et al. 2024 (Resonance RoPE), section 4.

    Args:
        scaling: whose frequencies are rounded, such as `YaRN(4.0, 2048)`; None for those of the base.

    Raises:
        ValueError: no scaling.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(8, scaling=relpos.ResonanceScaling())
        >>> [round(2 * torch.pi / band, 6) for band in rotary.bands(1)[0]]
        [6.0, 63.0, 628.0, 6283.0]
    """

    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        require_scaling(self.scaling)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        bands, magnitude = (
            (frequencies(pairs, base), 1.0) if self.scaling is None else self.scaling(base, pairs, length)
        )
        return tuple(2 * math.pi / max(1, round(2 * math.pi / w)) if w else 0.0 for w in bands), magnitude


PRESETS = [
    Preset(
        name="rotary_resonance",
        title="Rotary (RoPE), 1-D, Resonance",
        build=lambda site: RotaryEmbedding(site.head_dim, scaling=ResonanceScaling()),
        summary="The rotation with wavelengths that are whole numbers of tokens: fast pairs repeat their angles "
        "exactly, and a longer input has no new ones for them.",
        source="Wang et al. 2024, section 4; base 10,000, half layout",
        token_axes=(1,),
        family="rotation",
    )
]
