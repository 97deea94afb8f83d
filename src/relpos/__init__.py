"""relpos: a sense of position for Transformers.

    import relpos
    bias = relpos.RelativePositionBias(num_heads=8, window_size=(14, 14))
    y = relpos.attention(q, k, v, position=bias, queries=relpos.Grid(14, 14))

`offset = query - key` everywhere. Shapes are PyTorch SDPA's: [batch, heads, tokens, width].
"""

import importlib
import typing

from relpos.adapters import replace_position, resize_position, restore, retrofit
from relpos.compat import AdamW, ALiBiPositionalEmbedding, RotaryPositionalEmbedding
from relpos.core import (
    AxisVectors,
    Blocks,
    DenseBias,
    Graph,
    Grid,
    IndexedBias,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    PairRotations,
    Polar,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    at_least_float32,
    lines,
    lookup,
    rotate,
)
from relpos.engines import (
    Explanation,
    attention,
    attention_weights,
    backends,
    explain,
    flash_attention,
    linear_attention,
)
from relpos.layers import (
    FlashAttention,
    GatedMlp,
    GroupNorm,
    KeyValueCache,
    LinearAttention,
    LocalAttention,
    Mlp,
    MultiHeadAttention,
    MultiQueryAttention,
    PatchEmbedding,
    RMSNorm,
    ScaledDotProductAttention,
    SparseAttention,
    TransformerBlock,
)
from relpos.models import LanguageModel, SwinTransformer, VisionTransformer, count_parameters, load_weights
from relpos.optim import Lion, Sophia, parameter_groups, sampled_loss
from relpos.position import (
    ALiBi,
    CABLEBias,
    CARoPE,
    ClippedBias,
    ClippedScaling,
    CoPE,
    DecomposedPosition,
    DisentangledPosition,
    DualChunk,
    DynamicNTK,
    FactoredBias,
    FIREBias,
    ForgetGate,
    FromStates,
    GraphormerBias,
    ImageRelativePosition,
    InklingBias,
    Kerple,
    LearnedPositionEmbedding,
    LinearScaling,
    Llama3Scaling,
    LogContinuousBias,
    LongRoPE,
    Mechanism,
    MultimodalRotary,
    NoPosition,
    NTKScaling,
    OffsetBias,
    PolarEmbedding,
    ProportionalScaling,
    RandomizedPositions,
    RelativePositionBias,
    ReRoPE,
    ResonanceScaling,
    RotaryDINOv3,
    RotaryEmbedding,
    RotaryMixed,
    Sandwich,
    SelectiveRoPE,
    SelfExtend,
    ShawPosition,
    SinusoidalPositionEmbedding,
    Site,
    T5Bias,
    TransformerXLPosition,
    TUPEPosition,
    XPos,
    YaRN,
    alibi_slopes,
    create_position,
    decoding,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
    reading_once,
)
from relpos.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from relpos import parallel as parallel
    from relpos import testing as testing
    from relpos.comparison.entry import compare
    from relpos.comparison.result import ComparisonResult

__all__ = [
    "ALiBi",
    "ALiBiPositionalEmbedding",
    "AdamW",
    "AxisVectors",
    "Blocks",
    "CABLEBias",
    "CARoPE",
    "ClippedBias",
    "ClippedScaling",
    "CoPE",
    "ComparisonResult",
    "DecomposedPosition",
    "DenseBias",
    "DisentangledPosition",
    "DualChunk",
    "DynamicNTK",
    "Explanation",
    "FIREBias",
    "FactoredBias",
    "FlashAttention",
    "ForgetGate",
    "FromStates",
    "GatedMlp",
    "Graph",
    "GraphormerBias",
    "Grid",
    "GroupNorm",
    "ImageRelativePosition",
    "IndexedBias",
    "InklingBias",
    "Kerple",
    "KeyValueCache",
    "LanguageModel",
    "LearnedPositionEmbedding",
    "LineBias",
    "LineVectors",
    "LinearAttention",
    "LinearScaling",
    "Lines",
    "Lion",
    "Llama3Scaling",
    "LocalAttention",
    "LogContinuousBias",
    "LongRoPE",
    "LowRank",
    "Mask",
    "Mechanism",
    "Mlp",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "MultimodalRotary",
    "NTKScaling",
    "NoPosition",
    "OffsetBias",
    "PairRotations",
    "PatchEmbedding",
    "Polar",
    "PolarEmbedding",
    "Positions",
    "ProportionalScaling",
    "QueryBias",
    "QueryScale",
    "RMSNorm",
    "RandomizedPositions",
    "ReRoPE",
    "RelativePositionBias",
    "ResonanceScaling",
    "RotaryDINOv3",
    "RotaryEmbedding",
    "RotaryMixed",
    "RotaryPositionalEmbedding",
    "Rotation",
    "RowRule",
    "Sandwich",
    "Scale",
    "ScaledDotProductAttention",
    "SelectiveRoPE",
    "SelfExtend",
    "Sequence",
    "ShawPosition",
    "Sinks",
    "SinusoidalPositionEmbedding",
    "Site",
    "Softcap",
    "Sophia",
    "SparseAttention",
    "SwinTransformer",
    "T5Bias",
    "TUPEPosition",
    "Terms",
    "TransformerBlock",
    "TransformerXLPosition",
    "VisionTransformer",
    "XPos",
    "YaRN",
    "alibi_slopes",
    "at_least_float32",
    "attention",
    "attention_weights",
    "backends",
    "compare",
    "count_parameters",
    "create_position",
    "decoding",
    "explain",
    "flash_attention",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "linear_attention",
    "lines",
    "load_weights",
    "lookup",
    "parameter_groups",
    "reading_once",
    "replace_position",
    "resize_position",
    "restore",
    "retrofit",
    "rotate",
    "sampled_loss",
]


def _drawn(mechanism: Mechanism) -> str | None:
    """The picture of a mechanism in a notebook, where matplotlib is installed."""
    try:
        picture: str = importlib.import_module("relpos.report.drawing.notebook").mechanism_html(mechanism)
    except ImportError:
        return None
    return picture


Mechanism._repr_html_ = _drawn


def __getattr__(name: str) -> typing.Any:
    """What is imported when it is asked for: the comparison and the conformance suite need libraries of their own."""
    if name == "compare":
        return importlib.import_module("relpos.comparison.entry").compare
    if name == "ComparisonResult":
        return importlib.import_module("relpos.comparison.result").ComparisonResult
    if name == "parallel":
        return importlib.import_module("relpos.parallel")
    if name == "testing":
        return importlib.import_module("relpos.testing")
    near = "" if name.startswith("_") else _nearest_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")


def _nearest_name(name: str) -> str:
    """The question whether the nearest public name was meant."""
    import difflib

    known = {one.lower(): one for one in __all__}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    return f". Did you mean relpos.{known[near[0]]}?" if near else ""


def __dir__() -> list[str]:
    """The public names and modules."""
    return sorted({*__all__, *(name for name in globals() if name not in ("importlib", "typing"))})
