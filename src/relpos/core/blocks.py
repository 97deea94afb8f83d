"""Which blocks of queries may see which blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from relpos.core.checks import fail, require_int, require_tensor, shape_of
from relpos.core.tree import Movable, register, static


@register("relpos.core.mask.Blocks")
@dataclass(frozen=True, eq=False)
class Blocks(Movable):
    """A block layout: query block `i // size` may see key block `j // size` where `layout` is True.

    Attributes:
        layout: `Bool[1 or H, query blocks, key blocks]`.
        size: the number of queries, and of keys, in a block.

    Raises:
        ValueError: no boolean layout of 3 dimensions; in attention, another number of blocks than the tokens need.

    Examples:
        >>> layout = torch.eye(3, dtype=torch.bool)[None]  # each block of 2 tokens sees itself
        >>> relpos.Mask(blocks=relpos.Blocks(layout, size=2)).dense(6, 6)[0, 0].int()
        tensor([[1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [0, 0, 1, 1, 0, 0],
                [0, 0, 1, 1, 0, 0],
                [0, 0, 0, 0, 1, 1],
                [0, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """

    layout: Bool[Tensor, "H n m"]
    size: int = static()

    def __post_init__(self) -> None:
        require_tensor(self.layout, "Blocks layout", dims=3)
        if self.layout.dtype != torch.bool:
            fail("a boolean Blocks layout, True where blocks may attend", shape_of(self.layout), "Pass layout.bool().")
        require_int(self.size, "Blocks size", at_least=1)

    def check(self, queries: int, keys: int) -> None:
        """Raise ValueError unless the layout fits these numbers of queries and keys."""
        rows, columns = -(-queries // self.size), -(-keys // self.size)
        if tuple(self.layout.shape[1:]) != (rows, columns):
            wanted = f"a block layout of {rows} x {columns} blocks of {self.size} for {queries} queries and {keys} keys"
            fail(wanted, shape_of(self.layout), "Round the number of blocks up.")

    def narrow(self, queries: slice, keys: slice) -> Blocks:
        """The layout of some consecutive queries and keys, both of which begin at the border of a block."""
        cuts = []
        for name, part in (("queries", queries), ("keys", keys)):
            start = part.start or 0
            if start < 0 or start % self.size or (part.stop is not None and part.stop < 0):
                wanted = f"{name} that start at a multiple of {self.size}, the block size"
                fail(wanted, str(part), "Cut there.")
            cuts.append(slice(start // self.size, None if part.stop is None else -(-part.stop // self.size)))
        return replace(self, layout=self.layout[:, cuts[0], cuts[1]])
