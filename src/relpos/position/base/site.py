"""What a model tells a mechanism that is built for it."""

from __future__ import annotations

from dataclasses import dataclass

from relpos.core import Coordinates, require_coordinates
from relpos.core.checks import require_flag, require_int
from relpos.position.base.tables import require_std


@dataclass(frozen=True)
class Site:
    """What a model tells a mechanism that is built for it: heads, widths, tokens.

    Attributes:
        num_heads: query heads.
        head_dim: width of a head, D.
        embed_dim: width of a token, E.
        queries: coordinates of the query tokens.
        keys: coordinates of the key tokens, None if they are the same.
        causal: whether a query sees only what comes before it.
        init_std: standard deviation that learned tables start from.
        trainable: False for frozen parameters; `Preset.make` freezes them.
        layer: number of the layer, from 0; None where one mechanism serves several layers.

    Raises:
        ValueError: an argument of another kind or out of its range.

    Examples:
        >>> site = relpos.Site(num_heads=4, head_dim=16, embed_dim=64, queries=relpos.Grid(7, 7))
        >>> relpos.RelativePositionBias.from_site(site)
        RelativePositionBias(num_heads=4, window_size=(7, 7))
    """

    num_heads: int
    head_dim: int
    embed_dim: int
    queries: Coordinates
    keys: Coordinates | None = None
    causal: bool = False
    init_std: float = 0.02
    trainable: bool = True
    layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "embed_dim"):
            require_int(getattr(self, name), f"Site {name}", at_least=1)
        require_coordinates(self.queries, "Site queries")
        if self.keys is not None:
            require_coordinates(self.keys, "Site keys")
        require_std(self.init_std)
        require_flag(self.causal, "Site causal")
        require_flag(self.trainable, "Site trainable")
        if self.layer is not None:
            require_int(self.layer, "Site layer", at_least=0)
