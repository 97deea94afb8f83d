"""The arguments of `relpos.attention`, checked and resolved to a `Call`: tensors, the position, the mask."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from relpos.core import Coordinates, Mask, MaskLike, Scale, Term, Terms, require_sides
from relpos.core.checks import (
    COMPUTED,
    broadcasts,
    dtype_under_autocast,
    fail,
    require_computed,
    require_flag,
    require_number,
    require_probability,
    require_tensor,
    shape_of,
)
from relpos.core.terms.fitting import check_device, check_heads
from relpos.core.tree import fields_of
from relpos.engines.call import Call
from relpos.engines.familiar import Familiar, familiar_of


@runtime_checkable
class SupportsTerms(Protocol):
    """What attention needs of a position mechanism; every `relpos.Mechanism` that acts in attention is one."""

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        """What it says to attention."""
        ...


Position = Terms | Term | SupportsTerms


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: Position | None,
    queries: Coordinates | None,
    keys: Coordinates | None,
    mask: MaskLike | None,
    scale: float | None,
    dropout: float,
    return_lse: bool,
) -> tuple[Call, Familiar | None]:
    """Check the arguments of `relpos.attention`, see there, and make them a `Call`; and what is known of such calls."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(x, name)
    require_probability(dropout, "dropout")
    require_flag(return_lse, "return_lse")
    if scale is not None:
        require_number(scale, "scale", "above 0", "Leave it out for 1/sqrt(head width).")
    terms = _resolve_terms(position, queries, keys, q, k, v)
    dtype = dtype_under_autocast(q)
    plain = mask is None and dropout == 0 and not return_lse
    familiar = familiar_of(q, k, v, terms, dtype) if plain else None
    if familiar is None or not familiar.fits:
        _check_fit(q, k, v)
        terms.check(q, k, v)
        if familiar is not None:
            familiar.fits = True
    if mask is not None:
        mask = Mask.of(mask)
        _check_mask(mask, q, k)
    own = terms.one(Scale)
    if scale is None:
        scale = own.value if own is not None else q.shape[-1] ** -0.5
    if not q.dtype == k.dtype == v.dtype == dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return Call(q, k, v, terms, mask, float(scale), float(dropout), return_lse=return_lse), familiar


def _check_tensor(x: Tensor, name: str) -> None:
    require_tensor(x, name, dims=4)
    if x.dtype not in COMPUTED:
        require_computed(x, name, f"Convert {name}, e.g. {name}.float().")


def _check_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    (batch, heads, _, width), (k_batch, k_heads, keys, k_width), (v_batch, v_heads, values, v_width) = (
        q.shape, k.shape, v.shape
    )  # fmt: skip
    if heads * width * k_heads * k_width * v_heads * v_width == 0:
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if x.shape[1] * x.shape[3] == 0)
        fail(f"{name} with at least one head and a width above 0", shape_of(x), f"Check the layout of {name}.")
    require_alike(q, k, v)
    if not batch == k_batch == v_batch:
        fail("one batch size", f"q {batch}, k {k_batch}, v {v_batch}", "Layout is [batch, heads, tokens, width].")
    if width != k_width:
        fail("q and k of one head width", f"{width} and {k_width}", "Project both to the same width.")
    if k_heads != v_heads or keys != values:
        wanted = "k and v with the same heads and tokens"
        fail(wanted, f"k {tuple(k.shape)} and v {tuple(v.shape)}", "Layout is [batch, heads, tokens, width].")
    if heads % k_heads:
        wanted = "the query heads to be a multiple of the key heads"
        fail(wanted, f"{heads} and {k_heads}", "Grouped keys serve equal groups of query heads.")


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless all three are on one device and in one dtype, or in such as autocast makes one."""
    alike = q.dtype == k.dtype == v.dtype
    if not alike and not dtype_under_autocast(q) == dtype_under_autocast(k) == dtype_under_autocast(v):
        fail("q, k and v in one dtype", f"{q.dtype}, {k.dtype} and {v.dtype}", "Convert them, or use torch.autocast.")
    if not q.device == k.device == v.device:
        fail("q, k and v on one device", f"{q.device}, {k.device} and {v.device}", "Move them with .to(device).")


def _resolve_terms(
    position: Position | None, queries: Coordinates | None, keys: Coordinates | None, q: Tensor, k: Tensor, v: Tensor
) -> Terms:
    make = getattr(position, "terms", None)  # terms have none; of a class it is no method
    if callable(make) and not isinstance(position, type):
        if queries is None:
            wanted = "queries= beside a mechanism"
            fail(wanted, "none", "Say where the tokens are, e.g. queries=Sequence(n) or Grid(h, w, prefix=1).")
        # A mechanism made elsewhere may not say whether it acts in attention.
        if getattr(position, "acts_on_tokens", False) and not getattr(position, "acts_in_attention", True):
            remedy = "Call its embed() on the tokens before they are projected."
            fail("a mechanism that acts in attention", f"{type(position).__name__}, which acts on tokens", remedy)
        require_sides(queries, keys)
        for name, coordinates, count in (
            ("queries", queries, q.shape[2]),
            ("keys", queries if keys is None else keys, k.shape[2]),
        ):
            if coordinates.count != count:
                _check_fit(q, k, v)  # which says better what is wrong where these do not fit each other
                remedy = "Coordinates count the prefix too; where keys differ from queries, pass keys=."
                fail(f"{name} coordinates for {count} tokens", f"{coordinates!r} with {coordinates.count}", remedy)
        settle = getattr(position, "settle", None)
        if settle is not None:
            settle(q.device)
        terms = make(queries, keys)
        if not isinstance(terms, Terms):
            made = f"{shape_of(terms)} from {type(position).__name__}"
            fail("Terms from a mechanism's terms(queries, keys)", made, "Return relpos.Terms(...).")
        return terms
    if queries is not None or keys is not None:
        wanted = "coordinates only beside a mechanism"
        fail(wanted, "terms or no position", "Terms hold their own; drop queries= and keys=.")
    if position is None:
        return Terms()
    if isinstance(position, Term):
        return Terms(position)
    if not isinstance(position, Terms):
        wanted = "position to be terms or a mechanism"
        fail(wanted, shape_of(position), "Build the mechanism first, or wrap a dense tensor as DenseBias(bias).")
    return position


def _check_mask(mask: Mask, q: Tensor, k: Tensor) -> None:
    mask.check(q.shape[2], k.shape[2])
    for name, x in fields_of(mask).items():
        if not isinstance(x, Tensor):
            continue
        check_device(x, f"Mask {name}", q)
        if name == "allowed":
            if not (broadcasts(x.shape[0], q.shape[0]) and broadcasts(x.shape[1], q.shape[1])):
                wanted = f"a mask of {q.shape[0]} elements and {q.shape[1]} heads, or 1 of either"
                fail(wanted, shape_of(x), "A mask of keys, [B, M], is valid[:, None, None, :] or Mask.padding(valid).")
        elif x.dim() == 2 and not broadcasts(x.shape[0], q.shape[0]):
            wanted = f"Mask {name} for a batch of {q.shape[0]}"
            fail(wanted, shape_of(x), "Give one row, or one an element of the batch.")
    if mask.blocks is not None:
        check_device(mask.blocks.layout, "the mask's block layout", q)
        check_heads(mask.blocks.layout, "the mask's block layout", q)
