"""`relpos.parallel.context_attention`: attention over a sequence whose tokens are spread over ranks.

    rank 0: q, k, v of its tokens   \\                                    / its tokens of the output
    rank 1: q, k, v of its tokens   -   one sequence, one position, mask  -  its tokens of the output
    ...                             /                                    \\ ...

Positions and masks are those of the whole sequence; the result is one process's, cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from relpos.core import Coordinates, Mask, MaskLike, Term, Terms
from relpos.core.checks import fail, require_choice, require_computed, require_number, require_tensor, shape_of
from relpos.engines.arguments import Position, check_mask, require_fit
from relpos.parallel.by_gather import by_gather
from relpos.parallel.by_heads import by_heads
from relpos.parallel.by_ring import by_ring
from relpos.parallel.choice import ShardMethod, choose_method
from relpos.parallel.layout import ShardLayout, require_layout, stretches
from relpos.parallel.local_terms import check_position, of_any_queries, terms_of_queries
from relpos.parallel.ranks import Ranks, structure
from relpos.parallel.ring_schedule import FORWARD, Schedule
from relpos.position.base.device import settle


def context_attention(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B G n D"],
    v: Float[Tensor, "B G n V"],
    *,
    position: Position | None = None,
    mesh: DeviceMesh | dist.ProcessGroup,
    queries: Coordinates | None = None,
    mask: MaskLike | None = None,
    method: ShardMethod = "auto",
    layout: ShardLayout = "contiguous",
    scale: float | None = None,
    dropout: float = 0.0,
    states: Float[Tensor, "B n E"] | None = None,
    terms: Terms | Term | None = None,
) -> Float[Tensor, "B H n V"]:
    """Self-attention of a sequence of N tokens, of which each of R ranks holds n = N / R. All ranks call it together.

    The output, and the gradients of q, k and v, are this rank's share of what one process computes for the whole
    sequence, up to rounding; bits are the same in every run. A weight of the position gets on each rank the part of its
    gradient that this rank's loss has: `average_gradients`, DistributedDataParallel or FSDP over the mesh then sum it
    with those of all other weights, once. Random positions are those that the first rank draws.

    Methods:
        gather: each rank has all keys and values. Every mechanism, and every mask but block layouts with a block that
            two stretches share; memory grows with N.
        ring: keys and values travel in blocks, while others are computed. A rank holds its share and two blocks; what
            no query of a rank sees is not sent to it. Every mechanism but rules of a row (CoPE, FIRE); no mask that is
            a tensor or a block layout.
        ulysses: ranks exchange tokens for heads, and each computes H / R heads of the whole sequence. Every mechanism
            but rules of a row, and every mask.
        auto: what a rank sends least by, of those that can compute the call; gather only where the ring cannot.

    Args:
        q: queries of this rank's tokens.
        k: keys of the same tokens; G key heads serve H query heads in equal groups.
        v: their values.
        position: a mechanism, beside `queries`; or terms of all tokens.
        mesh: the ranks that share the sequence: a mesh of one dimension, or a process group.
        queries: coordinates of all N tokens, beside a mechanism.
        mask: which pairs of all N tokens may attend, as for `relpos.attention`.
        method: "auto", "gather", "ring" or "ulysses".
        layout: which tokens a rank holds: "contiguous", the r-th of R parts; or "zigzag", the r-th and the r-th from
            the end of 2 R parts, which gives all ranks equal work under a causal mask. `shard` cuts so.
        scale: factor on the content product, as for `relpos.attention`.
        dropout: only 0.
        states: what this rank's queries are projected from, for a mechanism that needs it.
        terms: terms of all tokens to add to the mechanism's.

    Returns:
        `[B, H, n, V]`, of this rank's tokens.

    Raises:
        ValueError: arguments that do not fit together, or not those of other ranks; on every rank.
        NotImplementedError: the method asked for lacks something that the call needs.
        ConnectionError: another rank has ended.

    Examples:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh, tokens = dist.group.WORLD, relpos.Sequence(10)
        >>> bias = relpos.T5Bias(num_heads=2, bidirectional=False)
        >>> q = k = v = relpos.parallel.shard(torch.randn(1, 2, 10, 8), mesh, dim=2)
        >>> relpos.parallel.context_attention(q, k, v, position=bias, mesh=mesh, queries=tokens, mask="causal").shape
        torch.Size([1, 2, 10, 8])
        >>> dist.destroy_process_group()
    """
    ranks = Ranks.of(mesh)
    asked = _Asked(q, k, v, position, queries, mask, method, layout, scale, dropout, states, terms)
    error: Exception | None = None
    facts: dict[str, object] = dict.fromkeys(_FACTS, 0)
    whole_mask = None
    try:
        whole_mask = asked.check(ranks.size)
        facts = asked.facts(whole_mask)
    except Exception as raised:  # of any kind: the others wait for this rank's word
        error = raised
    ranks.agree(facts, q.device if isinstance(q, Tensor) else torch.device("cpu"), error)
    count = q.shape[2] * ranks.size
    shares = stretches(count, ranks.size, layout)
    if isinstance(position, nn.Module):
        settle(position, q.device)
    terms_of = terms_of_queries(position, queries, states, count, ranks, shares, terms)
    masks = () if whole_mask is None else (whole_mask,)
    schedule = Schedule(ranks.rank, shares, masks, q.device, FORWARD)
    taken = choose_method(method, terms_of, q, k, v, states is not None, whole_mask, schedule)
    if taken == "ulysses":
        if states is not None:
            assert position is not None
            assert queries is not None
            terms_of = of_any_queries(terms_of, position, queries, states, ranks, shares)
        return by_heads(q, k, v, terms_of((0, count)), whole_mask, scale, ranks, shares)
    if taken == "ring":
        return by_ring(q, k, v, terms_of, whole_mask, scale, ranks, schedule)
    return by_gather(q, k, v, terms_of, whole_mask, scale, ranks, shares)


_FACTS = (
    "shapes of q, k and v", "dtypes of q, k and v", "the position", "terms", "the coordinates", "the mask",
    "the method", "the layout", "the scale", "gradients of q, k, v and states",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Asked:
    """The arguments of a call, as they came on this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    position: Position | None
    queries: Coordinates | None
    mask: MaskLike | None
    method: str
    layout: str
    scale: float | None
    dropout: float
    states: Tensor | None
    terms: Terms | Term | None

    def facts(self, mask: Mask | None) -> dict[str, object]:
        """What must be the same on all ranks, by the names of `_FACTS`."""
        qkv = (self.q, self.k, self.v)
        learning = (*qkv, *(() if self.states is None else (self.states,)))
        values = (
            [tuple(x.shape) for x in qkv], [str(x.dtype) for x in qkv], structure(self.position),
            structure(self.terms), structure(self.queries), structure(mask), self.method, self.layout, self.scale,
            [torch.is_grad_enabled() and x.requires_grad for x in learning],
        )  # fmt: skip
        return dict(zip(_FACTS, values, strict=True))

    def check(self, size: int) -> Mask | None:
        """Raise unless the arguments fit together on this rank; the mask of all tokens of `size` ranks."""
        require_choice(self.method, "method", get_args(ShardMethod))
        require_layout(self.layout)
        q, k, v = self.q, self.k, self.v
        for name, x in (("q", q), ("k", k), ("v", v)):
            require_tensor(x, name, dims=4)
            require_computed(x, name, f"Convert {name}, e.g. {name}.float().")
        require_fit(q, k, v)
        if k.shape[2] != q.shape[2]:
            came = f"{q.shape[2]} queries and {k.shape[2]} keys"
            fail("q and k of the same tokens", came, "Context parallel attention is self-attention.")
        if 0 in (q.shape[0], q.shape[2]):
            fail("a share with tokens on every rank", shape_of(q), "Use fewer ranks for so short a sequence.")
        if self.scale is not None:
            require_number(self.scale, "scale", "above 0", "Leave it out for 1/sqrt(head width).")
        if self.dropout:
            remedy = "Each rank would draw its own: drop outputs of the layer instead."
            fail("no dropout of attention weights over several ranks", f"{self.dropout!r}", remedy)
        if self.layout == "zigzag" and size > 1 and q.shape[2] % 2:
            remedy = 'Pad the sequence, or use layout="contiguous".'
            fail("an even number of tokens on each rank of a zigzag", str(q.shape[2]), remedy)
        count = q.shape[2] * size
        check_position(self.position, self.queries, self.states, count, q)
        whole_q, whole_k, whole_v = (x[:, :, :1].expand(-1, -1, count, -1) for x in (q, k, v))
        for terms in (self.position, self.terms):  # of all tokens
            if isinstance(terms, Term | Terms):
                (Terms() + terms).check(whole_q, whole_k, whole_v)
        whole = None if self.mask is None else Mask.of(self.mask)
        if whole is not None:
            check_mask(whole, whole_q, whole_k)
        return whole
