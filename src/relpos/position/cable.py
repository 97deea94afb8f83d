"""CABLE's context-aware biases: what lies between a query and a key counts by its content, times a weight of the query.

    S[h, t]        = -(sum of relu(<w[h], x[s]> + b[h]) over s up to t)
    g[h, i]        = softplus(<u[h], x[i]> + c[h])
    score[h, i, j] += g[h, i] (S[h, i] - S[h, j])

x are the hidden states that q, k and v are projected from. It is ALiBi whose distances and slopes the content chooses:
a token of which the relu is 0 takes no distance, and each query has a slope of its own. Without g, and with softplus
for relu, it is the forget gate (`fox`). Use it under a causal mask: a key after the query would be rewarded. The sums
run over the keys in their order, each row of a batch for itself, and a query stands at its place among them. What a key
contributes is its relu, so that a cache of it may be cut at either end. Tokens of one document stand side by side, for
what stands between two tokens counts. Pairs of a prefix token have no bias.

Scores are exact to about 0.00001 where sums are 30,000: whole numbers times g rounded to 64ths are one term, in which
all is exact in float32, and in TF32 where g is below 4. A second term is what they leave out, with the gradient; in
TF32 it is rounded to about 0.1 at such sums. The gradient of g is a difference of sums in float32.

Source: Veisi, Amirzadeh, Mansourian 2025 ("Context-aware Biases for Length Extrapolation", arXiv 2503.08067v3),
section 3, equations 2 to 7. There b and c are left out; they are in the authors' code, whose first version (February
2025) has softplus for relu and no g. The sign is the code's: the paper's equations leave out the minus. The kernel of
the ablation (K-CABLE, a logarithm of the squared bias) and the bidirectional form of BERT are not implemented.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Terms
from relpos.core.checks import require_int
from relpos.position.base.from_states import FromStates, projected
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.running_sums import at_queries, products, running_sums, whole_parts
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std

_PARTS = 64
"""Weights are whole numbers of such parts, and rests of them. Their products with 2 ** 15 have 24 bits below 8."""


class CABLEBias(FromStates):
    """A bias by what lies between: minus the sum of `relu(w[h] x + b[h])` from key to query, times the query's weight.

    The weight is `softplus(u[h] x + c[h])`. The states x are those that q, k and v are projected from, `states=` of
    attention. Use it under a causal mask.

    Source: Veisi et al. 2025 (CABLE), section 3.

    Args:
        num_heads: query heads, H.
        embed_dim: width of a hidden state, E.
        init_std: standard deviation that w and u start from; 0 for zeros. b and c start at 0.

    Attributes:
        cable_layer: w and b, `[E -> H]`, named as in the authors' code.
        cable_layer_scale: u and c, `[E -> H]`.

    Raises:
        ValueError: an argument out of its range; in `terms`, no states, or irregular coordinates of queries that are
            not the keys.

    Examples:
        >>> bias, x = relpos.CABLEBias(num_heads=2, embed_dim=16), torch.randn(1, 10, 16)
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> tokens = relpos.Sequence(10)
        >>> relpos.attention(q, k, v, position=bias, queries=tokens, states=x, mask="causal").shape
        torch.Size([1, 2, 10, 8])
    """

    growth = (AS_IS,)
    _silent_at_zero = True
    remembers = 1

    def __init__(self, num_heads: int, embed_dim: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(embed_dim, "embed_dim", at_least=1)
        require_std(init_std)
        self.num_heads, self.embed_dim, self.init_std = num_heads, embed_dim, init_std
        self.cable_layer = nn.Linear(embed_dim, num_heads)
        self.cable_layer_scale = nn.Linear(embed_dim, num_heads)
        for layer in (self.cable_layer, self.cable_layer_scale):
            nn.init.normal_(layer.weight, std=init_std)
            nn.init.zeros_(layer.bias)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.embed_dim, init_std=site.init_std)

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N 1"]:
        """`-relu(w[h] x + b[h])` of each token and head, in float32 or wider."""
        logits = projected(states, self.cable_layer.weight, self.cable_layer.bias)
        return -F.relu(logits).transpose(1, 2)[..., None]

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        assert remembered is not None
        steps = remembered[..., keys.prefix :, 0]
        dtype = steps.dtype
        layer = self.cable_layer_scale
        weight = F.softplus(projected(states[:, queries.prefix :], layer.weight, layer.bias)).transpose(1, 2)
        weight = weight.to(dtype)
        rough = (weight.detach() * _PARTS).round() / _PARTS
        thousands, units, rest = whole_parts(running_sums(steps))
        whole = (thousands + units).to(dtype)
        thousands, units, rest = (x.to(dtype) for x in (thousands, units, rest))
        one = torch.ones_like(whole)[..., 1:]
        whole_here, rest_here = (at_queries(x, queries, keys, "CABLEBias") for x in (whole, rest))
        product = rough.double() * whole_here
        large = (product / _PARTS).round() * _PARTS
        exact = [(part.to(dtype), one) for part in (large, product - large)]
        exact += [(rough, -part[..., 1:]) for part in (thousands, units)]
        fine = weight - rough
        left = [(fine * whole_here + weight * rest_here, one)]
        left += [(fine, -whole[..., 1:]), (weight, -rest[..., 1:])]
        return Terms(products(exact, queries, keys), products(left, queries, keys))


PRESETS = [
    Preset(
        name="cable",
        title="CABLE, context-aware",
        build=CABLEBias.from_site,
        summary="Each token says by its content how much distance it adds, and each query by its own how much distance "
        "counts, per head. It is ALiBi with distances and slopes that the text chooses; a head can skip empty words.",
        source="Veisi et al. 2025 (CABLE), section 3",
        token_axes=(1,),
        family="bias",
    )
]
