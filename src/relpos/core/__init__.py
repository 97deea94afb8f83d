"""The core: coordinates, lines, terms, masks. Knows neither mechanisms nor engines.

Data flows  coordinates -> mechanism -> terms -> attention.  This package holds coordinates, terms, and the code that
engines share.
"""

from relpos.core.algebra import Term, Terms
from relpos.core.blocks import Blocks
from relpos.core.cache import cached, may_cache
from relpos.core.constants import caches_constants, constant, uncached_constant
from relpos.core.coordinates import (
    Coordinates,
    Grid,
    Positions,
    Sequence,
    require_coordinates,
    require_queries_and_keys,
)
from relpos.core.densify import contract, expand
from relpos.core.gather import Rows, at_least_float32, lookup, read, segment_sum
from relpos.core.graph import Graph
from relpos.core.line import Kind, Layout, Lines, Offsets, Ramp, axis_lines, lines
from relpos.core.mask import Mask, MaskLike
from relpos.core.rotation import cosines, require_width, rotate
from relpos.core.terms import (
    AxisVectors,
    DenseBias,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    PairRotations,
    Polar,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Softcap,
    after_content,
    content,
)

__all__ = [
    "AxisVectors",
    "Blocks",
    "Coordinates",
    "DenseBias",
    "Graph",
    "Grid",
    "IndexedBias",
    "Kind",
    "Layout",
    "LineBias",
    "LineVectors",
    "Lines",
    "LowRank",
    "Mask",
    "MaskLike",
    "Offsets",
    "PairRotations",
    "Polar",
    "Positions",
    "QueryBias",
    "QueryScale",
    "Ramp",
    "Rotation",
    "RowRule",
    "Rows",
    "Scale",
    "Sequence",
    "Sinks",
    "Softcap",
    "Term",
    "Terms",
    "after_content",
    "at_least_float32",
    "axis_lines",
    "cached",
    "caches_constants",
    "constant",
    "content",
    "contract",
    "cosines",
    "expand",
    "lines",
    "lookup",
    "may_cache",
    "read",
    "require_coordinates",
    "require_queries_and_keys",
    "require_width",
    "rotate",
    "segment_sum",
    "uncached_constant",
]
