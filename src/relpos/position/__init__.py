"""Position mechanisms, one a file. They make terms; they never see queries, keys or engines."""

from relpos.position.alibi import ALiBi, alibi_slopes
from relpos.position.base.from_states import FromStates
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.outside import from_file
from relpos.position.base.preset import Preset, create_position, find, presets
from relpos.position.base.relative_index import get_relative_position_index_1d, get_relative_position_index_2d
from relpos.position.base.scope import decoding, reading_once
from relpos.position.base.site import Site
from relpos.position.base.sum import Sum
from relpos.position.cable import CABLEBias
from relpos.position.carope import CARoPE
from relpos.position.clipped import ClippedBias
from relpos.position.clipped_rotary import ClippedScaling
from relpos.position.cope import CoPE
from relpos.position.deberta import DisentangledPosition
from relpos.position.decomposed import DecomposedPosition
from relpos.position.factored import FactoredBias
from relpos.position.fire import FIREBias
from relpos.position.fox import ForgetGate
from relpos.position.graphormer import GraphormerBias
from relpos.position.inkling import InklingBias
from relpos.position.irpe import ImageRelativePosition
from relpos.position.kerple import Kerple
from relpos.position.learned import LearnedPositionEmbedding
from relpos.position.log_cpb import LogContinuousBias
from relpos.position.multi_axis import MultimodalRotary
from relpos.position.none import NoPosition
from relpos.position.pope import PolarEmbedding
from relpos.position.randomized import RandomizedPositions
from relpos.position.relative import RelativePositionBias
from relpos.position.resonance import ResonanceScaling
from relpos.position.rotary import RotaryEmbedding
from relpos.position.rotary_by_offset import DualChunk, ReRoPE, SelfExtend
from relpos.position.rotary_dinov3 import RotaryDINOv3
from relpos.position.rotary_mixed import RotaryMixed
from relpos.position.sandwich import Sandwich
from relpos.position.scaling import (
    DynamicNTK,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    NTKScaling,
    ProportionalScaling,
    YaRN,
)
from relpos.position.selective_rope import SelectiveRoPE
from relpos.position.shaw import ShawPosition
from relpos.position.sinusoidal import SinusoidalPositionEmbedding
from relpos.position.t5 import T5Bias
from relpos.position.transformer_xl import TransformerXLPosition
from relpos.position.tupe import TUPEPosition
from relpos.position.xpos import XPos

__all__ = [
    "ALiBi",
    "CABLEBias",
    "CARoPE",
    "ClippedBias",
    "ClippedScaling",
    "CoPE",
    "DecomposedPosition",
    "DisentangledPosition",
    "DualChunk",
    "DynamicNTK",
    "FIREBias",
    "FactoredBias",
    "ForgetGate",
    "FromStates",
    "GraphormerBias",
    "ImageRelativePosition",
    "InklingBias",
    "Kerple",
    "LearnedPositionEmbedding",
    "LinearScaling",
    "Llama3Scaling",
    "LogContinuousBias",
    "LongRoPE",
    "Mechanism",
    "MultimodalRotary",
    "NTKScaling",
    "NoPosition",
    "OffsetBias",
    "PolarEmbedding",
    "Preset",
    "ProportionalScaling",
    "RandomizedPositions",
    "ReRoPE",
    "RelativePositionBias",
    "ResonanceScaling",
    "RotaryDINOv3",
    "RotaryEmbedding",
    "RotaryMixed",
    "Sandwich",
    "SelectiveRoPE",
    "SelfExtend",
    "ShawPosition",
    "SinusoidalPositionEmbedding",
    "Site",
    "Sum",
    "T5Bias",
    "TUPEPosition",
    "TransformerXLPosition",
    "XPos",
    "YaRN",
    "alibi_slopes",
    "create_position",
    "decoding",
    "find",
    "from_file",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "presets",
    "reading_once",
]
