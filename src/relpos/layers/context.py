"""What attention layers need where their tokens are a share: `relpos.parallel.context_parallel` sets it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Shaped
from torch import Tensor

from relpos.core import Coordinates, MaskLike, Term, Terms
from relpos.position import Mechanism


@runtime_checkable
class SharedSequence(Protocol):
    """A sequence that ranks share."""

    @property
    def size(self) -> int:
        """The number of ranks: all tokens are so many times this rank's."""
        ...

    def share(self, x: Shaped[Tensor, "B N ..."]) -> Shaped[Tensor, "B n ..."]:
        """This rank's tokens of all."""
        ...

    def whole(self, x: Shaped[Tensor, "B n ..."], dim: int = 1) -> Shaped[Tensor, "B N ..."]:
        """All tokens, from each rank's, along an axis."""
        ...

    def attend(
        self,
        heads: tuple[Float[Tensor, "B H n D"], Float[Tensor, "B G n D"], Float[Tensor, "B G n V"]],
        *,
        position: Mechanism | None,
        terms: Terms | Term | None,
        coordinates: Coordinates | None,
        mask: MaskLike | None,
        scale: float | None,
        states: Float[Tensor, "B n E"],
    ) -> Float[Tensor, "B H n V"]:
        """Attention of this rank's queries, keys and values; position, coordinates and mask are those of all tokens."""
        ...
