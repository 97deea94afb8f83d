"""Position mechanisms, one a file. They make terms; they never see queries, keys or engines."""

from relpos.position.learned import LearnedPositionEmbedding
from relpos.position.mechanism import Mechanism, OffsetBias, Site, Sum
from relpos.position.none import NoPosition
from relpos.position.preset import Preset, find, presets
from relpos.position.relative import (
    RelativePositionBias,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)

__all__ = [
    "LearnedPositionEmbedding",
    "Mechanism",
    "NoPosition",
    "OffsetBias",
    "Preset",
    "RelativePositionBias",
    "Site",
    "Sum",
    "find",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "presets",
]
