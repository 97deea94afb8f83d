"""What position mechanisms pass to attention: a small closed set of frozen terms.

The score of query i and key j in head h is, in this order,

    softcap(factor * scale * <rotate(q) + u, rotate(k)>) + line biases + vector terms + low-rank biases
        + indexed and dense biases + row rules,

then the mask, then sinks; vectors on the value side are added to v under the softmax's weights. A rotation may turn
values too, and the output back; it may be another one for some pairs. The docstring of each
class states what it adds, and its `scores` computes the same. All terms index query heads, even if keys are grouped.
Vectors are multiplied with unrotated q and k. `core.algebra` defines how terms combine.
"""

from relpos.core.terms.biases import DenseBias, LineBias, LowRank, RowRule
from relpos.core.terms.indexed import IndexedBias
from relpos.core.terms.of_content import (
    QueryBias,
    QueryScale,
    Scale,
    Sinks,
    Softcap,
    after_content,
    content,
)
from relpos.core.terms.pair_rotations import PairRotations
from relpos.core.terms.rotations import Polar, Rotation
from relpos.core.terms.vectors import AxisVectors, LineVectors

__all__ = [
    "AxisVectors",
    "DenseBias",
    "IndexedBias",
    "LineBias",
    "LineVectors",
    "LowRank",
    "PairRotations",
    "Polar",
    "QueryBias",
    "QueryScale",
    "Rotation",
    "RowRule",
    "Scale",
    "Sinks",
    "Softcap",
    "after_content",
    "content",
]
