"""Sparse attention as a layer: multi-head attention to the tokens nearby and to every n-th of all others."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates
from relpos.core.checks import require_flag, require_int
from relpos.layers.attention import MultiHeadAttention
from relpos.patterns import fixed
from relpos.position import Mechanism


class SparseAttention(nn.Module):
    """Multi-head attention in the fixed pattern of the Sparse Transformer (Child et al. 2019, section 4.3).

    A token sees the block of `sparsity_factor` tokens it stands in, and the last token of every block: every n-th
    position of the whole sequence. Both parts are in one head, so that what a block's last token has gathered reaches
    all others in the next layer; to see every n-th position alone would leave the others unseen for good. A token sees
    about N / n + n others, the fewest where n is near sqrt(N).

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: heads, H.
        sparsity_factor: n, the paper's stride; 1 sees all.
        causal: whether a token sees none after it, as in the paper.
        num_kv_heads: heads of keys and values, G, dividing H; None for H.
        position: a mechanism that acts in attention, or None.
        backend: an engine's name, or "auto".
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
        super().__init__()
        require_int(sparsity_factor, "sparsity_factor", at_least=1)
        require_flag(causal, "causal")
        self.sparsity_factor, self.causal = sparsity_factor, causal
        self.attn = MultiHeadAttention(
            d_model, num_heads, num_kv_heads=num_kv_heads, position=position, backend=backend
        )

    def forward(self, x: Float[Tensor, "B N E"], *, coordinates: Coordinates | None = None) -> Float[Tensor, "B N E"]:
        """Attended tokens; `coordinates` say where they are, for the layer's own mechanism."""
        mask = fixed(x.shape[1], self.sparsity_factor, causal=self.causal).to(x.device)
        attended: Tensor = self.attn(x, coordinates=coordinates, mask=mask)
        return attended
