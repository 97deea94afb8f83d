"""What the forward and the backward ask of a plan.

A plan cuts a call into blocks and tiles (see `tiles`), knows what position adds to the scores of a tile and to the
output, and carries the gradients of both back. `HankelPlan` is for biases and vectors on regular lines, `DensePlan` for
everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from relpos.engines.operators import Gradients
from relpos.engines.streaming.chunks import Chunk, KeyGradient
from relpos.engines.streaming.tiles import Block, Tile
from relpos.engines.streaming.workspace import Workspace


@runtime_checkable  # for the checks of shapes in tests
class Plan(Protocol):
    """How a call is computed tile by tile.

    Attributes:
        unit: by what scores are multiplied before they are exponentiated; see `planning.log_base`.
        native: whether matrix products are in bfloat16.
        renormalizes: whether the backward divides the weights of a block with a single tile by their own sum, instead
            of relying on the rounded log-sum-exp.
        by_block: the order of the loop: block by block, each for all heads, so that the pairs that a mask forbids in a
            tile are worked out once; or else head by head, so that its keys and values stay in the cache.
        heads_at_once: heads of a chunk at most.
    """

    unit: float
    native: bool
    renormalizes: bool
    by_block: bool
    heads_at_once: int

    def blocks(self) -> Iterable[Block]:
        """All rows with their tiles; where masks differ by head, one block for each head."""

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "g _ 1"] | None:
        """An upper bound of the bias in each row, or None where there is no bias."""

    def start_scores(
        self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Float[Tensor, "g n 1"] | None
    ) -> Float[Tensor, "g n m"]:
        """A buffer to add the content scores to: it holds what position adds, less `shift`."""

    def finish_scores(self, score: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile) -> None:
        """Add what position adds to the content scores afterwards, if anything."""
        return

    def add_values(
        self, out: Float[Tensor, "g n V"], weights: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile
    ) -> None:
        """Add to the output what vectors on the value side give under the weights."""

    def expect(self, gradients: Gradients) -> None:
        """Make the buffers of the gradients that are wanted. Called once, before the methods below."""

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        """A buffer for the gradient of the weights and then of the scores; its contents are undefined."""

    def values_backward(
        self,
        d: Float[Tensor, "g n m"],
        weights: Float[Tensor, "g n m"],
        upstream: Float[Tensor, "g n V"],
        chunk: Chunk,
        tile: Tile,
    ) -> None:
        """The backward of `add_values`: adds to `d`, the gradient of the weights, and to that of the vectors."""

    def collect(
        self, d: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile, d_q: Float[Tensor, "g n D"], d_k: KeyGradient | None
    ) -> None:
        """Add what the gradient of the scores gives the terms, and through their vectors the queries and keys."""

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call, where `collect` has not done so."""
        return
