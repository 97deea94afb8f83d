"""By gather: every rank has all keys and values, and computes its own queries.

Each stretch of queries is one call of attention, with the keys that its mask lets it see. It serves every mechanism and
mask, and holds all keys: memory does not fall with the number of ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Mask, RowRule
from relpos.engines import attention
from relpos.parallel.exchange import Shares, gather_tokens
from relpos.parallel.local_terms import TermsOfQueries
from relpos.parallel.ranks import Ranks
from relpos.parallel.reach import Reach, narrowed, reach_table


def by_gather(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B G n D"],
    v: Float[Tensor, "B G n V"],
    terms_of: TermsOfQueries,
    mask: Mask | None,
    scale: float | None,
    ranks: Ranks,
    shares: Shares,
) -> Float[Tensor, "B H n V"]:
    """Attention of this rank's queries to the keys of all ranks."""
    keys, values = gather_tokens(ranks, shares, 2, k, v)
    parts = sorted(span for spans in shares for span in spans)
    count = parts[-1][1]
    seen = reach_table(mask, parts, parts, q.device)
    found, start = [], 0
    for span in shares[ranks.rank]:
        own, start = q.narrow(2, start, span[1] - span[0]), start + span[1] - span[0]
        terms = terms_of(span)
        visible = [part for part in parts if seen[span, part] is not Reach.NONE]
        some = (visible[0][0], visible[-1][1]) if visible else (0, 0)
        if (
            terms.of(RowRule) or not visible
        ):  # a rule counts all keys; where there are none, gradients are 0 all the same
            some = (0, count)
        first, stop = some
        theirs, own_mask = terms.narrow(slice(None), slice(*some)), narrowed(mask, span, some, q.device)
        found.append(
            attention(
                own, keys[:, :, first:stop], values[:, :, first:stop], position=theirs, mask=own_mask, scale=scale
            )
        )
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
