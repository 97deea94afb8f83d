"""Exact attention over blocks of query rows, forward and backward: what the operators run.

Scores are kept in base 2, because exp2 is several times faster than exp on CPU where it underflows. With c = log2(e),

    score2  = c * (softcap(scale * <q, k>) + bias) - shift          the bias and -shift are written first, and the
    weight  = exp2(score2)                                          product is added to them by the matrix product

In the forward, shift is the row's maximum. In bfloat16, where the products leave little time to hide it in, it is a
bound (|q| |k| scale plus the largest bias), so that no pass over the scores looks for the maximum; where the weights
then sum to so little that digits are lost, the block is done again with the maximum itself. In the backward, shift is the log-sum-exp, and with delta = <output, its gradient>

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

from relpos.attention.streaming import flash, masks
from relpos.attention.streaming.general import General
from relpos.attention.streaming.plan import Work
from relpos.attention.streaming.products import add_product, native
from relpos.attention.streaming.strips import ROWS, WIDTH, Strips, Tile, log_base
from relpos.core import LineBias, LineVectors, Sinks, Softcap
from relpos.attention.streaming.vectors import Vectors
from relpos.core.random import keep

PAIRS = 2**18
"""Scores of several heads that are held at once, in a buffer, where one head has fewer."""
_ENOUGH = 2.0**-26
"""Sum of a row's weights under a bound, below which the row is done again with its maximum: digits would be lost."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""Rows and keys of a tile in bfloat16, whose products are so fast that what surrounds each is spread over more."""
_PAD = 16
"""Numbers between the rows of a buffer, so that they do not all fall into the same lines of the cache."""


class _Buffer:
    """Room for scores of changing shape, allocated once."""

    def __init__(self, like: Tensor) -> None:
        self.store = like.new_empty(0)
        self.shape: tuple[int, ...] = ()

    def rows(self, g: int, n: int, m: int) -> Float[Tensor, "g n m"]:
        """`[g, n, m]`, contents undefined."""
        return self._room(g * n * (m + _PAD)).as_strided((g, n, m), (n * (m + _PAD), m + _PAD, 1))

    def shifted(self, g: int, n: int, m: int, step: int, strips: int = 1) -> tuple[Tensor, Tensor]:
        """`[g, n, m]` with row r of a strip shifted by `r * step` to the right, and the whole `[g, strips, rows of each,
        W]`, zero outside the rows."""
        view, whole = self.shifted_over_anything(g, n, m, step, strips)
        if self.shape != (g, n, m, step, strips):
            self.store.zero_()
            self.shape = (g, n, m, step, strips)
        return view, whole

    def shifted_over_anything(self, g: int, n: int, m: int, step: int, strips: int = 1) -> tuple[Tensor, Tensor]:
        """The same with undefined numbers outside the rows. Between strips lies room that makes all rows equally far
        apart, so that they are one operand of a matrix product."""
        each = n // strips
        width = m + (each - 1) * step
        apart = width + step
        store = self._room(g * n * apart)
        whole = store.as_strided((g, strips, each, width), (n * apart, each * apart, width, 1))
        return store.as_strided((g, n, m), (n * apart, apart, 1)), whole

    def _room(self, count: int) -> Tensor:
        if self.store.numel() < count:
            self.store = self.store.new_empty(count)
            self.shape = ()
        return self.store


def _clear_around(whole: Float[Tensor, "n W"], m: int) -> None:
    """Zero what does not belong to the rows of m numbers, of which each begins one to the right of the one before."""
    n, width = whole.shape
    if n > 1:
        whole.as_strided((n - 1, n), (width + 1, 1), whole.storage_offset() + m).zero_()


