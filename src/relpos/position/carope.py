"""CARoPE: a rotation whose frequencies each token chooses by its content, added up over the sequence.

    f[h, t]        = 1 / (softplus(<w[h], x[t]> + b[h]) + 1)        between 0 and 1
    angle[h, t, p] = sum of f[h, s] ** p over s up to t             pair p = 0 ... P - 1

x are the hidden states that q, k and v are projected from. Queries and keys turn by the angle of their token, so that a
score depends on what lies between the two. With one f for all tokens it is RoPE with base `f ** -P`; so it starts, w
0 and b that of `base`. Pair 0 turns by a radian a token whatever the content is, as RoPE's first.

The sums run over the keys in their order, each row of a batch for itself, and a query stands at its place among them.
What a key contributes is f, so that a cache of it may be cut at either end. Tokens of one document stand side by side,
for a score depends on all tokens in between. Prefix tokens are not turned and add 0.

Source: Veisi, Fartoot, Amirzadeh 2025 ("Context-aware Rotary Position Embedding", arXiv 2507.23083), section 2. No code
is published. The paper has no b; without one, no w gives all tokens RoPE's frequencies, as which it says to start. It
does not say whether p begins at 0 or 1: here at 0, as RoPE's pairs do, which it is to generalize. Its x are embeddings
of tokens; here, as for all mechanisms of content, those of each layer.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Rotation, Terms
from relpos.core.checks import fail, require_int, require_number
from relpos.core.rotation import require_layout
from relpos.position.base.from_states import FromStates, projected
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.running_sums import running_angles
from relpos.position.base.site import Site


class CARoPE(FromStates):
    """Rotation by angles that tokens add up: pair p turns by the sum of `f ** p`, f a number of each token and head.

    `f = 1 / (softplus(w[h] x + b[h]) + 1)` of hidden states x, those that q, k and v are projected from, `states=` of
    attention. It starts as RoPE: w is 0.

    Source: Veisi et al. 2025 (CARoPE), section 2.

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D; where it is odd, its last number is not turned.
        embed_dim: width of a hidden state, E.
        base: of the RoPE that it starts as.
        layout: "half" or "interleaved", see `relpos.rotate`.

    Attributes:
        frequency_proj: w and b, `[E -> H]`.

    Raises:
        ValueError: an argument out of its range; in `terms`, no states, or irregular coordinates of queries that are
            not the keys.

    Examples:
        >>> rotary, x = relpos.CARoPE(num_heads=2, head_dim=8, embed_dim=16), torch.randn(1, 10, 16)
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Sequence(10), states=x).shape
        torch.Size([1, 2, 10, 8])
    """

    growth = (AS_IS,)
    saved_settings = ("layout",)
    remembers = 1

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(head_dim, "head_dim", at_least=2)
        require_int(embed_dim, "embed_dim", at_least=1)
        require_number(base, "base", "above 0", "RoFormer's is 10000.")
        if base <= 1:
            fail("base above 1", f"{base:g}", "Every frequency lies between 0 and 1; RoFormer's base is 10000.")
        require_layout(layout)
        self.num_heads, self.head_dim, self.embed_dim, self.base = num_heads, head_dim, embed_dim, base
        self.layout: Literal["half", "interleaved"] = layout
        self.frequency_proj = nn.Linear(embed_dim, num_heads)
        wanted = base ** (1 / (head_dim // 2)) - 1  # softplus of b
        nn.init.zeros_(self.frequency_proj.weight)
        nn.init.constant_(self.frequency_proj.bias, wanted + math.log(-math.expm1(-wanted)))

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim, site.embed_dim)

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N 1"]:
        """f of each token and head, in float32 or wider."""
        logits = projected(states, self.frequency_proj.weight, self.frequency_proj.bias)
        return (F.softplus(logits) + 1).reciprocal().transpose(1, 2)[..., None]

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        assert remembered is not None
        powers = torch.arange(self.head_dim // 2, dtype=torch.float64, device=remembered.device)
        steps = remembered[:, :, keys.prefix :].double() ** powers
        query, key = running_angles(steps, queries, keys, "CARoPE")
        return Terms(Rotation(query, key, layout=self.layout, width=self.head_dim))


PRESETS = [
    Preset(
        name="carope",
        title="Rotary (CARoPE), context-aware",
        build=CARoPE.from_site,
        summary="Each token chooses by its content, per head, how far pairs of dimensions rotate at it; angles add up "
        "over the sequence. It starts as RoPE and learns frequencies that depend on the text.",
        source="Veisi et al. 2025 (CARoPE), section 2; it starts as RoPE with base 10,000",
        token_axes=(1,),
        family="rotation",
    )
]
