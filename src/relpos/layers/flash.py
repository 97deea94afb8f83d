"""FlashAttention as a layer, for reading; `MultiHeadAttention` is the one to train with."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, LineBias, Sequence
from relpos.core.checks import fail, require_flag, require_int, require_tokens, shape_of
from relpos.engines.flash import flash_attention
from relpos.position import Mechanism
from relpos.position.mechanism import is_mechanism


class FlashAttention(nn.Module):
    """Multi-head attention by the tiles of the FlashAttention papers; see `relpos.flash_attention`.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: heads, H.
        block_size: rows and columns of a tile.
        causal: whether a token sees none after it.
        position: a mechanism that is one line bias, or None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        block_size: int = 64,
        *,
        causal: bool = False,
        position: Mechanism | None = None,
    ) -> None:
        super().__init__()
        require_int(d_model, "d_model", at_least=1)
        require_int(num_heads, "num_heads", at_least=1)
        require_int(block_size, "block_size", at_least=1)
        require_flag(causal, "causal")
        if d_model % num_heads:
            fail("d_model to be a multiple of num_heads", f"{d_model} and {num_heads}", "Change one of them.")
        if position is not None and not is_mechanism(position):
            fail("position to be a mechanism", shape_of(position), "Build it first, e.g. RelativePositionBias(...).")
        self.num_heads, self.block_size, self.causal, self.position = num_heads, block_size, causal, position
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, a plain sequence where left out."""
        require_tokens(x, self.qkv.in_features, self.qkv.weight)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = None
        if self.position is not None:
            terms = self.position.terms(Sequence(x.shape[1]) if coordinates is None else coordinates)
            if len(terms) != 1 or not isinstance(terms.items[0], LineBias):
                raise NotImplementedError(
                    f"expected a position that is one line bias; got {', '.join(type(t).__name__ for t in terms)}, "
                    "which FlashAttention lacks. Use MultiHeadAttention."
                )
            bias = terms.items[0]
        out = flash_attention(q, k, v, bias=bias, causal=self.causal, block_size=self.block_size)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected
