"""The pre-norm Transformer block (Xiong et al. 2020): x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Mask, Term, Terms
from relpos.core.checks import require_int, require_number, require_tokens
from relpos.layers.attention import MultiHeadAttention
from relpos.layers.mlp import Mlp
from relpos.position import Mechanism


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual connection. Arguments as timm names them.

    Args:
        dim: width of a token, E.
        num_heads, num_kv_heads, qkv_bias, attn_drop, position, backend: as `MultiHeadAttention` takes them.
        mlp_ratio: hidden width of the MLP over `dim`.
        proj_drop: dropout of the attention's output and inside the MLP.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        *,
        num_kv_heads: int | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        position: Mechanism | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        require_int(dim, "dim", at_least=1)
        require_number(mlp_ratio, "mlp_ratio", "above 0", "It is the MLP's hidden width over dim.")
        self.norm1 = nn.LayerNorm(dim)
        self.attn = MultiHeadAttention(
            dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            position=position,
            backend=backend,
        )
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, round(dim * mlp_ratio), drop=proj_drop)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        position: Terms | Term | None = None,
        coordinates: Coordinates | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "B N E"]:
        """Tokens after the block; arguments as `MultiHeadAttention.forward` takes them."""
        require_tokens(x, self.norm2.normalized_shape[0], self.norm2.weight)
        x = x + self.attn(self.norm1(x), position=position, coordinates=coordinates, mask=mask)
        x = x + self.mlp(self.norm2(x))
        return x
