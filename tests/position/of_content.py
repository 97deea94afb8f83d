"""What tests of rotations by content have in common: angles by loops over keys, and a model with a cache."""

from typing import Any

import torch
from torch import Tensor

import relpos
from conformance.suite import LibrarySuite
from relpos import KeyValueCache, LanguageModel
from relpos.core import Coordinates
from relpos.testing import oracle


class ContentRotationSuite(LibrarySuite):
    """A subclass gives what each key turns by. The suite's hidden states are q and k, the heads side by side."""

    axes = (1,)
    translation_invariant = True

    def takes(self, case: Any) -> bool:
        """Irregular coordinates are served where queries are keys."""
        return super().takes(case) and not (case.irregular and case.keys is not None)

    def steps(self, mechanism: Any, states: Tensor, places: list[int | None]) -> list[Tensor]:
        """`[B, H, P]` of each key, 0 of a prefix token; of hidden states in float32 or wider."""
        raise NotImplementedError

    def oracle_attention(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, queries: Coordinates, keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        k, v = (oracle.heads_of(x, q.shape[1]) for x in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        irregular = not hasattr(queries, "length")
        own = [None if place is None else place[0] for place in oracle.places(keys)]
        steps = self.steps(mechanism, k.transpose(1, 2).flatten(2), own)  # type: ignore[arg-type]

        def order(side: Coordinates) -> list[Any]:
            """Where tokens stand among the keys."""
            found = oracle.places(side)
            return [None if place is None else n if irregular else place[0] for n, place in enumerate(found)]

        def angles(side: Coordinates) -> Tensor:
            """Of each token: what keys up to it turn by, in all; 0 for a prefix token."""
            rows = []
            for place in order(side):
                pairs = zip(steps, order(keys), strict=True)
                behind = [x for x, at in pairs if place is not None and at is not None and at <= place]
                rows.append(torch.stack([torch.zeros_like(steps[0]), *behind]).sum(0))
            return torch.stack(rows, dim=2)

        q, k = oracle.rotate(q, angles(queries), "half"), oracle.rotate(k, angles(keys), "half")
        return oracle.attention(q.to(v.dtype), k.to(v.dtype), v, allowed=allowed)[0]


def decodes_as_it_reads(position: str, remembers: int) -> None:
    """A model of grouped heads: a token at a time, cropped and reordered; and two documents in a row."""
    torch.manual_seed(0)
    model = LanguageModel(64, 16, 32, depth=2, num_heads=4, num_kv_heads=2, position=position).double()
    for x in model.position_parameters():
        torch.nn.init.normal_(x, std=0.7)
    tokens = torch.randint(0, 64, (2, 12))
    whole, cache = model(tokens), KeyValueCache(2)
    assert (whole - model(tokens.flip(1)).flip(1)).abs().max() > 0.01
    with torch.no_grad(), relpos.decoding(model):
        steps = [model(tokens[:, :5], cache=cache)]
        steps += [model(tokens[:, t : t + 1], cache=cache) for t in range(5, 12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-11, atol=1e-11)
        assert cache.layers[0].remembered.shape == (2, 4, 12, remembers)  # type: ignore[union-attr]
        cache.crop(7)
        cache.reorder(torch.tensor([1, 1, 0]))
        again = model(tokens[[1, 1, 0], 7:], cache=cache)
        torch.testing.assert_close(again, whole[[1, 1, 0], 7:], rtol=1e-11, atol=1e-11)
    packed = model(tokens[:1], segments=torch.tensor([[0] * 5 + [1] * 7]))
    alone = torch.cat([model(tokens[:1, :5]), model(tokens[:1, 5:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)


def engines_agree(mechanism: Any, backend: str) -> None:
    """Four query heads on two of keys, each row of a batch with its own angles and padding on the left."""
    torch.manual_seed(0)
    own, n, width = mechanism.double(), 7, mechanism.head_dim
    x = torch.randn(2, n, mechanism.embed_dim, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(2, heads, n, width, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    real = torch.arange(n) >= torch.tensor([[0], [3]])
    places = relpos.Positions((real.cumsum(1) - 1).clamp(min=0), low=0, high=n - 1)
    mask = relpos.Mask.padding(real) & relpos.Mask.causal(torch.arange(n), torch.arange(n))
    found = [
        relpos.attention(q, k, v, position=own, queries=places, states=x, mask=mask, backend=name)
        for name in (backend, "reference")
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    leaves = [q, k, v, x, *own.parameters()]
    pair = [torch.autograd.grad(out.square().sum(), leaves) for out in found]
    for mine, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    short = [y[1:, ..., 3:, :] for y in (q, k, v)]
    given: Any = {"position": own, "queries": relpos.Sequence(4), "states": x[1:, 3:], "mask": "causal"}
    torch.testing.assert_close(found[0][1:, :, 3:], relpos.attention(*short, **given), rtol=1e-12, atol=1e-12)
