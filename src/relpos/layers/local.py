"""Local attention as a layer: multi-head attention in a window around each token, linear in their number."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates
from relpos.layers.attention import MultiHeadAttention
from relpos.patterns import local
from relpos.position import Mechanism


class LocalAttention(nn.Module):
    """Multi-head attention in which a token sees `window_size` tokens: itself in the middle, or, causal, at their end.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: heads, H.
        window_size: tokens that are seen; odd unless causal.
        causal: whether a token sees none after it.
        num_kv_heads: heads of keys and values, G, dividing H; None for H.
        position: a mechanism that acts in attention, or None.
        backend: an engine's name, or "auto".
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        window_size: int = 7,
        *,
        causal: bool = False,
        num_kv_heads: int | None = None,
        position: Mechanism | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.mask = local(window_size, causal=causal)
        self.attn = MultiHeadAttention(
            d_model, num_heads, num_kv_heads=num_kv_heads, position=position, backend=backend
        )

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, for the layer's own mechanism."""
        attended: Tensor = self.attn(x, coordinates=coordinates, mask=self.mask)
        return attended
