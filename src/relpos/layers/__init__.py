"""The layers that models are built from: attention, norms, MLPs, patch embedding, the Transformer block, caches."""

from relpos.layers.attention import MultiHeadAttention, MultiQueryAttention, ScaledDotProductAttention
from relpos.layers.block import TransformerBlock
from relpos.layers.cache import KeyValueCache, LayerCache
from relpos.layers.mlp import GatedMlp, Mlp
from relpos.layers.norms import GroupNorm, QueryKeyNorm, RMSNorm
from relpos.layers.patch import PatchEmbedding
from relpos.layers.variants import FlashAttention, LinearAttention, LocalAttention, SparseAttention

__all__ = [
    "FlashAttention",
    "GatedMlp",
    "GroupNorm",
    "KeyValueCache",
    "LayerCache",
    "LinearAttention",
    "LocalAttention",
    "Mlp",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "PatchEmbedding",
    "QueryKeyNorm",
    "RMSNorm",
    "ScaledDotProductAttention",
    "SparseAttention",
    "TransformerBlock",
]
