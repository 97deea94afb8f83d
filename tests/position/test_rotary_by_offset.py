"""ReRoPE, Self-Extend and dual chunk attention: by loops over pairs, from the offset that each pair is rotated by."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.rotations import RotationSuite
from relpos import (
    DualChunk,
    QueryScale,
    ReRoPE,
    RotaryEmbedding,
    Scale,
    SelfExtend,
    Sequence,
    Sinks,
    Softcap,
    attention,
)
from relpos.engines.arguments import Arguments
from relpos.testing import oracle

BASE = 100.0


Place = int | None
"""Of a token; a prefix token has none."""


def near(i: Place, j: Place, window: int) -> bool:
    return i is not None and j is not None and abs(i - j) < window


def rectified(i: Any, j: Any, window: int) -> int:
    return i - j if near(i, j, window) else 0 if i is None else window


def grouped(i: Any, j: Any, window: int, group: int) -> int:
    if near(i, j, window):
        return i - j
    return (0 if i is None else i // group + window - window // group) - (0 if j is None else j // group)


def chunked(i: Any, j: Any, size: int, local: int) -> int:
    """As in the paper: intra-chunk, successive-chunk and inter-chunk positions."""
    tokens = size - local
    if i is not None and j is not None:
        if i // tokens == j // tokens:
            return i - j
        if i // tokens == j // tokens + 1:
            return min(i % tokens + tokens, size) - j % tokens
    return (0 if i is None else min(2 * tokens - 1, size)) - (0 if j is None else j % tokens)


def scores(q: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    """`<R(a) q, R(b) k>` of halves, from a - b of each pair alone."""
    pairs = q.shape[-1] // 2
    total = torch.zeros((), dtype=q.dtype)
    for p in range(pairs):
        angle = (offsets.double() * BASE ** (-p / pairs)).to(q.dtype)
        x, y = (one[..., p] for one in (q, k))
        u, w = (one[..., p + pairs] for one in (q, k))
        inner = x[..., :, None] * y[..., None, :] + u[..., :, None] * w[..., None, :]
        outer = x[..., :, None] * w[..., None, :] - u[..., :, None] * y[..., None, :]
        total = total + inner * angle.cos() + outer * angle.sin()
    return total


class ByOffset(RotationSuite):
    axes = (1, 2)
    sampled = 4
    kind: ClassVar[Any]
    settings: ClassVar[tuple[int, ...]]
    offset: ClassVar[Any]

    def build(self, site: Any) -> Any:
        return self.kind(RotaryEmbedding(site.head_dim, base=BASE), *self.settings)

    def oracle_attention(self, mechanism, q, k, v, queries, keys, allowed):  # type: ignore[no-untyped-def]
        k, v = (oracle.heads_of(x, q.shape[1]) for x in (k, v))
        places = [[place and place[0] for place in oracle.raster(side)] for side in (queries, keys)]
        offsets = torch.tensor([[type(self).offset(i, j, *self.settings) for j in places[1]] for i in places[0]])
        wide = torch.promote_types(q.dtype, torch.float32)
        bias = scores(q.to(wide), k.to(wide), offsets) * q.shape[-1] ** -0.5
        return oracle.attention(q * 0, k, v, bias=bias, allowed=allowed)[0]


class TestReRoPE(ByOffset):
    preset = "rerope"
    kind = ReRoPE
    settings = (3,)
    offset = staticmethod(rectified)


class TestSelfExtend(ByOffset):
    alike = True
    preset = "self_extend"
    kind = SelfExtend
    settings = (3, 2)
    offset = staticmethod(grouped)
    every = 3


class TestDualChunk(ByOffset):
    """Chunks of 3 tokens."""

    alike = True
    preset = "dual_chunk"
    kind = DualChunk
    settings = (4, 1)
    offset = staticmethod(chunked)
    every = 3


@pytest.mark.parametrize("backend", ["reference", "sdpa", "streaming"])
def test_what_acts_on_the_content_beside_it(backend: str) -> None:
    """The scale and factors of queries act on every pair, a soft cap too; sinks and dropout on one softmax of all."""
    own, qkv = ReRoPE(RotaryEmbedding(4, base=BASE), 3).terms(Sequence(6)), [torch.randn(1, 2, 6, 4) for _ in range(3)]
    q, k, v = qkv
    factor, sinks = torch.rand(1, 1, 6) + 1, torch.randn(2)
    offsets = torch.tensor([[rectified(i, j, 3) for j in range(6)] for i in range(6)])
    bias = scores(q, k, offsets) * 0.3 * factor[..., None]
    for added in (QueryScale(factor, "scores"), QueryScale(factor)):
        found = attention(q, k, v, position=own + Scale(0.3) + added + Sinks(sinks), backend=backend)
        wanted = oracle.attention(q * 0, k, v, bias=bias, sinks=sinks)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if backend != "streaming":
        return
    capped = attention(q, k, v, position=own + Scale(0.3) + QueryScale(factor) + Softcap(0.5), backend=backend)
    wanted = oracle.attention(q * 0, k, v, bias=0.5 * (bias / 0.5).tanh())[0]
    torch.testing.assert_close(capped, wanted, rtol=1e-5, atol=1e-6)
    dropped = []
    for engine in ("streaming", "reference"):
        torch.manual_seed(0)
        dropped.append(attention(q, k, v, position=own + Sinks(sinks), dropout=0.4, return_lse=True, backend=engine))
    torch.testing.assert_close(*dropped, rtol=1e-5, atol=1e-6)


def test_only_classes_with_pairs_are_computed() -> None:
    """A text as long as the window has one; a causal mask leaves out later keys, in any engine; one token that is
    decoded sees no later ones."""
    rotary = RotaryEmbedding(8)
    for own, counts in (
        (ReRoPE(rotary, 4), (1, 2, 2)),
        (SelfExtend(rotary, 4, 2), (1, 2, 2)),
        (DualChunk(rotary, 5, 1), (1, 3, 3)),
    ):
        qkv = [torch.randn(1, 2, 9, 8) for _ in range(3)]
        short = Arguments(*(x[:, :, :4] for x in qkv), own, Sequence(4), mask="causal").call()
        whole = Arguments(*qkv, own, Sequence(9), mask="causal").call()
        last = Arguments(qkv[0][:, :, :1], *qkv[1:], own, Sequence(1, start=8), Sequence(9)).call()
        assert tuple(len(call.parts()) for call in (short, whole, last)) == counts, type(own)


def test_a_text_within_the_window_is_rotated_as_usual() -> None:
    """And offsets stay within the bounds that the mechanisms are for."""
    rotary, qkv = RotaryEmbedding(8), [torch.randn(1, 2, 9, 8) for _ in range(3)]
    usual = attention(*qkv, position=rotary, queries=Sequence(9), mask="causal")
    for own in (ReRoPE(rotary, 9), SelfExtend(rotary, 9, 4), DualChunk(rotary, 12, 3)):
        found = attention(*qkv, position=own, queries=Sequence(9), mask="causal")
        torch.testing.assert_close(found, usual, rtol=1e-5, atol=1e-6)
    assert max(chunked(i, j, 12, 3) for i in range(60) for j in range(i + 1)) == 12
    assert max(grouped(i, j, 9, 4) for i in range(60) for j in range(i + 1)) <= 9 + 60 / 4
