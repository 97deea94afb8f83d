"""Position mechanisms, one a file. They make terms; they never see queries, keys or engines."""

from relpos.position.alibi import ALiBi, alibi_slopes
from relpos.position.clipped import ClippedBias
from relpos.position.deberta import DisentangledPosition
from relpos.position.decomposed import DecomposedPosition
from relpos.position.factored import FactoredBias
from relpos.position.kerple import Kerple
from relpos.position.learned import LearnedPositionEmbedding
from relpos.position.log_cpb import LogContinuousBias
from relpos.position.mechanism import Mechanism, OffsetBias, Site, Sum
from relpos.position.none import NoPosition
from relpos.position.preset import Preset, find, presets
from relpos.position.relative import (
    RelativePositionBias,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)
from relpos.position.rotary import RotaryEmbedding
from relpos.position.sandwich import Sandwich
from relpos.position.shaw import ShawPosition
from relpos.position.sinusoidal import SinusoidalPositionEmbedding
from relpos.position.t5 import T5Bias
from relpos.position.transformer_xl import TransformerXLPosition

__all__ = [
    "ALiBi",
    "ClippedBias",
    "DecomposedPosition",
    "DisentangledPosition",
    "FactoredBias",
    "Kerple",
    "LearnedPositionEmbedding",
    "LogContinuousBias",
    "Mechanism",
    "NoPosition",
    "OffsetBias",
    "Preset",
    "RelativePositionBias",
    "RotaryEmbedding",
    "Sandwich",
    "ShawPosition",
    "SinusoidalPositionEmbedding",
    "Site",
    "Sum",
    "T5Bias",
    "TransformerXLPosition",
    "alibi_slopes",
    "find",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "presets",
]
