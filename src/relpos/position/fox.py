"""The forget gate of the Forgetting Transformer: each token says how much of what came before it is forgotten.

    log f[h, t]    = log sigmoid(<w[h], x[t]> + b[h])
    score[h, i, j] += sum of log f[h, t] over t from j + 1 to i      = c[h, i] - c[h, j], c the cumulative sum

x are the hidden states that q, k and v are projected from. It is ALiBi whose slope each token chooses; with gates that
do not depend on content it is ALiBi. Use it under a causal mask: a key after the query would be rewarded. The sums run
over the keys in their order, each row of a batch for itself, and a query stands at its place among them. What a key
contributes is log f, so that a cache of it may be cut at either end. Tokens of one document stand side by side: what
stands between two tokens is forgotten with them. A prefix token forgets nothing, and its pairs have no bias.

The difference of two sums is of rank 2. At 32,768 tokens a sum may be -20,000, which float32 holds to 0.001 alone. So
sums are taken in float64, and their whole numbers and their rests are two terms. Whole numbers subtract exactly, in
whatever order; in TF32 too, whose factors have eleven bits, for multiples of 2,048 stand apart. The gradient is the
rests'.

Source: Lin et al. 2025 ("Forgetting Transformer: Softmax Attention with a Forget Gate"), section 3. Here without its
output gate and norms, which are no positions. x-transformers calls it data-dependent ALiBi, and starts b at 5.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, LowRank, Terms
from relpos.core.checks import require_int, require_number
from relpos.position.base.from_states import FromStates, projected
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.running_sums import at_queries, products, running_sums, whole_parts
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std


class ForgetGate(FromStates):
    """Forgets what came before: adds `log f`, `f = sigmoid(w[h] x + b[h])` of hidden states x, from key to query.

    The states are those that q, k and v are projected from, `states=` of attention. Use it under a causal mask.

    Source: Lin et al. 2025 (Forgetting Transformer), section 3.

    Args:
        num_heads: query heads, H.
        embed_dim: width of a hidden state, E.
        init_std: standard deviation that w starts from; 0 for zeros.
        init_bias: the number that b starts from. 0 as published: half of the past is forgotten at each token.

    Attributes:
        fgate_proj: w and b, `[E -> H]`, named as in the authors' code.

    Raises:
        ValueError: an argument out of its range; in `terms`, no states, or irregular coordinates of queries that are
            not the keys.

    Examples:
        >>> gate, x = relpos.ForgetGate(num_heads=2, embed_dim=16), torch.randn(1, 10, 16)
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> tokens = relpos.Sequence(10)
        >>> relpos.attention(q, k, v, position=gate, queries=tokens, states=x, mask="causal").shape
        torch.Size([1, 2, 10, 8])
    """

    growth = (AS_IS,)
    remembers = 1

    def __init__(self, num_heads: int, embed_dim: int, *, init_std: float = 0.02, init_bias: float = 0.0) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(embed_dim, "embed_dim", at_least=1)
        require_std(init_std)
        require_number(init_bias, "init_bias", "of at least 0", "0.0 is the published one.")
        self.num_heads, self.embed_dim = num_heads, embed_dim
        self.init_std, self.init_bias = init_std, init_bias
        self.fgate_proj = nn.Linear(embed_dim, num_heads)
        nn.init.normal_(self.fgate_proj.weight, std=init_std)
        nn.init.constant_(self.fgate_proj.bias, float(init_bias))

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.embed_dim, init_std=site.init_std)

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N 1"]:
        """`log f` of each token and head, in float32 or wider."""
        logits = projected(states, self.fgate_proj.weight, self.fgate_proj.bias)
        return F.logsigmoid(logits).transpose(1, 2)[..., None]

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        assert remembered is not None
        gates = remembered[..., keys.prefix :, 0]
        *whole, rest = (x.to(gates.dtype) for x in whole_parts(running_sums(gates)))
        one = torch.ones_like(rest)

        def differences(parts: list[Tensor]) -> LowRank:
            """What the sums at the places of queries are above those of the keys, added up over parts of the sums."""
            pairs = [pair for part in parts for pair in ((part, one), (one, -part))]
            return products(
                [(at_queries(mine, queries, keys, "ForgetGate"), theirs[..., 1:]) for mine, theirs in pairs],
                queries,
                keys,
            )

        return Terms(differences(whole), differences([rest]))


PRESETS = [
    Preset(
        name="fox",
        title="Forget gate (FoX)",
        build=ForgetGate.from_site,
        summary="Each token says by its content how much of all that came before it a head forgets. It is ALiBi whose "
        "slopes the text chooses: near tokens count more, and a head can drop everything at a new sentence.",
        source="Lin et al. 2025 (Forgetting Transformer), section 3",
        token_axes=(1,),
        family="bias",
        near=(("data_dependent_alibi", "x-transformers' name of it"),),
    )
]
