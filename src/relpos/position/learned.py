"""Learned absolute positions: one learned vector per position, added to the tokens before the first layer.

    x[n] = x[n] + pos_embed[n]

Parameter `pos_embed`, `[1, prefix + positions, E]`, as timm's ViT has it; the prefix tokens have vectors of their own,
first.
Source: Gehring et al. 2017 (sequences); Dosovitskiy et al. 2021, section 3.1 and appendix D.4 (grids, and that fixing a
raster order costs nothing). Another grid needs `resize`: bicubic with antialiasing in float32, as timm's
`resample_abs_pos_embed`; a sequence is interpolated linearly, or extended: the vectors are repeated after the last one
(Beltagy et al. 2020, Longformer, section 5), so that the trained positions keep theirs.

Not to be confused with sinusoidal positions, which are added at the same point and have no parameters.
"""

from __future__ import annotations

import copy
import math
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Grid, Positions, Sequence, lookup, require_coordinates
from relpos.core.checks import fail, require_int, shape_of
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table
from relpos.position.base.tokens import add_to_tokens


class LearnedPositionEmbedding(Mechanism):
    """One learned vector per position.

    `x[n] + pos_embed[n]`, before the first layer: call `embed(x, coordinates)`. It adds nothing in attention.

    Source: Gehring et al. 2017; Dosovitskiy et al. 2021, section 3.1.

    Args:
        embed_dim: width of a token, E.
        seq_len: positions of a sequence; or
        grid_size: positions of a grid, `(rows, columns)` or more axes.
        prefix: tokens before them, each with a vector of its own.
        init_std: standard deviation of the truncated normal it starts from; 0 for zeros.

    Attributes:
        pos_embed: `[1, prefix + positions, E]`.

    Raises:
        ValueError: both or neither of `seq_len` and `grid_size`; in `embed`, another grid, or a position beyond the
            last.

    Examples:
        >>> learned = relpos.LearnedPositionEmbedding(embed_dim=32, grid_size=(4, 4), prefix=1)
        >>> x = torch.randn(2, 17, 32)
        >>> learned.embed(x, relpos.Grid(4, 4, prefix=1)).shape  # added to tokens, before the first layer
        torch.Size([2, 17, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        seq_len: int | None = None,
        grid_size: tuple[int, ...] | None = None,
        prefix: int = 0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        require_int(embed_dim, "embed_dim", at_least=1)
        require_int(prefix, "prefix", at_least=0)
        if (seq_len is None) == (grid_size is None):
            fail("either seq_len or grid_size", f"{seq_len} and {grid_size}", "Give the one that fits the tokens.")
        require_std(init_std)
        if grid_size is None:
            require_int(seq_len, "seq_len", at_least=1)
        elif not isinstance(grid_size, tuple | list):
            fail("grid_size to be (rows, columns) or more axes", shape_of(grid_size), "Pass a tuple of integers.")
        self.sizes = (Sequence(seq_len or 0).length,) if grid_size is None else tuple(Grid(*grid_size).sizes)
        self.is_grid = grid_size is not None
        self.embed_dim, self.prefix, self.init_std = embed_dim, prefix, init_std
        self.pos_embed = nn.Parameter(torch.empty(1, prefix + math.prod(self.sizes), embed_dim))
        start_table(self.pos_embed, init_std)

    @property
    def seq_len(self) -> int | None:
        """Positions of a sequence; None if it is built for a grid."""
        return None if self.is_grid else self.sizes[0]

    @property
    def grid_size(self) -> tuple[int, ...] | None:
        """Cells along each axis; None if it is built for a sequence."""
        return self.sizes if self.is_grid else None

    @classmethod
    def from_site(cls, site: Site) -> Self:
        match site.queries:
            case Grid(sizes=sizes, prefix=prefix):
                return cls(site.embed_dim, grid_size=sizes, prefix=prefix, init_std=site.init_std)
            case Sequence(length=length, start=start, prefix=prefix):
                return cls(site.embed_dim, seq_len=length + start, prefix=prefix, init_std=site.init_std)
            case _:
                fail("a Sequence or Grid for learned positions", repr(site.queries), "Build it with seq_len=.")

    @property
    def growth(self) -> tuple[str, ...]:
        """Interpolated; a sequence can also be repeated, which would break a grid's rows and columns."""
        return ("interpolated",) if self.is_grid else ("interpolated", "repeated")

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        """Tokens with the vector of their position added.

        Raises:
            ValueError: a grid unlike the one built for, a position beyond the last, another prefix.
        """
        require_coordinates(coordinates, "coordinates")
        if coordinates.prefix != self.prefix:
            fail(f"coordinates with a prefix of {self.prefix}", repr(coordinates), "Build it with prefix=.")
        return add_to_tokens(x, self.vectors(coordinates), coordinates)

    def vectors(self, coordinates: Coordinates) -> Float[Tensor, "_ N E"]:
        """The vectors of the prefix it was built with, then of every token's position."""
        if self.is_grid and isinstance(coordinates, Grid):
            if coordinates.sizes != self.sizes:
                fail(f"a grid of {self.sizes}", str(coordinates.sizes), "Resize it first: mechanism.resize(sizes).")
            return self.pos_embed
        raster = coordinates.raster()
        low, high = raster.low[0], raster.high[0]
        if self.is_grid or low < 0 or high >= self.sizes[0]:
            built = f"a grid of {self.sizes}" if self.is_grid else f"positions 0 to {self.sizes[0] - 1}"
            came = repr(coordinates) if self.is_grid else f"positions {low} to {high}"
            declared = isinstance(raster, Positions) and not self.is_grid  # which may be more than what occurs
            remedy = "Narrow low and high to the range that occurs, or resize it" if declared else "Resize it first"
            fail(built, came, f"{remedy}: mechanism.resize(size).")
        prefix, rest = self.pos_embed[:, : self.prefix], self.pos_embed[:, self.prefix :]
        if isinstance(raster, Positions):
            if raster.values.is_floating_point():
                fail(
                    "integer coordinates",
                    repr(raster),
                    "Learned vectors exist at integers only: number the tokens.",
                )
            tokens = raster.tokens(self.device)[..., 0].long()
            chosen = lookup(rest[0], tokens if tokens.dim() == 2 else tokens[None])
            return torch.cat([prefix.expand(chosen.shape[0], -1, -1), chosen], dim=1)
        return torch.cat([prefix, rest[:, low : low + raster.length]], dim=1)  # of a Sequence, which may be empty

    def resize(self, size: int | tuple[int, ...]) -> LearnedPositionEmbedding:
        """A copy for another grid (bicubic, antialiased) or sequence length (linear); prefix vectors are kept.

        Raises:
            ValueError: another number of axes, or more than two.
        """
        several = isinstance(size, tuple | list)
        sizes = tuple(size) if isinstance(size, tuple | list) else (size,)
        if len(sizes) != len(self.sizes) or self.is_grid != several:
            wanted = self.sizes if self.is_grid else self.sizes[0]
            fail(f"a size like {wanted}", shape_of(size), "Keep the number of axes.")
        if len(sizes) > 2:
            fail("at most two axes to resize", shape_of(size), "Interpolate pos_embed yourself and load it.")
        for one in sizes:
            require_int(one, "each new size", at_least=1)
        resized = copy.deepcopy(self)
        prefix, rest = self.pos_embed.detach().split([self.prefix, math.prod(self.sizes)], dim=1)
        image = rest.float().unflatten(1, self.sizes).movedim(-1, 1)
        if self.is_grid and len(sizes) == 2:
            image = F.interpolate(image, size=sizes, mode="bicubic", antialias=True)
        else:
            image = F.interpolate(image, size=sizes, mode="linear")
        rest = image.flatten(2).mT.to(rest.dtype)
        resized.sizes = sizes
        resized.pos_embed = nn.Parameter(torch.cat([prefix, rest], dim=1), self.pos_embed.requires_grad)
        return resized

    def extend(self, length: int) -> LearnedPositionEmbedding:
        """A copy for a longer sequence: position n has the vector of position n modulo the trained length.

        Raises:
            ValueError: built for a grid.
        """
        require_int(length, "length", at_least=1)
        if self.is_grid:
            fail("learned positions of a sequence", f"a grid of {self.sizes}", "Use resize(grid_size).")
        extended = copy.deepcopy(self)
        extended.sizes = (max(length, self.sizes[0]),)
        prefix, rest = self.pos_embed.detach().split([self.prefix, self.sizes[0]], dim=1)
        rows = torch.arange(extended.sizes[0], device=rest.device) % self.sizes[0]
        extended.pos_embed = nn.Parameter(torch.cat([prefix, rest[:, rows]], dim=1), self.pos_embed.requires_grad)
        return extended

    def grow(self, queries: Coordinates, rule: str) -> LearnedPositionEmbedding:
        if rule == "repeated" and rule in self.growth:
            return self.extend(queries.raster().high[0] + 1)
        if rule != "interpolated":
            super().grow(queries, rule)  # raises unless this one serves as it is
            return self
        if isinstance(queries, Grid) and self.is_grid:
            return self.resize(queries.sizes)
        return self.resize(queries.raster().high[0] + 1)


PRESETS = [
    Preset(
        name="learned",
        title="Learned absolute",
        build=LearnedPositionEmbedding.from_site,
        summary="One learned vector per position is added to its token before the first layer. It is accurate where "
        "training put things; an untrained position has no useful vector, and a new size needs "
        "resampling.",
        source="Dosovitskiy et al. 2021, section 3.1",
        token_axes=(1, 2),
        family="absolute",
        aliases=("absolute", "abs"),
    )
]
