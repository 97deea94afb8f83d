"""The pre-norm Transformer block (Xiong et al. 2020): x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Mask, Term, Terms
from relpos.core.checks import require_choice, require_int, require_number, require_tokens
from relpos.layers.attention import AttentionKind, MultiHeadAttention
from relpos.layers.cache import LayerCache
from relpos.layers.mlp import GatedMlp, Mlp, gated_width
from relpos.layers.norms import HeadNormChoice, NormChoice, norm_layer
from relpos.position import Mechanism

MlpChoice = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class BlockConfig:
    """The configuration of the blocks of a model: arguments of `TransformerBlock`."""

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

    def blocks(self, depth: int) -> nn.ModuleList:
        """New blocks, `depth` of them."""
        return nn.ModuleList(TransformerBlock(**vars(self)) for _ in range(depth))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection. Arguments are named as in timm.

    Args:
        dim: width of a token, E.
        num_heads, num_kv_heads, qkv_bias, proj_bias, qk_norm, attn_drop, position, kind, backend: as in
            `MultiHeadAttention`.
        mlp_ratio: hidden width of the MLP over `dim`; "swiglu" has two thirds of it, for as many parameters.
        mlp: "gelu" (`Mlp`) or "swiglu" (`GatedMlp`).
        norm: "layernorm", "rmsnorm" or "groupnorm", the last with statistics of one token.
        proj_drop: dropout probability of the attention output and in the MLP.

    Raises:
        ValueError: the heads do not divide the width, or an argument is invalid.
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
    ) -> None:
        super().__init__()
        require_int(dim, "dim", at_least=1)
        require_number(mlp_ratio, "mlp_ratio", "above 0", "It is the MLP's hidden width over dim.")
        require_choice(mlp, "mlp", get_args(MlpChoice))
        self.norm1 = norm_layer(norm, dim)
        self.attn = MultiHeadAttention(
            dim, num_heads, num_kv_heads=num_kv_heads, qkv_bias=qkv_bias, proj_bias=proj_bias, qk_norm=qk_norm,
            attn_drop=attn_drop, proj_drop=proj_drop, position=position, kind=kind, backend=backend,
        )  # fmt: skip
        self.norm2 = norm_layer(norm, dim)
        self.mlp: Mlp | GatedMlp
        if mlp == "swiglu":
            self.mlp = GatedMlp(dim, gated_width(dim, mlp_ratio), drop=proj_drop)
        else:
            self.mlp = Mlp(dim, round(dim * mlp_ratio), drop=proj_drop)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        position: Terms | Term | None = None,
        coordinates: Coordinates | None = None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B N E"]:
        """The tokens after the block; arguments as in `MultiHeadAttention.forward`."""
        require_tokens(x, self.attn.qkv.in_features, self.attn.qkv.weight)
        x = x + self.attn(self.norm1(x), position=position, coordinates=coordinates, mask=mask, cache=cache)
        x = x + self.mlp(self.norm2(x))
        return x
