"""Layers built on attention and position: everything a model is made of."""

from relpos.layers.attention import MultiHeadAttention, ScaledDotProductAttention
from relpos.layers.block import TransformerBlock
from relpos.layers.mlp import Mlp
from relpos.layers.patch import PatchEmbedding

__all__ = ["Mlp", "MultiHeadAttention", "PatchEmbedding", "ScaledDotProductAttention", "TransformerBlock"]
