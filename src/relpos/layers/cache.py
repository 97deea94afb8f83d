"""A key/value cache for decoding: a new token costs one row of attention.

Keys are stored before any rotation. Every mechanism therefore sees the same keys as in a full pass, and a rotary base
that depends on the length applies to old and new keys. Grouped heads are stored once per group.

Not to be confused with caches of rotated keys (Hugging Face), which save the rotation of old keys but fix its base.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.checks import fail, require_int, require_tensor, shape_of
from relpos.core.private import any_size


class LayerCache:
    """The keys and values of one layer, `[B, G, length, D]` each, or None if it is empty; and `remembered`, what the
    keys' hidden states contribute to a mechanism that is made from states, `[B, H, length, r]`, if there is one."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.remembered: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """The size of all that it holds in bytes."""
        return sum(x.numel() * x.element_size() for x in self._held() if x is not None)

    def expect_growth(self) -> None:
        """Let `torch.compile` make one graph for every length, instead of one for this length before it."""
        for x in self._held():
            if x is not None:
                any_size(x, 2)

    def _held(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.keys, self.values, self.remembered

    def all_remembered(self, new: Float[Tensor, "B H N r"]) -> Float[Tensor, "B H M r"]:
        """What the keys that it holds and new ones contribute. Nothing is appended."""
        if self.keys is None:
            return new
        if self.remembered is None or _kind(new) != _kind(self.remembered):
            held = "nothing" if self.remembered is None else f"{shape_of(self.remembered)} on {self.remembered.device}"
            wanted = f"remembered= like that in the cache, {held}"
            fail(wanted, f"{shape_of(new)} on {new.device}", "Start a new KeyValueCache for another position.")
        return torch.cat([self.remembered, new], dim=2)

    def extend(
        self,
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N D"],
        remembered: Float[Tensor, "B H N r"] | None = None,
    ) -> tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
        """Append the keys and values of new tokens, and return those of all tokens.

        Args:
            k, v: of the new tokens.
            remembered: what these keys contribute to a mechanism that is made from hidden states, `remembered(states)`.

        Raises:
            ValueError: batch, number of heads, width, dtype or device differ from those of the cache.
        """
        for name, x, cached in (("keys", k, self.keys), ("values", v, self.values)):
            require_tensor(x, f"{name} for the cache", dims=4)
            if cached is not None and _kind(x) != _kind(cached):
                wanted = f"{name} like those in the cache, {shape_of(cached)} on {cached.device}"
                fail(wanted, f"{shape_of(x)} on {x.device}", "Start a new KeyValueCache for another batch.")
        if remembered is not None:
            remembered = self.all_remembered(remembered)
        elif self.remembered is not None:
            fail("remembered= with the keys, as before", "none", "Pass remembered=, or start a new cache.")
        if k.shape[2] != v.shape[2]:
            came = f"{k.shape[2]} and {v.shape[2]}"
            fail("as many keys as values for the cache", came, "Both come from the same tokens.")
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        # Views of a projection would keep all of it, and a compiler would meet other strides at the next token.
        self.keys, self.values = k.contiguous(), v.contiguous()
        self.remembered = None if remembered is None else remembered.contiguous()
        return self.keys, self.values

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._change(lambda x: x[:, :, :length])

    def reorder(self, rows: Int[Tensor, " C"]) -> None:
        """Keep these rows of the batch, in this order."""
        self._change(lambda x: x.index_select(0, rows.to(x.device)))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values, self.remembered = (None if x is None else change(x) for x in self._held())


def _kind(x: Tensor) -> tuple[object, ...]:
    """All that keys or values of other tokens must have in common with `x`."""
    return x.shape[:2], x.shape[3], x.dtype, x.device


class KeyValueCache:
    """The caches of all layers of a model, for `model(tokens, cache=cache)` or a model of your own.

    `layers[i].extend(k, v)` appends the keys and values of layer i and returns those of all tokens. Keys go in as they
    are, not rotated: `attention` rotates them, by the coordinates of all tokens in `keys=`.

    Args:
        depth: the number of layers.

    Raises:
        ValueError: a depth below 1; in `extend`, another batch, width, dtype or device.

    Examples:
        >>> model = relpos.LanguageModel(vocab_size=16, embed_dim=32, depth=2, num_heads=2).eval()
        >>> cache = relpos.KeyValueCache(depth=2)
        >>> tokens = torch.randint(0, 16, (1, 6))
        >>> first, then = model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)
        >>> cache.length, torch.allclose(then[:, 0], model(tokens)[:, 5], atol=1e-5)
        (6, True)
    """

    def __init__(self, depth: int) -> None:
        require_int(depth, "depth", at_least=1)
        self.layers = tuple(LayerCache() for _ in range(depth))

    def __repr__(self) -> str:
        return f"KeyValueCache({len(self.layers)}), length {self.length}"

    @property
    def length(self) -> int:
        """The number of tokens that every layer has: those of the last one, which is extended last."""
        return self.layers[-1].length

    @property
    def bytes(self) -> int:
        """The size of all layers in bytes."""
        return sum(layer.bytes for layer in self.layers)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens in all layers, as where a draft is rejected.

        Raises:
            ValueError: a length that is below 0 or above that of the cache.
        """
        require_int(length, "length", at_least=0)
        if length > self.length:
            fail(f"length of at most {self.length}, the tokens of the cache", str(length), "It cannot grow so.")
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, rows: Int[Tensor, " C"]) -> None:
        """Keep these rows of the batch in all layers, in this order; a row may come several times (beams).

        Raises:
            ValueError: no integers of one dimension.
        """
        require_tensor(rows, "rows", dims=1)
        if rows.is_floating_point() or rows.dtype == torch.bool:
            fail("rows as integers", shape_of(rows), "Give the numbers of the rows to keep.")
        for layer in self.layers:
            layer.reorder(rows)
