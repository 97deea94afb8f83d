"""The forward by PyTorch's flash kernel where vectors meet a content of their own: products of some rows are its mask.

The products of a block's content with the vectors of its window are written into a skewed buffer (see `workspace`), and
the kernel reads the tile in it as its mask, by strides. Keys that no row of the block meets with vectors have a tile
of their own, without a mask; the softmax of a row is then put together from its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.streaming.cpu import partial_softmax
from relpos.engines.streaming.forward import Forward
from relpos.engines.streaming.plan.chunks import Chunk
from relpos.engines.streaming.plan.hankel import HankelPlan


class ByProducts(Forward):
    """Computes the output of a call by a plan in base e; sinks are left to the caller."""

    def _write_chunks(self, out: Float[Tensor, "B H N V"], lse: Float[Tensor, "B H N"]) -> None:
        flat_out, flat_lse = out.flatten(0, 1), lse.flatten(0, 1)[..., None]
        assert isinstance(self.plan, HankelPlan)
        forbidding = partial_softmax.forbids(self.plan.reversed_values)
        for chunk in self.scores.chunks():
            parts = list(self._parts(chunk, self.plan, forbidding))
            chunk_out, total = parts[0]
            if len(parts) > 1:
                total = torch.stack([part for _, part in parts]).logsumexp(dim=0)
                chunk_out = torch.stack([each * partial_softmax.share(part, total) for each, part in parts]).sum(dim=0)
            chunk.put(flat_lse, total)
            chunk.put(flat_out, chunk_out)

    def _parts(
        self, chunk: Chunk, plan: HankelPlan, forbidding: bool
    ) -> Iterator[tuple[Float[Tensor, "g n V"], Float[Tensor, "g n 1"]]]:
        """Output and log-sum-exp of each tile. Under a mask, some row may see none of its keys."""
        scale, n = self.call.scale, chunk.block.count
        for tile in chunk.block.tiles:
            if plan.near.has(chunk.block, tile):
                mask: Tensor | None = plan.start_scores(self.scores.workspace, chunk, tile, None)
            else:
                mask = plan.bias(chunk.block, tile, chunk.head_slice)
            mask = None if mask is None else mask[None]
            blank = tile.is_masked_by_window and (tile.allowed_start >= tile.count or tile.allowed_stop < n)
            k, v = (x[None, :, tile.keys] for x in (chunk.heads.k, chunk.heads.v))
            out, lse = partial_softmax.attend(chunk.q[None], k, v, mask, scale, forbidding=forbidding or blank)
            yield out[0], lse[0]
