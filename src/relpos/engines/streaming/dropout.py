"""The pairs that dropout keeps, tile by tile.

Each pair's 32-bit random word is mixed from its indices (see `core.random`). These dozen operations are cheaper than a
generator's draw if the words stay in the cache, so a tile is computed in pieces.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.random import head_words, is_kept, mix_
from relpos.engines.call import Call
from relpos.engines.streaming.plan.chunks import Chunk
from relpos.engines.streaming.plan.tiles import Tile
from relpos.engines.streaming.workspace import Workspace

_PIECE = 2**16
"""Maximum pairs whose words are mixed at once."""


class DropoutFactors:
    """The dropout factors of a call: 0 for a dropped pair, 1 / (1 - dropout) for a kept one."""

    def __init__(self, call: Call, seed: Tensor, workspace: Workspace) -> None:
        (batch, heads, n, _), keys, device = call.q.shape, call.k.shape[2], call.q.device
        self.workspace, self.dropout = workspace, call.dropout
        if call.tokens is None:
            rows, columns = (
                torch.arange(n, device=device)[None] + call.first_row,
                torch.arange(keys, device=device)[None],
            )
        else:
            rows = columns = call.tokens
        self.rows, self.columns = rows.to(torch.int32), columns.to(torch.int32)
        parts = len(rows)
        words = head_words(seed, batch // parts, heads)
        self.words = words[:, None].expand(-1, parts, -1).flatten()
        self.part = torch.arange(parts, device=device)[None, :, None].expand(batch // parts, -1, heads).flatten()
        self.piece, self.spare = torch.empty(2, max(_PIECE, keys), dtype=torch.int32, device=device)

    def factors(self, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        """The factors of a tile, in a buffer that the next tile overwrites."""
        g, n, m = *chunk.q.shape[:2], tile.count
        factors = self.workspace.kept.rows(g, n, m)
        flat, part = factors.flatten(0, 1), self.part[chunk.head_slice]
        words = mix_(self.words[chunk.head_slice, None] ^ self.rows[:, chunk.block.queries][part]).flatten()
        columns = self.columns[:, tile.keys]
        part_of_row = part.repeat_interleave(n) if len(columns) > 1 else None
        step = max(1, _PIECE // max(1, m))
        for start in range(0, g * n, step):
            own = words[start : start + step, None]
            theirs = columns if part_of_row is None else columns[part_of_row[start : start + step]]
            piece, spare = (x[: len(own) * m].view(-1, m) for x in (self.piece, self.spare))
            torch.bitwise_xor(own, theirs, out=piece)
            is_kept(mix_(piece, spare), self.dropout, out=flat[start : start + step])
        return factors.mul_(1 / (1 - self.dropout))
