"""What every attention layer is built on: heads projected from tokens, and tokens projected from heads.

    x -> qkv = Linear(x) -> q, k, v by head -> attention of the layer's kind -> heads joined -> proj

Q, K and V come from one linear layer, which has the parameters of three and launches fewer kernels. Fewer key heads
than query heads make it grouped-query attention (Ainslie et al. 2023), one makes it multi-query (Shazeer 2019).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Sequence, Terms
from relpos.core.checks import fail, require_flag, require_int, require_tokens, shape_of
from relpos.layers.norms import HeadNormChoice, QueryKeyNorm
from relpos.position import Mechanism
from relpos.position.mechanism import is_mechanism


class SelfAttention(nn.Module):
    """Base of the attention layers: the two projections, and `forward` around a subclass's `_attend`.

    Args:
        width: width of a token, E; a multiple of `num_heads`.
        num_heads, num_kv_heads: query heads, H, and key/value heads, G, dividing H; None for H.
        qkv_bias, proj_bias: whether the two projections have biases.
        qk_norm: "rmsnorm" or "layernorm" normalizes queries and keys head by head, before any rotation.
        position: the layer's own mechanism, or None.
        width_name: what the layer's constructor calls `width`, for error messages.

    Raises:
        ValueError: heads that do not divide, or an argument of another kind.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: HeadNormChoice | None = None,
        position: Mechanism | None = None,
        width_name: str = "d_model",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_int(num_heads, "num_heads", at_least=1)
        require_int(width, width_name, at_least=1)
        require_int(num_kv_heads, "num_kv_heads", at_least=1)
        if width % num_heads:
            fail(f"{width_name} to be a multiple of num_heads", f"{width} and {num_heads}", "Change one of them.")
        if num_heads % num_kv_heads:
            fail("num_heads to be a multiple of num_kv_heads", f"{num_heads} and {num_kv_heads}", "Change one of them.")
        require_flag(qkv_bias, "qkv_bias")
        require_flag(proj_bias, "proj_bias")
        if position is not None and not is_mechanism(position):
            fail("position to be a mechanism", shape_of(position), "Build it first, e.g. RotaryEmbedding(head_dim).")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, width // num_heads
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.qk_norm = None if qk_norm is None else QueryKeyNorm(self.head_dim, qk_norm)
        self.proj = nn.Linear(width, width, bias=proj_bias)
        self.position = position

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, a plain sequence where left out."""
        q, k, v = self._heads(x)
        position = None
        if self.position is not None:
            position = self.position.terms(Sequence(x.shape[1]) if coordinates is None else coordinates)
        return self._joined(self._attend(q, k, v, position))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Terms | None) -> Tensor:
        """The attended values `[B, H, N, D]` of q and of G heads of k and v."""
        raise NotImplementedError

    def _heads(
        self, x: Float[Tensor, "B N E"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G N D"], Float[Tensor, "B G N D"]]:
        """Queries, keys and values of tokens."""
        require_tokens(x, self.qkv.in_features, self.qkv.weight)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(counts, dim=1)
        return (q, k, v) if self.qk_norm is None else (*self.qk_norm(q, k), v)

    def _joined(self, heads: Float[Tensor, "B H N D"]) -> Float[Tensor, "B N E"]:
        """Tokens from attended values."""
        tokens: Tensor = self.proj(heads.transpose(1, 2).flatten(2))
        return tokens
