"""DeBERTa's disentangled attention: log buckets, both products, and the published layer."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from parity import TIGHT, layers_agree
from position.published import BOTH, attended, config, heads, merged, model, random, running_in, tokens
from position.suites import PositionSuite
from relpos import DisentangledPosition, Sequence, Site
from relpos.testing import oracle

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


class DeBERTa(PositionSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    raster = True
    translation_invariant = True
    c2p: ClassVar[bool] = True
    p2c: ClassVar[bool] = True
    most: ClassVar[int | None] = MOST

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

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        count, width = q.shape[1], q.shape[-1]
        scale = (width * (1 + self.c2p + self.p2c)) ** -0.5

        def vectors(projection: Any) -> list[list[Tensor]]:
            made = [(projection.weight @ p + projection.bias).view(count, width) for p in own.rel_embeddings]
            none = torch.zeros_like(made[0])
            return self.by_offset(queries, keys, lambda offset: made[bucket(offset, SPAN, self.most)], none)

        bias = q.new_zeros(1, 1, queries.count, keys.count)
        if self.c2p:
            bias = bias + oracle.meet(q, vectors(own.pos_key))
        if self.p2c:
            met = [list(column) for column in zip(*vectors(own.pos_query), strict=True)]
            bias = bias + oracle.meet(oracle.heads_of(k, count), met).transpose(2, 3)
        return {"bias": bias * scale, "scale": scale}


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

    def test_every_parameter_matters(self) -> None:
        """None does."""
        with pytest.raises(AssertionError, match="had no gradient in any case"):
            super().test_every_parameter_matters()


# buckets


def theirs_and_ours(span: int, most: int) -> tuple[Tensor, DisentangledPosition, Tensor]:
    """Offsets on both sides up to four times the largest, ours, and the row that each reads with theirs."""
    offsets = torch.arange(-4 * most, 4 * most + 1)
    theirs = model("deberta_v2").make_log_bucket_position(offsets, span, most).long()
    own = DisentangledPosition(1, 1, 1, span=span, max_distance=most)
    return offsets, own, (theirs + span).clamp(0, 2 * span - 1)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(("span", "most"), [(4, 4), (6, 9), (8, 7), (16, 40), (32, 128), (48, 500), (64, 100)])
def test_buckets_in_whole_numbers(span: int, most: int) -> None:
    offsets, own, theirs = theirs_and_ours(span, most)
    assert torch.equal(own.bucket(offsets), theirs)
    assert theirs.tolist() == [bucket(offset, span, most) for offset in offsets.tolist()]
    assert (theirs.min(), theirs.max()) == (0, 2 * span - 1)


@pytest.mark.usefixtures("timm")
def test_buckets_as_published() -> None:
    for span in (*range(4, 66, 2), 256):
        for most in (span // 2 + 2, span - 1, span + 1, 2 * span, 2 * span + 1, 512):
            if most >= span // 2 + 2:
                offsets, own, theirs = theirs_and_ours(span, most)
                assert torch.equal(own.bucket(offsets), theirs), (span, most)


# the published layer


@BOTH
@pytest.mark.parametrize(
    ("kinds", "width", "share", "buckets"),
    [
        (("c2p", "p2c"), 3, False, -1),
        (("c2p", "p2c"), 3, True, 6),
        (("c2p",), 2, False, 6),
        (("c2p",), 2, True, -1),
        (("p2c",), 2, False, 6),
        (("p2c",), 2, True, -1),
    ],
)
def test_parity_with_deberta_v2(
    timm: Any, kinds: tuple[str, ...], width: int, share: bool, buckets: int, backend: str, dtype: torch.dtype
) -> None:
    """The whole layer: output, and the gradients of tokens, projections and table; its vectors projected by weights of
    their own or by those of the content. Their scale is the root of a square, so that nothing is rounded."""
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

    chosen: dict[str, Any] = {kind: kind in kinds for kind in ("c2p", "p2c")}
    farthest = most if buckets > 0 else None
    own = DisentangledPosition(3, width, 3 * width, span=span, max_distance=farthest, **chosen).to(dtype)
    own.rel_embeddings = table
    for name, layer in (("pos_key", "key_proj"), ("pos_query", "query_proj")):
        if getattr(own, name) is not None:
            setattr(own, name, getattr(block, layer if share else f"pos_{layer}"))
    q, k, v = (heads(layer(x), 3) for layer in (block.query_proj, block.key_proj, block.value_proj))
    layers_agree(
        "deberta" if len(kinds) == 2 else f"deberta ({kinds[0]} alone)",
        "transformers DebertaV2 DisentangledSelfAttention",
        merged(attended(own, q, k, v, queries=Sequence(n), backend=backend)),
        theirs,
        {"x": x, "rel_embeddings": table, **dict(block.named_parameters())},
        limit=TIGHT[dtype],
    )
