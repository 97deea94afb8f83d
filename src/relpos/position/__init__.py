"""Position mechanisms, one a file. They make terms; they never see queries, keys or engines."""

from relpos.position.alibi import ALiBi, alibi_slopes
from relpos.position.learned import LearnedPositionEmbedding
from relpos.position.mechanism import Mechanism, OffsetBias, Site, Sum
from relpos.position.none import NoPosition
from relpos.position.preset import Preset, find, presets
from relpos.position.relative import (
    RelativePositionBias,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)
from relpos.position.rotary import RotaryEmbedding
from relpos.position.sinusoidal import SinusoidalPositionEmbedding
from relpos.position.t5 import T5Bias

__all__ = [
    "ALiBi",
    "LearnedPositionEmbedding",
    "Mechanism",
    "NoPosition",
    "OffsetBias",
    "Preset",
    "RelativePositionBias",
    "RotaryEmbedding",
    "SinusoidalPositionEmbedding",
    "Site",
    "Sum",
    "T5Bias",
    "alibi_slopes",
    "find",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "presets",
]
