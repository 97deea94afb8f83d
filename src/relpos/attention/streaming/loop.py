"""Exact attention over blocks of query rows, forward and backward: what the operators run.

Scores are kept in base 2, because exp2 is several times faster than exp on CPU where it underflows. With c = log2(e),

    score2  = c * (softcap(scale * <q, k>) + bias) - shift          the bias and -shift are written first, and the
    weight  = exp2(score2)                                          product is added to them by the matrix product

In the forward, shift is a bound of the row (|q| |k| scale plus the largest bias), so that no pass over the scores looks
for the row's maximum; where the weights then sum to so little that digits are lost, the block is done again with the
maximum itself. In the backward, shift is the log-sum-exp, and with delta = <output, its gradient>

    d score = weight * (<d output, v> - delta)

gives every other gradient by a matrix product. Each pair is computed once in the forward and once in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.attention.streaming import masks
from relpos.attention.streaming.general import General
from relpos.attention.streaming.plan import Work
from relpos.attention.streaming.strips import Strips, log_base
from relpos.core import LineBias, Sinks, Softcap
from relpos.core.random import keep

PAIRS = 2**19
"""Scores that are held at once, in a buffer: half a million float32 numbers stay in the cache of two cores."""
_ENOUGH = 2.0**-26
"""Sum of a row's weights under a bound, below which the row is done again with its maximum: digits would be lost."""
_PAD = 16
"""Numbers between the rows of a buffer, so that they do not all fall into the same lines of the cache."""


