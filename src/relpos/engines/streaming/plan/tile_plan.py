"""The interface of a plan, which the forward and the backward use.

A plan cuts a call into blocks and tiles (see `tiles`). It adds the terms' part to the scores and to the output, and
computes the terms' gradients. `HankelPlan` is for biases and vectors on regular lines, `DensePlan` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from relpos.engines.operators import Gradients
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient
from relpos.engines.streaming.plan.tiles import Block, Tile
from relpos.engines.streaming.workspace import Workspace


@runtime_checkable  # for the checks of shapes in tests
class TilePlan(Protocol):
    """How a call is computed tile by tile.

    Attributes:
        unit: the factor on scores before they are exponentiated; see `planning.log_base`.
        bfloat16: whether matrix products are in bfloat16.
        renormalizes: whether the backward divides the weights of a block with one tile by their own sum.
        by_block: the order of chunks. True: block by block, so that the pairs that a mask forbids in a tile are
            computed once for all heads. False: head by head, so that a head's keys and values stay in the cache.
        share_count: the maximum number of shares of the heads.
    """

    unit: float
    bfloat16: bool
    renormalizes: bool
    by_block: bool
    share_count: int

    def shares(self, count: int) -> Sequence[TilePlan]:
        """This plan for about equal shares of the heads, for parallel threads. The backward calls `expect` first."""

    def head_slices(self) -> list[slice]:
        """The heads of each chunk among the B * H heads, in order."""

    def passes(self) -> Iterable[tuple[Iterable[slice], Iterable[Block]]]:
        """If `by_block` is False: for each pass, heads and the blocks that each of them goes through.

        There is one pass if gradients are rounded as soon as a head is done (see `KeyGradient`).
        """
        return [(self.head_slices(), self.blocks())]

    def blocks(self) -> Iterable[Block]:
        """All blocks with their tiles; if the tiles differ by head, one block for each head."""

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "g _ 1"] | None:
        """An upper bound of the bias in each row, or None where there is no bias."""

    def start_scores(
        self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Float[Tensor, "g n 1"] | None
    ) -> Float[Tensor, "g n m"]:
        """A buffer with the terms' scores minus `shift`, to which the content scores are added."""

    def finish_scores(self, score: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the terms' scores that `start_scores` leaves out, if any."""
        return

    def is_bare(self, block: Block, tile: Tile) -> bool:
        """Whether nothing is added to the scores of a tile, and no pair in it is forbidden."""
        return False

    def add_values(
        self, out: Float[Tensor, "g n V"], weights: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile
    ) -> None:
        """Add the weighted sum of the vectors on the value side to the output."""

    def expect(self, gradients: Gradients) -> None:
        """Allocate the gradients of the terms that are wanted. Called once, before the methods below."""

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        """A buffer for the gradient of the weights, then of the scores; its contents are undefined."""

    def values_backward(
        self,
        d: Float[Tensor, "g n m"],
        weights: Float[Tensor, "g n m"],
        upstream: Float[Tensor, "g n V"],
        chunk: Chunk,
        tile: Tile,
    ) -> None:
        """The backward of `add_values`: add to `d`, the gradient of the weights, and to the gradient of the vectors."""

    def collect(
        self, d: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile, d_q: Float[Tensor, "g n D"], d_k: KeyGradient | None
    ) -> None:
        """Add to the gradients of the terms and, through vectors, of queries and keys.

        `d` is the gradient of the scores.
        """

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call, unless `collect` has done so."""
        return
