"""relpos: a sense of position for Transformers.

    import relpos
    bias = relpos.RelativePositionBias(num_heads=8, window_size=(14, 14))
    y = relpos.attention(q, k, v, position=bias, queries=relpos.Grid(14, 14))

`offset = query - key` everywhere. Shapes are PyTorch SDPA's: [batch, heads, tokens, width].
"""

from relpos.attention import Explanation, attention, attention_weights, backends, explain
from relpos.core import (
    AxisVectors,
    Blocks,
    DenseBias,
    Grid,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    Positions,
    QueryBias,
    Rotation,
    RowRule,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    lines,
    lookup,
    rotate,
)
from relpos.layers import Mlp, MultiHeadAttention, PatchEmbedding, ScaledDotProductAttention, TransformerBlock
from relpos.models import VisionTransformer, count_parameters
from relpos.position import (
    ALiBi,
    LearnedPositionEmbedding,
    Mechanism,
    NoPosition,
    OffsetBias,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionEmbedding,
    Site,
    T5Bias,
    alibi_slopes,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AxisVectors",
    "Blocks",
    "DenseBias",
    "Explanation",
    "Grid",
    "LearnedPositionEmbedding",
    "LineBias",
    "LineVectors",
    "Lines",
    "LowRank",
    "Mask",
    "Mechanism",
    "Mlp",
    "MultiHeadAttention",
    "NoPosition",
    "OffsetBias",
    "PatchEmbedding",
    "Positions",
    "QueryBias",
    "RelativePositionBias",
    "RotaryEmbedding",
    "Rotation",
    "RowRule",
    "Scale",
    "ScaledDotProductAttention",
    "Sequence",
    "Sinks",
    "SinusoidalPositionEmbedding",
    "Site",
    "Softcap",
    "T5Bias",
    "Terms",
    "TransformerBlock",
    "VisionTransformer",
    "alibi_slopes",
    "attention",
    "attention_weights",
    "backends",
    "count_parameters",
    "explain",
    "get_relative_position_index_1d",
    "get_relative_position_index_2d",
    "lines",
    "lookup",
    "rotate",
]