def _plus_product(into: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """`into += factor * a @ b`, for `[g, n, m]`."""
    if into.shape[0] == 1:
        into[0].addmm_(a[0], b[0], alpha=factor)
    else:
        into.baddbmm_(a, b, alpha=factor)


class _Buffer:
    """Room for scores of changing shape, allocated once."""

    def __init__(self, like: Tensor) -> None:
        self.store = like.new_empty(0)
        self.shape: tuple[int, ...] = ()

    def rows(self, g: int, n: int, m: int) -> Float[Tensor, "g n m"]:
        """`[g, n, m]`, contents undefined."""
        return self._room(g * n * (m + _PAD)).as_strided((g, n, m), (n * (m + _PAD), m + _PAD, 1))

    def shifted(self, g: int, n: int, m: int, step: int) -> tuple[Tensor, Tensor]:
        """The same with row r shifted by `r * step` to the right, and the whole `[g, n, W]`, zero outside the rows."""
        width = m + (n - 1) * step
        store = self._room(g * n * (width + step))
        if self.shape != (g, n, m, step):
            store.zero_()
            self.shape = (g, n, m, step)
        whole = store.as_strided((g, n, width), (n * width, width, 1))
        return store.as_strided((g, n, m), (n * width, width + step, 1)), whole

    def _room(self, count: int) -> Tensor:
        if self.store.numel() < count:
            self.store = self.store.new_empty(count)
            self.shape = ()
        return self.store


class Loop:
    """One call, ready to run."""

    def __init__(self, work: Work) -> None:
        self.work = work
        batch, heads, _, _ = work.q.shape
        self.batch, self.heads, self.keys = batch, heads, work.k.shape[2]
        self.groups = heads // work.k.shape[1]
        self.dtype = torch.promote_types(work.q.dtype, torch.float32)
        self.unit = log_base(self.dtype)
        self.side: Strips | General = Strips(work, PAIRS) if Strips.serve(work) else General(work, PAIRS)
        self.q = self.side.gather(work.q.detach().to(self.dtype))
        self.k, self.v = (self._repeated(x.detach().to(self.dtype)) for x in (work.k, work.v))
        softcap = work.terms.one(Softcap)
        self.cap = None if softcap is None else softcap.cap
        sinks = work.terms.one(Sinks)
        self.sink: Tensor | None = None
        if sinks is not None:
            self.sink = (sinks.logits.detach().to(self.dtype) * self.unit).expand(batch, heads).reshape(-1, 1)
        self.scores = _Buffer(self.q)
        self.other = _Buffer(self.q)
        self.tanh: Tensor | None = None

    def _repeated(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "BH M D"]:
        return x.repeat_interleave(self.groups, dim=1).flatten(0, 1)

    def _chunks(self, n: int, m: int) -> Iterator[slice]:
        count = self.batch * self.heads
        at_once = count if self.side.together else max(1, PAIRS // max(1, n * m))
        for start in range(0, count, at_once):
            yield slice(start, min(start + at_once, count))

    # scores

    def _exp(self, x: Tensor) -> Tensor:
        """In place, of scores in the units of `log_base`."""
        return x.exp_() if self.unit == 1 else x.exp2_()

    def _reach(self) -> Float[Tensor, "BH N 1"]:
        """At least the largest content score of each row."""
        if self.cap is not None:
            return self.q.new_full((self.q.shape[0], self.q.shape[1], 1), self.cap * self.unit)
        longest = self.k.norm(dim=-1).amax(dim=-1)[:, None, None]
        return self.q.norm(dim=-1, keepdim=True) * longest * (self.work.scale * self.unit)

    def _scores(self, block: Any, tile: Any, heads: slice, shift: Tensor | None) -> Float[Tensor, "g n m"]:
        """The scores of a tile, in the units of `log_base`, less `shift`."""
        rows, keys = block.rows, tile.keys
        bias = self.side.bias(block, tile, heads)
        score = self.scores.rows(heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start)
        q, k = self.q[heads, rows], self.k[heads, keys].mT
        if self.cap is None:
            self._begin(score, bias, shift)
            _plus_product(score, q, k, self.work.scale * self.unit)
        else:
            self.tanh = torch.bmm(q, k).mul_(self.work.scale / self.cap).tanh_()
            self._begin(score, bias, shift)
            score.add_(self.tanh, alpha=self.cap * self.unit)
        if tile.masked:
            assert self.work.mask is not None
            pairs = masks.allowed(self.work.mask, block.numbers, keys)
            if not bool(pairs.all()) if pairs.device.type == "cpu" else True:
                score.masked_fill_(self._of_heads(~pairs, heads), -torch.inf)
        return score

    @staticmethod
    def _begin(score: Tensor, bias: Tensor | None, shift: Tensor | None) -> None:
        if bias is not None and shift is not None:
            torch.sub(bias.expand_as(score), shift, out=score)
        elif bias is not None:
            score.copy_(bias)
        elif shift is not None:
            score.copy_(-shift)
        else:
            score.zero_()

    def _of_heads(self, x: Tensor, heads: slice) -> Tensor:
        """`[1 or B, 1 or H, n, m]` for a stretch of the B * H heads."""
        if x.shape[0] == 1 and x.shape[1] == 1:
            return x[0]
        return x.expand(self.batch, self.heads, *x.shape[2:]).flatten(0, 1)[heads]

    def _kept(self, block: Any, tile: Any) -> Float[Tensor, "g n m"] | None:
        """Dropout's factors, of all heads."""
        if self.work.seed is None:
            return None
        columns = torch.arange(tile.keys.start, tile.keys.stop, device=self.q.device)
        rows = block.numbers + self.work.first_row
        kept = keep(self.work.seed, self.batch, self.heads, rows, columns, self.work.dropout)
        return kept.flatten(0, 1).to(self.dtype) / (1 - self.work.dropout)

    # forward

    def forward(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """The output in q's dtype, and the natural log-sum-exp."""
        out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[2])
        lse = self.q.new_full((*self.q.shape[:2], 1), -torch.inf)
        reach = self._reach()
        for block in self.side.blocks():
            tiles = list(self.side.tiles(block))
            widest = max((tile.keys.stop - tile.keys.start for tile in tiles), default=1)
            for heads in self._chunks(block.rows.stop - block.rows.start, widest):
                out[heads, block.rows], lse[heads, block.rows] = self._forward(block, tiles, heads, reach)
        return self.side.scatter(out).to(self.work.q.dtype), self.side.scatter(lse)[..., 0] / self.unit

    def _bound(self, block: Any, tiles: Sequence[Any], heads: slice, reach: Tensor) -> Tensor:
        """No less than any score of the rows."""
        bound = reach[heads, block.rows]
        if isinstance(self.side, Strips):
            return bound if self.side.highest is None else bound + self.side.highest[heads]
        highest = [tile.bias.amax(dim=-1, keepdim=True) for tile in tiles if tile.bias is not None]
        return bound + torch.stack(highest).amax(dim=0) if highest else bound

    def _largest(self, block: Any, tiles: Sequence[Any], heads: slice) -> Tensor:
        """Each row's largest score."""
        n = block.rows.stop - block.rows.start
        peak = self.q.new_full((heads.stop - heads.start, n, 1), -torch.inf)
        for tile in tiles:
            peak = torch.maximum(peak, self._scores(block, tile, heads, None).amax(dim=-1, keepdim=True))
        return peak

    def _forward(self, block: Any, tiles: Sequence[Any], heads: slice, reach: Tensor) -> tuple[Tensor, Tensor]:
        g, n = heads.stop - heads.start, block.rows.stop - block.rows.start
        sink = None if self.sink is None else self.sink[heads, None]
        quick = self.q.device.type == "cpu" and self.dtype == torch.float32
        attempts = ("bound", "largest") if quick else ("largest",)
        for attempt in attempts:
            if attempt == "bound":
                shift = self._bound(block, tiles, heads, reach)
            else:
                shift = self._largest(block, tiles, heads)
            if sink is not None:
                shift = torch.maximum(shift, sink)
            shift = torch.where(shift == -torch.inf, 0, shift)
            total = self.q.new_zeros(g, n, 1) if sink is None else self._exp(sink - shift)
            out = self.q.new_zeros(g, n, self.v.shape[2])
            for tile in tiles:
                weights = self._exp(self._scores(block, tile, heads, shift))
                total += weights.sum(dim=-1, keepdim=True)
                kept = self._kept(block, tile)
                if kept is not None:
                    weights.mul_(kept)
                _plus_product(out, weights, self.v[heads, tile.keys])
                if isinstance(self.side, General) and self.side.has_values:
                    out += self.side.outputs(tile, weights)
            if attempt == "bound" and tiles and bool(total.amin() >= _ENOUGH):
                break
        blank = total == 0
        return out / torch.where(blank, 1, total), torch.where(blank, -torch.inf, shift + total.log() * self.unit)

    # backward

    def backward(
        self,
        out: Float[Tensor, "B H N V"],
        lse: Float[Tensor, "B H N"],
        d_out: Float[Tensor, "B H N V"],
        d_lse: Float[Tensor, "B H N"] | None,
        needed: list[Tensor],
    ) -> dict[int, Tensor]:
        """The gradients of the tensors in `needed`, by their `id`."""
        work, side = self.work, self.side
        wanted = {id(x) for x in needed}
        gradient = side.gather(d_out.to(self.dtype))
        delta = (d_out.to(self.dtype) * out.to(self.dtype)).sum(dim=-1)
        if d_lse is not None:
            delta = delta - d_lse.to(self.dtype)
        delta = side.gather(delta[..., None])
        shift = side.gather(lse[..., None].to(self.dtype) * self.unit)
        shift = torch.where(shift == -torch.inf, torch.inf, shift)  # a row that sees nothing has no weights
        d_q, d_k, d_v = (
            torch.zeros_like(x) if id(own) in wanted else None
            for x, own in ((self.q, work.q), (self.k, work.k), (self.v, work.v))
        )
        line = next(iter(work.terms.of(LineBias)), None)
        d_line: Tensor | None = None
        if isinstance(side, General):
            side.expect(wanted)
        elif line is not None and id(line.values) in wanted:
            assert side.reversed is not None
            d_line = torch.zeros_like(side.reversed)
        for block in side.blocks():
            for tile in side.tiles(block):
                size = block.rows.stop - block.rows.start, tile.keys.stop - tile.keys.start
                for heads in self._chunks(*size):
                    d = self._backward(block, tile, heads, gradient, delta, shift, d_v, d_line)
                    if d_q is not None:
                        _plus_product(d_q[heads, block.rows], d, self.k[heads, tile.keys], work.scale)
                    if d_k is not None:
                        _plus_product(d_k[heads, tile.keys], d.mT, self.q[heads, block.rows], work.scale)
        found: dict[int, Tensor] = {}
        if d_q is not None:
            found[id(work.q)] = side.scatter(d_q)
        for x, d_x in ((work.k, d_k), (work.v, d_v)):
            if d_x is not None:
                found[id(x)] = self._of_keys(d_x)
        sinks = work.terms.one(Sinks)
        if sinks is not None and id(sinks.logits) in wanted:
            assert self.sink is not None
            share = -self._exp(self.sink[:, None] - shift) * delta
            found[id(sinks.logits)] = share.sum(dim=(1, 2)).view(self.batch, self.heads).sum(dim=0)
        if d_line is not None:
            assert line is not None
            whole = d_line.flip(-1).view(self.batch, self.heads, -1).sum(dim=0)
            found[id(line.values)] = whole.sum_to_size(line.values.shape)
        if isinstance(side, General):
            self._of_terms(side, found, wanted)
        return found

    def _backward(
        self,
        block: Any,
        tile: Any,
        heads: slice,
        gradient: Tensor,
        delta: Tensor,
        shift: Tensor,
        d_v: Tensor | None,
        d_line: Tensor | None,
    ) -> Float[Tensor, "g n m"]:
        """The gradient of a tile's content scores; that of v and of the bias is added to theirs."""
        side, rows, keys = self.side, block.rows, tile.keys
        upstream = gradient[heads, rows]
        weights = self._exp(self._scores(block, tile, heads, shift[heads, rows]))
        g, n, m = weights.shape
        step = side.skew(block, tile) if d_line is not None else 0
        d, whole = self.other.shifted(g, n, m, step) if step else (self.other.rows(g, n, m), None)
        kept = self._kept(block, tile)
        used = weights if kept is None else weights * kept
        if d_v is not None:
            _plus_product(d_v[heads, keys], used.mT, upstream)
        if kept is None:
            d.copy_(-delta[heads, rows])
            _plus_product(d, upstream, self.v[heads, keys].mT)
            if isinstance(side, General) and side.has_values:
                d += side.outputs_backward(block, tile, used, upstream)
        else:
            d.zero_()
            _plus_product(d, upstream, self.v[heads, keys].mT)
            if isinstance(side, General) and side.has_values:
                d += side.outputs_backward(block, tile, used, upstream)
            d.mul_(kept).sub_(delta[heads, rows])
        d.mul_(weights)
        if isinstance(side, General):
            side.collect(block, tile, d)
        elif d_line is not None:
            sums = d.sum(dim=1) if whole is None else whole.sum(dim=1)
            side.collect(d_line, block, tile, heads, sums, d)
        if self.cap is not None:
            assert self.tanh is not None
            d.mul_(1 - self.tanh.square())
        return d

    def _of_keys(self, x: Float[Tensor, "BH M D"]) -> Float[Tensor, "B G M D"]:
        """The sum over the query heads that share a key head."""
        return x.unflatten(0, (self.batch, self.heads // self.groups, self.groups)).sum(dim=2)

    def _of_terms(self, side: General, found: dict[int, Tensor], wanted: set[int]) -> None:
        for x, gradient in zip(pytree.tree_leaves(self.work.terms), pytree.tree_leaves(side.gradients), strict=True):
            if isinstance(x, Tensor) and id(x) in wanted and id(x) not in found:
                found[id(x)] = gradient
        work = self.work
        own_k = side.into_k.unflatten(1, (self.heads // self.groups, self.groups)).sum(dim=2)
        for plain, content, gradient in ((work.plain_q, work.q, side.into_q), (work.plain_k, work.k, own_k)):
            place = content if plain is None else plain
            if id(place) in wanted:
                found[id(place)] = found[id(place)] + gradient if id(place) in found else gradient

