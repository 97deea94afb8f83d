"""What absolute mechanisms do: add position vectors to tokens."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates
from relpos.core.checks import broadcasts, fail, is_dense, require_device, shape_of


def add_to_tokens(
    x: Float[Tensor, "B N E"], vectors: Float[Tensor, "_ N E"], coordinates: Coordinates
) -> Float[Tensor, "B N E"]:
    """Tokens plus one vector each, `[1 or B, N, E]`, in the tokens' dtype.

    Raises:
        ValueError: tokens of another shape, or coordinates for another batch.
    """
    wanted = tuple(vectors.shape[1:])
    tokens = isinstance(x, Tensor) and is_dense(x) and x.is_floating_point() and x.dim() == 3
    if not tokens or tuple(x.shape[1:]) != wanted:
        shape = f"floating-point tokens of shape [B, {wanted[0]}, {wanted[1]}]"
        fail(shape, shape_of(x), "Coordinates include the prefix.")
    require_device(x, "tokens", vectors.device, "Move the tokens or the mechanism with .to(device).")
    if not broadcasts(vectors.shape[0], x.shape[0]):
        fail(f"coordinates for a batch of {x.shape[0]}", repr(coordinates), "Give one row, or one per element.")
    return x + vectors.to(x.dtype)
