"""Multi-head attention in a pattern of pairs that the length decides: a window, or a block and every n-th token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Mask
from relpos.core.checks import require_flag, require_int
from relpos.layers.attention import MultiHeadAttention
from relpos.patterns import fixed, local
from relpos.position import Mechanism


class _PatternedAttention(nn.Module):
    """`MultiHeadAttention` under the mask that a subclass makes for the tokens."""

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int | None, position: Mechanism | None, backend: str
    ) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(
            d_model, num_heads, num_kv_heads=num_kv_heads, position=position, backend=backend
        )

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, for the layer's own mechanism."""
        attended: Tensor = self.attn(x, coordinates=coordinates, mask=self._mask_for(x))
        return attended

    def _mask_for(self, x: Float[Tensor, "B N E"]) -> Mask:
        """Which pairs of these tokens may attend."""
        raise NotImplementedError


class LocalAttention(_PatternedAttention):
    """Multi-head attention in which a token sees `window_size` tokens: itself in the middle, or, causal, at their end.

    Sliding-window attention (Beltagy et al. 2020, section 3.1). Input and output are `[B, N, E]`.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads, num_kv_heads: query heads, H, and key/value heads, G, dividing H; None for H.
        window_size: tokens that are seen; odd unless causal.
        causal: whether a token sees none after it.
        position: a mechanism that acts in attention, or None.
        backend: an engine's name, or "auto".

    Raises:
        ValueError: heads that do not divide, or an even window that is not causal.
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
        super().__init__(d_model, num_heads, num_kv_heads, position, backend)
        self.mask = local(window_size, causal=causal)

    def _mask_for(self, x: Tensor) -> Mask:
        return self.mask


class SparseAttention(_PatternedAttention):
    """Multi-head attention in the fixed pattern of the Sparse Transformer (Child et al. 2019, section 4.3).

    A token sees the block of `sparsity_factor` tokens it is in, and the last token of every block. A head has both
    parts, so that what the last token of a block has gathered reaches all others in the next layer; with every n-th
    token alone the others would never be seen. A token sees about N / n + n others, fewest where n is near sqrt(N).
    Input and output are `[B, N, E]`.

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads, num_kv_heads: query heads, H, and key/value heads, G, dividing H; None for H.
        sparsity_factor: n, the paper's stride; 1 sees all.
        causal: whether a token sees none after it, as in the paper.
        position: a mechanism that acts in attention, or None.
        backend: an engine's name, or "auto".

    Raises:
        ValueError: heads that do not divide, or an argument of another kind.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        sparsity_factor: int = 4,
        *,
        causal: bool = False,
        num_kv_heads: int | None = None,
        position: Mechanism | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads, position, backend)
        require_int(sparsity_factor, "sparsity_factor", at_least=1)
        require_flag(causal, "causal")
        self.sparsity_factor, self.causal = sparsity_factor, causal

    def _mask_for(self, x: Tensor) -> Mask:
        return fixed(x.shape[1], self.sparsity_factor, causal=self.causal).to(x.device)
