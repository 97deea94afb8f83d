"""The Transformer block: attention and an MLP, each with a norm and a residual connection.

pre-norm (Xiong et al. 2020)                   x + attention(norm1(x)), then x + mlp(norm2(x))
residual post-norm (Liu et al. 2022, Swin V2)  x + norm1(attention(x)), then x + norm2(mlp(x))

Neither is the post-norm of Vaswani et al. 2017, norm1(x + attention(x)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, MaskLike, Term, Terms
from relpos.core.checks import NO_OTHER, require_choice, require_flag, require_number, require_tokens
from relpos.layers.attention import AttentionKind, MultiHeadAttention
from relpos.layers.cache import LayerCache
from relpos.layers.mlp import GatedMlp, Mlp, gated_width
from relpos.layers.norms import HeadNormChoice, NormChoice, norm_layer
from relpos.position import Mechanism

MlpChoice = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class BlockConfig:
    """The arguments of `TransformerBlock`, apart from its position."""

    dim: int
    num_heads: int
    mlp_ratio: float = 4.0
    num_kv_heads: int | None = None
    mlp: MlpChoice = "gelu"
    norm: NormChoice = "layernorm"
    qkv_bias: bool = True
    proj_bias: bool = True
    qk_norm: HeadNormChoice | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    kind: AttentionKind = "softmax"
    backend: str = "auto"
    norm_eps: float | None = None
    mlp_hidden: int | None = None
    layer_scale: float | None = None
    post_norm: bool = False

    def __post_init__(self) -> None:
        require_flag(self.post_norm, "post_norm")
        require_number(self.mlp_ratio, "mlp_ratio", "above 0", "It is the MLP's hidden width divided by dim.")
        require_choice(self.mlp, "mlp", get_args(MlpChoice), NO_OTHER)

    def blocks(self, depth: int) -> nn.ModuleList:
        """`depth` new blocks."""
        return nn.ModuleList(TransformerBlock._of(self) for _ in range(depth))


class LayerScale(nn.Module):
    """Each channel times a learned factor, `gamma` (Touvron et al. 2021, "Going deeper with image transformers")."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        require_number(start, "layer_scale", "above 0", "DeiT III starts from 1e-5.")
        self.gamma = nn.Parameter(torch.full((dim,), float(start)))

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        return x * self.gamma


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection. Arguments are named as in timm.

    `num_heads`, `num_kv_heads`, `qkv_bias`, `proj_bias`, `qk_norm`, `attn_drop`, `position`, `kind` and `backend` are
    as in `MultiHeadAttention`.

    Args:
        dim: width of a token, E.
        mlp_ratio: hidden width of the MLP over `dim`; "swiglu" has two thirds of it, for as many parameters.
        mlp_hidden: that width itself; None for the width from `mlp_ratio`.
        mlp: "gelu" (`Mlp`) or "swiglu" (`GatedMlp`).
        norm: "layernorm", "rmsnorm" or "groupnorm", the last with statistics of one token.
        norm_eps: of all norms; None for 1e-5 of "layernorm" and 1e-6 of the others.
        proj_drop: dropout probability of the attention output and in the MLP.
        layer_scale: initial value of `LayerScale` on both branches; None for no `LayerScale`.
        post_norm: whether norms come after attention and MLP, inside the residual connection, as in Swin V2.

    Raises:
        ValueError: the heads do not divide the width, or an argument is invalid.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(head_dim=16)
        >>> block = relpos.TransformerBlock(64, num_heads=4, position=rotary, mlp="swiglu", norm="rmsnorm")
        >>> block(torch.randn(2, 10, 64), mask=relpos.Mask.causal()).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        *,
        num_kv_heads: int | None = None,
        mlp: MlpChoice = "gelu",
        norm: NormChoice = "layernorm",
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: HeadNormChoice | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        position: Mechanism | None = None,
        kind: AttentionKind = "softmax",
        backend: str = "auto",
        norm_eps: float | None = None,
        mlp_hidden: int | None = None,
        layer_scale: float | None = None,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        config = BlockConfig(
            dim=dim,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            num_kv_heads=num_kv_heads,
            mlp=mlp,
            norm=norm,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            qk_norm=qk_norm,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            kind=kind,
            backend=backend,
            norm_eps=norm_eps,
            mlp_hidden=mlp_hidden,
            layer_scale=layer_scale,
            post_norm=post_norm,
        )
        self._build(config, position)

    @classmethod
    def _of(cls, config: BlockConfig) -> TransformerBlock:
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block._build(config, None)
        return block

    def _build(self, config: BlockConfig, position: Mechanism | None) -> None:
        self.config, dim = config, config.dim
        attention = MultiHeadAttention(  # checks dim before a norm does
            dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            qkv_bias=config.qkv_bias,
            proj_bias=config.proj_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            attn_drop=config.attn_drop,
            proj_drop=config.proj_drop,
            position=position,
            kind=config.kind,
            backend=config.backend,
        )
        self.norm1 = norm_layer(config.norm, dim, config.norm_eps)
        self.attn = attention
        self.norm2 = norm_layer(config.norm, dim, config.norm_eps)
        self.ls1 = nn.Identity() if config.layer_scale is None else LayerScale(dim, config.layer_scale)
        self.ls2 = nn.Identity() if config.layer_scale is None else LayerScale(dim, config.layer_scale)
        gated, hidden = config.mlp == "swiglu", config.mlp_hidden
        if hidden is None:
            hidden = gated_width(dim, config.mlp_ratio) if gated else round(dim * config.mlp_ratio)
        mlp = GatedMlp if gated else Mlp
        self.mlp: Mlp | GatedMlp = mlp(dim, hidden, config.proj_drop)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        position: Terms | Term | None = None,
        coordinates: Coordinates | None = None,
        mask: MaskLike | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B N E"]:
        """The tokens after the block; arguments as in `MultiHeadAttention.forward`."""
        require_tokens(x, self.attn.qkv.in_features, self.attn.qkv.weight)
        given = {"position": position, "coordinates": coordinates, "mask": mask, "cache": cache}
        if self.config.post_norm:
            x = x + self.ls1(self.norm1(self.attn(x, **given)))
            x = x + self.ls2(self.norm2(self.mlp(x)))
            return x
        x = x + self.ls1(self.attn(self.norm1(x), **given))
        x = x + self.ls2(self.mlp(self.norm2(x)))
        return x
