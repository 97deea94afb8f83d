"""The configuration of each model: the arguments of its constructor, with the same names in the same order.

A constructor makes one from its arguments. The model keeps its values as `arguments`; its folder has them as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relpos.layers.block import MlpChoice
from relpos.layers.norms import HeadNormChoice, NormChoice
from relpos.models.attention_choice import AttentionChoice, WindowChoice
from relpos.models.positions import PositionChoice


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Of a `VisionTransformer`."""

    img_size: int | tuple[int, int]
    patch_size: int | tuple[int, int]
    in_chans: int
    num_classes: int
    global_pool: Literal["token", "avg", "max"]
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    qkv_bias: bool
    class_token: bool
    reg_tokens: int
    drop_rate: float
    pos_drop_rate: float
    proj_drop_rate: float
    attn_drop_rate: float
    position: PositionChoice
    shared_position: bool
    position_trainable: bool
    position_init_std: float
    backend: str
    attention: AttentionChoice
    num_kv_heads: int | None
    norm: NormChoice
    qk_norm: HeadNormChoice | None
    norm_eps: float | None
    init_values: float | None
    fc_norm: bool
    distilled: bool


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Of a `LanguageModel`."""

    vocab_size: int
    context: int
    embed_dim: int
    depth: int
    num_heads: int
    num_kv_heads: int | None
    mlp_ratio: float
    mlp: MlpChoice
    norm: NormChoice
    qk_norm: HeadNormChoice | None
    qkv_bias: bool
    tie_embeddings: bool
    drop_rate: float
    pos_drop_rate: float
    proj_drop_rate: float
    attn_drop_rate: float
    position: PositionChoice
    shared_position: bool
    position_trainable: bool
    position_init_std: float
    backend: str
    attention: AttentionChoice
    norm_eps: float | None
    mlp_hidden: int | None
    embed_scale: float | None
    window: WindowChoice


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """Of a `SwinTransformer`."""

    img_size: int | tuple[int, int]
    patch_size: int | tuple[int, int]
    in_chans: int
    num_classes: int
    global_pool: Literal["avg", "max"]
    embed_dim: int
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    window_size: int | tuple[int, int]
    version: Literal[1, 2]
    mlp_ratio: float
    qkv_bias: bool
    drop_rate: float
    pos_drop_rate: float
    proj_drop_rate: float
    attn_drop_rate: float
    position: PositionChoice
    shared_position: bool
    position_trainable: bool
    position_init_std: float
    backend: str
    norm_eps: float | None
