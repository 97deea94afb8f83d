"""Presets of common sums; any other sum is written `a+b`, or built with `+`.

An absolute and a relative position together: a token carries its address, and a head still prefers directions. Swin
(Liu et al. 2021, table 4) tried it: no better than the relative bias alone on ImageNet, and worse in detection and
segmentation. A rotation and a bias: the rotation acts on queries and keys, the bias on their product.
"""

from __future__ import annotations

from relpos.position.base.preset import Preset, sum_of

PRESETS = [
    Preset(
        name="learned+relative_2d",
        title="Hybrid: learned absolute + relative 2-D",
        build=sum_of("learned", "relative_2d"),
        summary="One learned vector per position on the tokens and one learned bias per offset on the scores, "
        "together. It can do what either can and keeps the weakness of the first: what it learned about "
        "positions does not transfer to others.",
        source="Liu et al. 2021 (Swin), table 4, row 'abs. + rel. pos.'",
        token_axes=(2,),
        family="sum",
    ),
    Preset(
        name="rotary_2d+relative_2d",
        title="Rotary 2-D + relative 2-D",
        build=sum_of("rotary_2d", "relative_2d"),
        summary="Queries and keys rotate with row and column, and each head adds one learned bias per offset. With "
        "the rotation content decides what an offset means; the bias adds a preference for any content.",
        source="Heo et al. 2024 and Liu et al. 2021, together",
        token_axes=(2,),
        family="sum",
    ),
]
