"""What the forward and the backward ask of a plan, and which plan a call gets.

A plan cuts a call into blocks and tiles (see `tiles`), knows what position adds to the scores of a tile and to the
output, and carries the gradients of both back. `HankelPlan` is for biases and vectors on regular lines, `DensePlan` for
everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming import matmul
from relpos.engines.streaming.chunks import Chunk, KeyGradient
from relpos.engines.streaming.dense_plan import DensePlan
from relpos.engines.streaming.hankel import HankelPlan
from relpos.engines.streaming.tiles import Block, Tile
from relpos.engines.streaming.workspace import Workspace

ROWS, WIDTH = 256, 8192
"""Rows and keys of a tile at most."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""The same in bfloat16, whose products are so fast that what surrounds each is spread over more rows."""
PAIRS = 2**18
"""Scores of several heads that are held at once, in a buffer, where one head has fewer."""


@runtime_checkable  # for the checks of shapes in tests
class Plan(Protocol):
    """How a call is computed tile by tile.

    Attributes:
        unit: by what scores are multiplied; see `log_base`.
        native: whether matrix products are in bfloat16.
        sums_again: whether the backward sums the weights of a tile that holds its rows whole, instead of trusting the
            log-sum-exp.
        by_block: whether one block after another is computed, for all heads, and not one head after another: where
            single pairs of a tile are forbidden, they are then computed once.
        heads_at_once: heads of a chunk at most.
    """

    unit: float
    native: bool
    sums_again: bool
    by_block: bool
    heads_at_once: int

    def blocks(self) -> Iterable[Block]:
        """All rows once with their tiles, or once for each head."""

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "g _ 1"] | None:
        """No less than any bias of a row; None for 0."""

    def start_scores(
        self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Float[Tensor, "g n 1"] | None
    ) -> Float[Tensor, "g n m"]:
        """A buffer to add the content scores to: it holds what position adds, less `shift`."""

    def finish_scores(self, score: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile) -> None:
        """Add what position adds to the content scores afterwards."""

    def add_values(
        self, out: Float[Tensor, "g n V"], weights: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile
    ) -> None:
        """Add to the output what vectors on the value side give under the weights."""

    def expect(self, gradients: Gradients) -> None:
        """Make the buffers of the gradients that are wanted. Called once, before the methods below."""

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        """A buffer for the gradient of the weights and then of the scores, contents undefined."""

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
        """Add the gradients of the terms to those of the call."""


def log_base(dtype: torch.dtype) -> float:
    """By what scores are multiplied before they are exponentiated: log2(e) for exp2, and in float64 1 for exp.

    On CPU, exp is several times slower than exp2 and, where it underflows, a hundred times. In float64 that one more
    rounding would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


def make_plan(call: Call) -> Plan:
    """The plan of a call."""
    unit, native = log_base(call.q.dtype), matmul.native(call.q)
    if not HankelPlan.supports(call):
        return DensePlan(call, PAIRS, unit=unit, native=native)
    native = native and not call.terms.of(LineVectors)
    rows, width = (_NATIVE_ROWS, _NATIVE_WIDTH) if native else (ROWS, WIDTH)
    return HankelPlan(call, rows, width, PAIRS, unit=unit, native=native)
