"""What attention layers need where their tokens are a share: `relpos.parallel.context_parallel` sets it."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, MaskLike, Term, Terms
from relpos.position import Mechanism


class SharedSequence(Protocol):
    """A sequence that ranks share."""

    def share(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B n E"]:
        """This rank's tokens of all."""
        ...

    def whole(self, x: Float[Tensor, "B n E"]) -> Float[Tensor, "B N E"]:
        """All tokens, from each rank's."""
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