class _Room:
    """What one thread writes into."""

    def __init__(self, like: Tensor) -> None:
        self.scores = _Buffer(like)
        self.shifted = _Buffer(like)  # kept zero around its rows, so used for nothing else
        self.other = _Buffer(like)
        self.low = _Buffer(like.bfloat16()[:0])
        self.tanh: Tensor | None = None

    def rounded(self, x: Float[Tensor, "g n m"]) -> Float[Tensor, "g n m"]:
        """A bfloat16 copy."""
        return self.low.rows(*x.shape).copy_(x)


class Loop:
    """One call, ready to run."""

    def __init__(self, work: Work) -> None:
        self.work = work
        batch, heads, _, _ = work.q.shape
        self.batch, self.heads, self.keys = batch, heads, work.k.shape[2]
        self.groups = heads // work.k.shape[1]
        self.dtype = torch.promote_types(work.q.dtype, torch.float32)
        self.unit = log_base(self.dtype)
        strips = Strips.serve(work) and Vectors.serve(work)
        self.native = native(work.q) and not (strips and work.terms.of(LineVectors))
        size = (_NATIVE_ROWS, _NATIVE_WIDTH) if self.native else (ROWS, WIDTH)
        self.side: Strips | General = Strips(work, *size) if strips else General(work, PAIRS)
        self.vectors: Vectors | None = None
        if isinstance(self.side, Strips) and work.terms.of(LineVectors):
            self.vectors = Vectors(work, self.side, self.unit)
        low_q = self.side.gather(work.q.detach())
        low_k, low_v = (self._repeated(x.detach()) for x in (work.k, work.v))
        self.q, self.k, self.v = (x.to(self.dtype) for x in (low_q, low_k, low_v))
        self.low_q, self.low_k, self.low_v = (low_q, low_k, low_v) if self.native else (self.q, self.k, self.v)
        softcap = work.terms.one(Softcap)
        self.cap = None if softcap is None else softcap.cap
        sinks = work.terms.one(Sinks)
        self.sink: Tensor | None = None
        if sinks is not None:
            self.sink = (sinks.logits.detach().to(self.dtype) * self.unit).expand(batch, heads).reshape(-1, 1)

    def _repeated(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "BH M D"]:
        return (x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1)).flatten(0, 1)

    def _order(self, prefix_only: bool = False) -> Iterator[tuple[Any, Sequence[Any], slice]]:
        """Blocks with their tiles, and stretches of the heads small enough for the buffers.

        Head by head, so that its keys and values stay in the cache; but where a mask is worked out pair by pair, block
        by block, so that it is worked out once.
        """
        count = self.batch * self.heads
        if isinstance(self.side, General):
            for block in self.side.blocks():
                yield block, list(self.side.tiles(block)), slice(0, count)
            return
        blocks = (block for block in self.side.blocks() if block.step == 0 or not prefix_only)
        planned = [(block, list(self.side.tiles(block))) for block in blocks]
        widest = max((tile.keys.stop - tile.keys.start for _, tiles in planned for tile in tiles), default=1)
        tallest = max((block.rows.stop - block.rows.start for block, _ in planned), default=1)
        at_once = 1 if self.vectors else max(1, PAIRS // (widest * tallest))
        chunks = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
        if any(tile.masked for _, tiles in planned for tile in tiles):
            for block, tiles in planned:
                for chunk in chunks:
                    yield block, tiles, chunk
                for tile in tiles:
                    tile.pairs = None
        else:
            for chunk in chunks:
                for block, tiles in planned:
                    yield block, tiles, chunk

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

    def _scores(self, room: _Room, block: Any, tile: Any, heads: slice, shift: Tensor | None) -> Float[Tensor, "g n m"]:
        """The scores of a tile, in the units of `log_base`, less `shift`."""
        rows, keys = block.rows, tile.keys
        if self.vectors is not None:
            score = self._scores_with_vectors(room, block, tile, heads, shift)
            return self._masked(score, block, tile, heads)
        bias = self.side.bias(block, tile, heads)
        score = room.scores.rows(heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start)
        q, k = self.q[heads, rows], self.k[heads, keys].mT
        if self.cap is None:
            self._begin(score, bias, shift)
            add_product(score, q, k, self.work.scale * self.unit, rounded=self.native)
        else:
            room.tanh = torch.bmm(q, k).mul_(self.work.scale / self.cap).tanh_()
            self._begin(score, bias, shift)
            score.add_(room.tanh, alpha=self.cap * self.unit)
        return self._masked(score, block, tile, heads)

    def _masked(self, score: Tensor, block: Any, tile: Any, heads: slice) -> Tensor:
        if tile.masked:
            if tile.pairs is None:
                assert self.work.mask is not None
                tile.pairs = ~masks.allowed(self.work.mask, block.numbers, tile.keys)
            score.masked_fill_(self._of_heads(tile.pairs, heads), -torch.inf)
        return score

    def _scores_with_vectors(
        self, room: _Room, block: Any, tile: Any, heads: slice, shift: Tensor | None
    ) -> Float[Tensor, "1 n m"]:
        """The same in the layout that vectors want; the whole of it is left in the room."""
        assert isinstance(self.side, Strips)
        assert self.vectors is not None
        rows, keys, head = block.rows, tile.keys, heads.start
        size = rows.stop - rows.start, keys.stop - keys.start
        score, whole = room.scores.shifted_over_anything(1, *size, 1)
        room.whole = whole[:, 0]
        window = None
        if self.side.reversed is not None or tile.low > 0 or tile.high < tile.width:
            window = self.side.window(block, tile, heads)[:, None]
        self._begin(room.whole, window, shift)
        self.vectors.add_queries(room.whole[0], head, block, tile)
        add_product(score, self.q[heads, rows], self.k[heads, keys].mT, self.work.scale * self.unit)
        self.vectors.add_keys(score[0], head, block, tile)
        return score

    @staticmethod
    def _begin(score: Tensor, bias: Tensor | None, shift: Tensor | None) -> None:
        if bias is not None and bias.dim() == 4:  # several strips
            score = score.unflatten(1, bias.shape[1:3])
            shift = None if shift is None else shift.unflatten(1, bias.shape[1:3])
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
        total, shift = self.q.new_zeros(2, *self.q.shape[:2], 1)
        reach = self._reach() if self.native else None
        by_kernel = isinstance(self.side, Strips) and self.vectors is None and flash.serves(self.work)
        room = _Room(self.q)
        for block, tiles, heads in self._order(prefix_only=by_kernel):
            place = heads, block.rows
            for bounded in (True, False) if self.native else (False,):
                scores = None
                if bounded:
                    own = self._bound(block, tiles, heads, reach)
                else:
                    own, scores = self._largest(room, block, tiles, heads)
                if self.sink is not None:
                    own = torch.maximum(own, self.sink[heads, None])
                    total[place] = self._exp(self.sink[heads, None] - own)
                shift[place] = own
                self._add_up(room, block, tiles, heads, own, scores, out[place], total[place])
                if not bounded or float(total[place].amin()) >= _ENOUGH:
                    break
                out[place], total[place] = 0, 0
        blank = total == 0
        lse = torch.where(blank, -torch.inf, shift + total.log() * self.unit)
        out /= total.masked_fill_(blank, 1)
        if by_kernel:
            self._by_kernel(out, lse)
        return self.side.scatter(out).to(self.work.q.dtype), self.side.scatter(lse)[..., 0] / self.unit

    def _by_kernel(self, out: Tensor, lse: Tensor) -> None:
        """All rows behind the prefix by PyTorch's kernel; prefix keys and sinks are merged in by the log-sum-exp."""
        side = flash.strips(self.work)
        prefix, columns = side.query.prefix, side.key.prefix
        flash.attend(side, self.q, self.k, self.v, self.work.scale, out, lse)
        own, sums = out[:, prefix:], lse[:, prefix:]
        if columns:
            score = torch.bmm(self.q[:, prefix:], self.k[:, :columns].mT).mul_(self.work.scale)
            for block in side.blocks():
                if block.step and side.line is not None:
                    column = side.bias(block, Tile(slice(0, columns), masked=False), slice(None))
                    score[:, block.rows.start - prefix : block.rows.stop - prefix] += column
            whole = torch.logaddexp(sums, score.logsumexp(dim=-1, keepdim=True))
            own *= torch.exp(sums - whole)
            own += torch.exp(score - whole) @ self.v[:, :columns]
            sums.copy_(whole)
        if self.sink is not None:
            whole = torch.logaddexp(sums, self.sink[:, None] / self.unit)
            own *= torch.exp(sums - whole)
            sums.copy_(whole)
        sums *= self.unit

    def _add_up(
        self,
        room: _Room,
        block: Any,
        tiles: Sequence[Any],
        heads: slice,
        shift: Tensor,
        scores: Tensor | None,
        out: Tensor,
        total: Tensor,
    ) -> None:
        """Add a block's weights, times the values and alone, to its rows of the output and of the total.

        Args:
            scores: of its only tile, not shifted yet, or None.
        """
        for tile in tiles:
            score = self._scores(room, block, tile, heads, shift) if scores is None else scores.sub_(shift)
            weights = self._exp(score)
            total += weights.sum(dim=-1, keepdim=True)
            kept = self._kept(block, tile)
            if kept is not None:
                weights.mul_(kept)
            used = room.rounded(weights) if self.native else weights
            add_product(out, used, self.low_v[heads, tile.keys])
            if isinstance(self.side, General) and self.side.has_values:
                out += self.side.outputs(tile, weights)
            if self.vectors is not None and self.vectors.of("value"):
                assert room.whole is not None
                _clear_around(room.whole[0], weights.shape[2])
                self.vectors.outputs(room.whole[0], heads.start, block, tile, out[0])

    def _bound(self, block: Any, tiles: Sequence[Any], heads: slice, reach: Tensor | None) -> Tensor:
        """No less than any score of the rows."""
        assert reach is not None
        bound = reach[heads, block.rows]
        if isinstance(self.side, Strips):
            return bound if self.side.highest is None else bound + self.side.highest[heads]
        highest = [tile.bias.amax(dim=-1, keepdim=True) for tile in tiles if tile.bias is not None]
        return bound + torch.stack(highest).amax(dim=0) if highest else bound

    def _largest(
        self, room: _Room, block: Any, tiles: Sequence[Any], heads: slice
    ) -> tuple[Float[Tensor, "g n 1"], Tensor | None]:
        """Each row's largest score, 0 in a row that sees nothing; and the scores, where the block is one tile."""
        n = block.rows.stop - block.rows.start
        peak, score = self.q.new_full((heads.stop - heads.start, n, 1), -torch.inf), None
        for tile in tiles:
            score = self._scores(room, block, tile, heads, None)
            peak = torch.maximum(peak, score.amax(dim=-1, keepdim=True))
        return torch.where(peak == -torch.inf, 0, peak), score if len(tiles) == 1 else None

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
        if self.vectors is not None:
            self.vectors.expect(wanted)
        if isinstance(side, Strips) and line is not None and id(line.values) in wanted:
            assert side.reversed is not None
            d_line = torch.zeros_like(side.reversed)

        room = _Room(self.q)
        for block, tiles, heads in self._order():
            for tile in tiles:
                d = self._backward(room, block, tile, heads, gradient, delta, shift, d_v, d_line)
                if self.native:
                    d = room.rounded(d)
                if d_q is not None:
                    add_product(d_q[heads, block.rows], d, self.low_k[heads, tile.keys], work.scale)
                if d_k is not None:
                    add_product(d_k[heads, tile.keys], d.mT, self.low_q[heads, block.rows], work.scale)
        found: dict[int, Tensor] = {}
        if d_q is not None:
            found[id(work.q)] = side.scatter(d_q)
        for x, d_x in ((work.k, d_k), (work.v, d_v)):
            if d_x is not None:
                found[id(x)] = self._of_keys(d_x, x)
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
            self._of_plain(side.into_q, side.into_k.flatten(0, 1), found, wanted)
        if self.vectors is not None:
            self.vectors.gradients(found)
            self._of_plain(side.scatter(self.vectors.d_q), self.vectors.d_k, found, wanted)
        return found

    def _backward(
        self,
        room: _Room,
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
        weights = self._exp(self._scores(room, block, tile, heads, shift[heads, rows]))
        g, n, m = weights.shape
        step = side.skew(block, tile) if d_line is not None or self.vectors is not None else 0
        d, whole = room.shifted.shifted(g, n, m, step, len(block.strips)) if step else (room.other.rows(g, n, m), None)
        kept = self._kept(block, tile)
        used = weights if kept is None else weights * kept
        if d_v is not None:
            low = (room.rounded(used), upstream.to(torch.bfloat16)) if self.native else (used, upstream)
            add_product(d_v[heads, keys], low[0].mT, low[1])
        if kept is None:
            if self.vectors is not None and self.vectors.of("value"):
                assert room.whole is not None
                assert whole is not None
                _clear_around(room.whole[0], m)
                whole.zero_()
                self.vectors.weights_backward(whole[0, 0], room.whole[0], upstream[0], heads.start, block, tile)
                d.sub_(delta[heads, rows])
            else:
                d.copy_(-delta[heads, rows])
            add_product(d, upstream, self.v[heads, keys].mT, rounded=self.native)
            if isinstance(side, General) and side.has_values:
                d += side.outputs_backward(block, tile, used, upstream)
        else:
            d.zero_()
            add_product(d, upstream, self.v[heads, keys].mT, rounded=self.native)
            if isinstance(side, General) and side.has_values:
                d += side.outputs_backward(block, tile, used, upstream)
            d.mul_(kept).sub_(delta[heads, rows])
        d.mul_(weights)
        if self.vectors is not None:
            whole_d = d if whole is None else whole[:, 0]  # of one row nothing is shifted
            if self.vectors.of("value"):
                _clear_around(whole_d[0], m)
            self.vectors.collect(whole_d[0], d[0], heads.start, block, tile)
        if isinstance(side, General):
            side.collect(block, tile, d)
        elif d_line is not None:
            sums = d.sum(dim=1)[:, None] if whole is None else whole.sum(dim=2)
            side.collect(d_line, block, tile, heads, sums, d)
        if self.cap is not None:
            assert room.tanh is not None
            d.mul_(1 - room.tanh.square())
        return d

    def _of_keys(self, x: Float[Tensor, "BH M D"], like: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G M D"]:
        """The sum over the query heads that share a key head of `like`."""
        return x.unflatten(0, (self.batch, like.shape[1], -1)).sum(dim=2)

    def _of_terms(self, side: General, found: dict[int, Tensor], wanted: set[int]) -> None:
        for x, gradient in zip(pytree.tree_leaves(self.work.terms), pytree.tree_leaves(side.gradients), strict=True):
            if isinstance(x, Tensor) and id(x) in wanted and id(x) not in found:
                found[id(x)] = gradient

    def _of_plain(self, d_q: Tensor, d_k: Tensor, found: dict[int, Tensor], wanted: set[int]) -> None:
        """Add the gradients of the queries and keys that vectors meet."""
        work = self.work
        q, k = (
            content if plain is None else plain for plain, content in ((work.plain_q, work.q), (work.plain_k, work.k))
        )
        for place, gradient in ((q, d_q), (k, self._of_keys(d_k, k))):
            if id(place) in wanted:
                found[id(place)] = found[id(place)] + gradient if id(place) in found else gradient
