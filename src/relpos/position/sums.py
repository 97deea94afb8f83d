"""Sums that the field uses, ready-made; any other is written `a+b`, or built with `+`.

An absolute and a relative position together: a token carries its address, and a head still prefers directions. Swin
(Liu et al. 2021, table 4) tried it: no better than the relative bias alone on ImageNet, and worse in detection and
segmentation. A rotation and a bias: the one acts on queries and keys, the other on their product.
"""

from __future__ import annotations

from relpos.position.preset import Preset, sum_of

PRESETS = [
    Preset(
        name="learned+relative_2d",
        title="Hybrid: learned absolute + relative 2-D",
        build=sum_of("learned", "relative_2d"),
        summary="A learned vector a place on the tokens and a learned number an offset on the scores, together. "
        "It can do what either can, and picks up the habits of both: what it learned about places does not move along.",
        source="Liu et al. 2021 (Swin), table 4, row 'abs. + rel. pos.'",
        token_axes=(2,),
        family="sum",
    ),
    Preset(
        name="rotary_2d+relative_2d",
        title="Rotary 2-D + relative 2-D",
        build=sum_of("rotary_2d", "relative_2d"),
        summary="Queries and keys turn with row and column, and each head adds a learned number an offset. "
        "The rotation lets content decide what an offset means, the bias gives a preference whatever the content.",
        source="Heo et al. 2024 and Liu et al. 2021, together",
        token_axes=(2,),
        family="sum",
    ),
]
