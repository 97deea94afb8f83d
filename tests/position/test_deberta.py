"""DeBERTa's disentangled attention: log buckets, both products, and the published layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from conformance.suite import LibrarySuite
from parity import TIGHT, layers_agree
from position.published import DTYPES, config, heads, largest_tensor, model, random, running_in, tokens
from relpos import DisentangledPosition, Grid, Scale, Sequence, Site, attention
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle

SPAN, MOST = 6, 9  # so that the cases' offsets reach every bucket and go beyond


def bucket(offset: int, span: int, most: int | None) -> int:
    """The row of an offset, in whole numbers. Of the buckets on a side, half hold one distance each; distance d is in
    mid + c with the smallest c for which d <= mid * ((most - 1) / mid)^(c / (mid - 1))."""
    distance, mid = abs(offset), span // 2
    if most is None:
        number = min(distance, span)
    elif distance <= mid:
        number = distance
    else:
        c = 1
        while distance ** (mid - 1) * mid**c > (most - 1) ** c * mid ** (mid - 1):
            c += 1
        number = mid + c
    return max(0, min(2 * span - 1, span + (number if offset > 0 else -number)))


class DeBERTa(LibrarySuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    translation_invariant = True
    c2p: ClassVar[bool] = True
    p2c: ClassVar[bool] = True
    most: ClassVar[int | None] = MOST
    every: ClassVar[int] = 1  # of the cases

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> DisentangledPosition:
        return DisentangledPosition(
            site.num_heads,
            site.head_dim,
            5,
            span=SPAN,
            max_distance=self.most,
            c2p=self.c2p,
            p2c=self.p2c,
            init_std=0.5,
        )

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
        count, width = q.shape[1], q.shape[-1]
        scale = (width * (1 + self.c2p + self.p2c)) ** -0.5

        def vectors(projection: Any) -> list[list[Tensor]]:
            made = [(projection.weight @ p + projection.bias).view(count, width) for p in mechanism.rel_embeddings]
            none = torch.zeros_like(made[0])

            def vector(a: Any, b: Any) -> Tensor:
                return none if a is None or b is None else made[bucket(a[0] - b[0], SPAN, self.most)]

            return [[vector(a, b) for b in oracle.raster(keys)] for a in oracle.raster(queries)]

        bias = q.new_zeros(1, 1, queries.count, keys.count)
        if self.c2p:
            bias = bias + oracle.meet(q, vectors(mechanism.pos_key))
        if self.p2c:
            met = [list(column) for column in zip(*vectors(mechanism.pos_query), strict=True)]
            bias = bias + oracle.meet(oracle.heads_of(k, count), met).transpose(2, 3)
        return oracle.attention(q, k, v, bias=bias * scale, allowed=allowed, scale=scale)[0]

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestDeBERTa(DeBERTa):
    preset = "deberta"


class TestDeBERTaV1(DeBERTa):
    alike = True
    row = "deberta (clipped, no log buckets)"
    most = None
    every = 4
    sampled = 4


class TestDeBERTaC2P(DeBERTa):
    alike = True
    row = "deberta (c2p alone)"
    p2c = False
    every = 4
    sampled = 4


class TestDeBERTaP2C(DeBERTa):
    alike = True
    row = "deberta (p2c alone)"
    c2p = False
    every = 4
    sampled = 4


class TestDeBERTaNeither(DeBERTa):
    alike = True
    row = ""  # nothing is left but the content
    c2p = p2c = False
    axes = (1,)
    every = 5
    sampled = 4


# buckets


@pytest.mark.parametrize(("span", "most"), [(4, 4), (6, 9), (8, 7), (16, 40), (32, 128), (48, 500), (64, 100)])
def test_every_distance(timm: Any, span: int, most: int) -> None:
    """Against whole numbers, and against theirs on both sides up to four times the largest."""
    offsets = torch.arange(-4 * most, 4 * most + 1)
    own = DisentangledPosition(1, 1, 1, span=span, max_distance=most)
    found = own.bucket(offsets)
    theirs = model("deberta_v2").make_log_bucket_position(offsets, span, most).long()
    assert torch.equal(found, (theirs + span).clamp(0, 2 * span - 1))
    assert found.tolist() == [bucket(offset, span, most) for offset in offsets.tolist()]
    assert found.min() == 0
    assert found.max() == 2 * span - 1


def test_every_distance_without_buckets() -> None:
    offsets = torch.arange(-20, 21)
    found = DisentangledPosition(1, 1, 1, span=5, max_distance=None).bucket(offsets)
    assert torch.equal(found, (offsets + 5).clamp(0, 9))


@pytest.mark.parametrize("span", [*range(4, 66, 2), 256])
def test_buckets_as_published(timm: Any, span: int) -> None:
    for most in (span // 2 + 2, span - 1, span + 1, 2 * span, 2 * span + 1, 512):
        if most >= span // 2 + 2:
            offsets = torch.arange(-3 * most, 3 * most + 1)
            theirs = model("deberta_v2").make_log_bucket_position(offsets, span, most).long()
            own = DisentangledPosition(1, 1, 1, span=span, max_distance=most)
            assert torch.equal(own.bucket(offsets), (theirs + span).clamp(0, 2 * span - 1)), most


# parity


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("buckets", [-1, 6], ids=["clipped", "log buckets"])
@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("kinds", "width"), [(("c2p", "p2c"), 3), (("c2p",), 2), (("p2c",), 2)], ids=str)
def test_parity_with_deberta_v2(
    timm: Any, kinds: tuple[str, ...], width: int, share: bool, buckets: int, backend: str, dtype: torch.dtype
) -> None:
    """The whole layer: output, and the gradients of tokens, projections and table. Their scale is the root of a square,
    so that nothing is rounded."""
    n, most = 21, 9
    settings = config(
        "deberta_v2",
        hidden_size=3 * width,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=list(kinds),
        share_att_key=share,
        position_buckets=buckets,
        max_relative_positions=most,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    block = random(model("deberta_v2").DisentangledSelfAttention(settings), dtype)
    span = buckets if buckets > 0 else most
    assert block.pos_ebd_size == span
    x = tokens(2, n, 3 * width, dtype=dtype)
    table = nn.Parameter(torch.randn(2 * span, 3 * width, dtype=dtype))
    with running_in(dtype):
        theirs = block(x, torch.ones(2, 1, n, n), rel_embeddings=table)[0]

    own = DisentangledPosition(
        3,
        width,
        3 * width,
        span=span,
        max_distance=most if buckets > 0 else None,
        c2p="c2p" in kinds,
        p2c="p2c" in kinds,
    ).to(dtype)
    own.rel_embeddings = table
    for name, layer in (("pos_key", "key_proj"), ("pos_query", "query_proj")):
        if getattr(own, name) is not None:
            setattr(own, name, getattr(block, layer if share else f"pos_{layer}"))
    q, k, v = (heads(layer(x), 3) for layer in (block.query_proj, block.key_proj, block.value_proj))
    attended = attention(q, k, v, position=own, queries=Sequence(n), backend=backend)
    assert isinstance(attended, Tensor)
    layers_agree(
        "deberta" if len(kinds) == 2 else f"deberta ({kinds[0]} alone)",
        "transformers DebertaV2 DisentangledSelfAttention",
        attended.transpose(1, 2).flatten(2),
        theirs,
        {"x": x, "rel_embeddings": table, **dict(block.named_parameters())},
        limit=TIGHT[dtype],
    )


# a module like any other


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_never_a_vector_a_pair(backend: str) -> None:
    """Of 256 tokens and width 64 the largest tensor has as many numbers as there are pairs, not 64 times as many."""
    assert largest_tensor(DisentangledPosition(1, 64, 64, span=32), backend) <= 2 * 256 * 256


@pytest.mark.parametrize(("c2p", "p2c", "parts"), [(True, True, 3), (True, False, 2), (False, True, 2)])
def test_scale(c2p: bool, p2c: bool, parts: int) -> None:
    own = DisentangledPosition(3, 4, 12, c2p=c2p, p2c=p2c)
    assert [term.value for term in own.terms(Sequence(3)).of(Scale)] == [1 / math.sqrt(4 * parts)]


def test_from_site_and_growth() -> None:
    own = DisentangledPosition.from_site(Site(3, 4, 12, Grid(2, 5)))
    assert own.rel_embeddings.shape == (64, 12)
    assert own.max_distance == 128
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own


def test_can_be_built_without_memory() -> None:
    """Under the meta device, as large models are: the edges are numbers and not tensors."""
    with torch.device("meta"):
        own = DisentangledPosition(3, 4, 12)
    assert own.rel_embeddings.is_meta
    assert own.bucket(torch.tensor([-5000, 0, 128, 5000])).tolist() == [0, 256, 384, 511]
