"""Keys and values of tokens already seen, so that the next token costs one row of attention and not all of them.

Keys are kept as they were projected, before any rotation: every mechanism, whatever it does to keys, then finds in the
cache what the full pass would have, and a base that changes with the length applies to old and new keys alike. Grouped
heads are kept grouped, which makes the cache as many times smaller as heads share a key.

Not to be confused with caches of rotated keys (Hugging Face): those skip a rotation a step, and bind a key to the base
it was written with.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.checks import fail, require_int, require_tensor, shape_of


class LayerCache:
    """Keys and values of one layer, `[B, G, length, D]` each; None while there are none."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)

    def extend(
        self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"]
    ) -> tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
        """Append the keys and values of new tokens; returns those of all tokens so far.

        Raises:
            ValueError: another batch, number of heads, width, dtype or device than those it holds.
        """
        for name, x, held in (("keys", k, self.keys), ("values", v, self.values)):
            require_tensor(x, f"{name} for the cache", dims=4)
            if held is not None and not _alike(x, held):
                wanted = f"{name} for the cache like those it holds, {shape_of(held)} on {held.device}"
                fail(wanted, f"{shape_of(x)} on {x.device}", "Start a new KeyValueCache for another batch.")
        if k.shape[2] != v.shape[2]:
            came = f"{k.shape[2]} and {v.shape[2]}"
            fail("as many keys as values for the cache", came, "Both come of the same tokens.")
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return k, v


def _alike(x: Tensor, held: Tensor) -> bool:
    """Whether new tokens differ from those before them in nothing but their number."""
    same_shape = x.shape[:2] == held.shape[:2] and x.shape[3] == held.shape[3]
    return same_shape and x.dtype == held.dtype and x.device == held.device


class KeyValueCache:
    """The caches of all layers of a model: `model(tokens, cache=cache)` reads and fills it.

    Args:
        depth: layers of the model.
    """

    def __init__(self, depth: int) -> None:
        require_int(depth, "depth", at_least=1)
        self.layers = tuple(LayerCache() for _ in range(depth))

    def __repr__(self) -> str:
        return f"KeyValueCache({len(self.layers)}), length {self.length}"

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return self.layers[-1].length

    @property
    def bytes(self) -> int:
        """Memory it takes, in all layers."""
        return sum(layer.bytes for layer in self.layers)
