"""TUPE: the untied product, the class token, TUPE-R, and other sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from position.published import largest_tensor
from relpos import Grid, LineBias, LowRank, Positions, Scale, Sequence, Site, T5Bias, TUPEPosition, attention
from relpos.core import Coordinates
from relpos.position.saved import is_settings
from relpos.testing import oracle

EVERY_BACKEND = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def untied(own: Any, queries: list[Any], keys: list[Any]) -> Tensor:
    """Ke et al. 2021, equations 7 and 9, `[H, N, M]`, a pair at a time. Places are row numbers, None a prefix."""
    heads = own.num_heads
    width = own.pos_query.out_features // heads

    def side(layer: Any) -> list[Tensor]:
        made = []
        for p in own.places.pos_embed[0]:
            centred = p - p.mean()
            normed = centred / torch.sqrt((centred * centred).mean() + own.norm.eps) * own.norm.weight + own.norm.bias
            made.append((layer.weight @ normed + layer.bias).view(heads, width))
        return made

    query, key = side(own.pos_query), side(own.pos_key)
    entries = []
    for i in queries:
        for j in keys:
            # the first two vectors are those of the thetas
            a, b = (0, 0) if i is None else (1, 1) if j is None else (2 + i, 2 + j)
            entries.append((query[a] * key[b]).sum(dim=-1) / math.sqrt(2 * width))
    return torch.stack(entries, dim=-1).view(heads, len(queries), len(keys))


def numbers(coordinates: Coordinates) -> list[Any]:
    return [place and place[0] for place in oracle.raster(coordinates)]


class TestTUPE(LibrarySuite):
    axes = (1,)
    preset = "tupe"

    def takes(self, case: Any) -> bool:
        sides = [case.queries] if case.keys is None else [case.queries, case.keys]
        return super().takes(case) and all(side.low[0] >= 0 for side in sides)

    def build(self, site: Site) -> TUPEPosition:
        return TUPEPosition.from_site(site)

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        bias = untied(mechanism, numbers(queries), numbers(keys))[None]
        return oracle.attention(q, k, v, bias=bias, allowed=allowed, scale=(2 * q.shape[-1]) ** -0.5)[0]


class TestTUPEGrid(TestTUPE):
    alike = True
    axes = (2, 3)
    cross = False
    irregular = False


def made(heads: int = 3, **where: Any) -> TUPEPosition:
    return TUPEPosition(heads, 4, 10, init_std=1.0, **where).double()


# the class token


@EVERY_BACKEND
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_tupe_r(prefix: int, backend: str) -> None:
    """With T5's bias: one scale, sqrt(2 D); the class token has its two numbers and no relative bias, as equation 9."""
    own, relative = made(seq_len=6), T5Bias(3, num_buckets=8, max_distance=6, scaled=True, init_std=1.0).double()
    where = Sequence(6, prefix=prefix)
    q, k, v = torch.randn(3, 2, 3, where.count, 4, dtype=torch.float64)
    bias = untied(own, numbers(where), numbers(where))
    for i in range(6):
        for j in range(6):
            row = relative.relative_attention_bias[oracle.t5_bucket(i - j, 8, 6, True)]
            bias[:, prefix + i, prefix + j] = bias[:, prefix + i, prefix + j] + row
    wanted = oracle.attention(q, k, v, bias=bias[None], scale=8**-0.5)[0]
    total = own + relative
    assert [term.value for term in total.terms(where).of(Scale)] == [pytest.approx(8**-0.5)]
    found = attention(q, k, v, position=total, queries=where, backend=backend)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_t5_must_not_bring_its_own_scale() -> None:
    with pytest.raises(ValueError, match="one scale"):
        (made(seq_len=6) + T5Bias(3)).terms(Sequence(6))


