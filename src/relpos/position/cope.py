"""CoPE: contextual positions, which count gates that depend on content, instead of tokens.

    gate[i, t]     = sigmoid(<q[i], k[t]> / sqrt(D))                       0 where i may not see t
    position[i, j]    = sum of gate[i, t] over keys t from j to the last, at most P - 1
    score[h, i, j] += <q[i], e[position[i, j]]>, linear between the two whole positions next to it

So a head can count words or sentences. e are P vectors of a head's width, the same for all heads; the second product
is unscaled and the gates always have 1/sqrt(D), as published. Under a causal mask the sum ends at the query; without
one it runs over all keys that follow. Coordinates are ignored: only the order of the keys, including prefix tokens, and
the mask matter. The mask also keeps documents and padding apart. Keys left out of a cache would change the count.

For n query rows and M keys it makes a few tensors of n x M numbers per head, and n x P products.

Source: Golovneva et al. 2024 ("Contextual Position Encoding: Learning to Count What's Important"), section 4 and the
code in its appendix. Not to be confused with Shaw's vectors, which are for token distances, nor with the
CoPE of 2026, Clipped RoPE (`rotary_clipped`).
"""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from relpos.core import Coordinates, RowRule, Terms, at_least_float32, lookup, require_queries_and_keys
from relpos.core.checks import require_int
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


class CoPE(Mechanism):
    """Contextual positions: sums of gates that depend on content, not counts of tokens.

    A key's position is the sum of gates (sigmoids of content) from it to the query, which is multiplied with the vector
    of that position. Coordinates are ignored: the order of keys and the mask matter.

    Source: Golovneva et al. 2024, section 4.

    Args:
        head_dim: width of a head, D.
        max_position: P, how many positions have vectors; farther ones share the last.
        init_std: standard deviation that the vectors start from; 0 for zeros, as published.

    Attributes:
        pos_emb: `[P, D]`.

    Raises:
        ValueError: an argument out of its range; in attention, heads of another width.

    Examples:
        >>> cope = relpos.CoPE(head_dim=16, max_position=32)
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=cope, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 2, 10, 16])
    """

    growth = (AS_IS,)

    def __init__(self, head_dim: int, max_position: int = 64, *, init_std: float = 0.0) -> None:
        super().__init__()
        require_int(head_dim, "head_dim", at_least=1)
        require_int(max_position, "max_position", at_least=1)
        require_std(init_std)
        self.head_dim, self.max_position, self.init_std = head_dim, max_position, init_std
        self.pos_emb = nn.Parameter(torch.empty(max_position, head_dim))
        start_table(self.pos_emb, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.head_dim, init_std=site.init_std)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        require_queries_and_keys(queries, keys)
        for one in (queries, queries if keys is None else keys):
            one.raster()  # raises for nodes of a graph: their order, in which gates add up, means nothing
        return Terms(RowRule(_rule, (at_least_float32(self.pos_emb),), width=self.pos_emb.shape[1]))


def _rule(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B H M D"],
    allowed: Bool[Tensor, "#B #H n M"],
    rows: slice,
    vectors: Float[Tensor, "P D"],
) -> Float[Tensor, "B H n M"]:
    gates = torch.where(allowed, (q @ k.mT / math.sqrt(q.shape[-1])).sigmoid(), 0.0)
    positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=vectors.shape[0] - 1)
    below = positions.detach().floor()
    products = q @ vectors.to(q.dtype).T
    pairs = torch.stack([products, F.pad(products[..., 1:], (0, 1))], dim=-1).flatten(0, 3)  # a position and the next
    first = (
        torch.arange(pairs.shape[0] // products.shape[-1], device=q.device).view(*products.shape[:-1], 1)
        * products.shape[-1]
    )
    lower, upper = lookup(pairs, first + below.long()).unbind(-1)
    return torch.lerp(lower, upper, positions - below)


PRESETS = [
    Preset(
        name="cope",
        title="CoPE, contextual",
        build=CoPE.from_site,
        summary="A key's position is the number of attended keys between it and the query; the query is multiplied by "
        "a learned vector of that position. It can count words or sentences instead of tokens.",
        source="Golovneva et al. 2024, section 4; 64 positions",
        token_axes=(1,),
        family="vectors",
    )
]