def test_to_the_class_token_no_place_is_nearer_than_another() -> None:
    own = made(grid_size=(2, 3))
    own_line = own.terms(Grid(2, 3, prefix=1)).of(LineBias)[0]
    (low,) = own.terms(Grid(2, 3, prefix=1)).of(LowRank)
    bias = own_line.values[:, own_line.lines.index()] + low.query[0] @ low.key[0].mT
    first, second = bias[:, 0, 0], bias[:, 1, 0]
    torch.testing.assert_close(bias[:, 0], first[:, None].expand(3, 7), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(bias[:, 1:, 0], second[:, None].expand(3, 6), rtol=1e-14, atol=1e-14)
    assert not torch.allclose(first, second)
    assert own.terms(Grid(2, 3)).of(LineBias) == ()


# places


def test_batched_places() -> None:
    own = made(seq_len=9)
    places = torch.tensor([[0, 7, 2], [5, 8, 0]])
    q, k, v = torch.randn(3, 2, 3, 4, 4, dtype=torch.float64)
    together = attention(q, k, v, position=own, queries=Positions(places, low=0, high=8, prefix=1))
    for b in range(2):
        one = slice(b, b + 1)
        bias = untied(own, [None, *places[b].tolist()], [None, *places[b].tolist()])
        alone = oracle.attention(q[one], k[one], v[one], bias=bias[None], scale=8**-0.5)[0]
        torch.testing.assert_close(together[one], alone)  # type: ignore[index]


def test_a_grid_is_no_bag_of_places() -> None:
    """Built for 2 x 3, it refuses 3 x 2: the same rows would be other places."""
    own = made(grid_size=(2, 3))
    for where in (Grid(3, 2), Sequence(6)):
        with pytest.raises(ValueError, match="Resize it first"):
            own.terms(where)


@EVERY_BACKEND
def test_of_low_rank(backend: str) -> None:
    """Of 256 tokens: nothing beyond one number a pair."""
    assert largest_tensor(TUPEPosition(1, 64, 8, seq_len=256), backend) <= 256 * 256


# other sizes


def test_grows_as_learned_positions_do() -> None:
    own = made(grid_size=(3, 4))
    assert own.growth == ("interpolated",) == own.places.growth
    grown = own.grow(Grid(5, 6, prefix=1), "interpolated")
    assert isinstance(grown, TUPEPosition)
    assert torch.equal(grown.places.pos_embed, own.places.resize((5, 6)).pos_embed)
    assert torch.equal(grown.places.pos_embed[:, :2], own.places.pos_embed[:, :2]), "the class token's stay"
    assert own.places.sizes == (3, 4), "left as it is"
    assert torch.equal(grown.pos_query.weight, own.pos_query.weight)
    grown.terms(Grid(5, 6, prefix=1))
    with pytest.raises(ValueError, match="growth rule of TUPEPosition"):
        own.grow(Grid(5, 6), "clipped")


@pytest.mark.parametrize("where", [Sequence(9, prefix=1), Sequence(4, start=5), Sequence(9)])
def test_a_sequence_grows_to_its_last_place(where: Sequence) -> None:
    own = made(seq_len=5)
    grown = own.grow(where, "interpolated")
    assert isinstance(grown, TUPEPosition)
    assert grown.places.sizes == (9,)
    grown.terms(where)
    for longer in (own.extend(9), own.grow(where, "repeated")):
        assert isinstance(longer, TUPEPosition)
        assert torch.equal(longer.places.pos_embed[0, 2:7], own.places.pos_embed[0, 2:])
        assert torch.equal(longer.places.pos_embed[0, 7:], own.places.pos_embed[0, 2:6])


# a module like any other


def test_from_site() -> None:
    own = TUPEPosition.from_site(Site(3, 4, 12, Grid(2, 5, prefix=1)))
    shapes = {name: tuple(x.shape) for name, x in own.state_dict().items() if not is_settings(name)}
    assert shapes == {
        "places.pos_embed": (1, 12, 12),
        "norm.weight": (12,),
        "norm.bias": (12,),
        "pos_query.weight": (12, 12),
        "pos_query.bias": (12,),
        "pos_key.weight": (12, 12),
        "pos_key.bias": (12,),
    }
    assert 0.01 < own.places.pos_embed.std() < 0.03
    assert TUPEPosition.from_site(Site(3, 4, 12, Sequence(1, start=6), Sequence(7))).places.sizes == (7,)
    assert TUPEPosition.from_site(Site(3, 4, 12, Sequence(2), Sequence(7))).places.sizes == (7,)
    assert not own.acts_on_tokens
