"""The arguments of `relpos.attention`: checked, the position resolved to terms, and whether they fit together."""

from __future__ import annotations

from copy import copy
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from relpos.core import (
    Coordinates,
    Mask,
    MaskLike,
    Scale,
    Term,
    Terms,
    may_cache,
    require_queries_and_keys,
)
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
    under_autocast,
)
from relpos.core.private import hooks_on_saved_tensors
from relpos.core.terms.fitting import check_device, check_heads
from relpos.core.terms.table_lookup import read_tables
from relpos.core.tree import fields_of, unchecked
from relpos.engines.call import Call


@runtime_checkable
class SupportsTerms(Protocol):
    """What attention needs of a position mechanism; every `relpos.Mechanism` that acts in attention is one."""

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        """What it says to attention."""
        ...


Position = Terms | Term | SupportsTerms
HiddenStates = Tensor | tuple[Tensor, Tensor]
"""What the queries are projected from, `[B, N, E]`, or a pair with that of the keys, `[B, M, F]`."""


class Arguments:
    """The arguments of `relpos.attention` (see there), each of the right kind, with the position resolved to terms.

    Whether they fit together is `check`ed once for all of one structure. A plain class: each call makes one.

    Args:
        backend: the engine asked for, where the call is computed (`run_planned`). Its terms may then have tables that
            are not read (`TableLookup`); those of all others never have.

    Attributes:
        may_have_structure: whether a plan may be kept for it, and one that is there be used: the call is computed, and
            nothing looks on that may change the choice or must see all that is done.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Position | None = None,
        queries: Coordinates | None = None,
        keys: Coordinates | None = None,
        mask: MaskLike | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        return_lse: bool = False,
        states: HiddenStates | None = None,
        backend: str | None = None,
    ) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            dense = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested  # `is_dense`, for speed
            if not dense or x.dim() != 4 or x.dtype not in COMPUTED:
                _refuse(x, name)
        if type(dropout) is not float or dropout != 0.0:
            require_probability(dropout, "dropout")
        if return_lse is not False:
            require_flag(return_lse, "return_lse")
        if scale is not None:
            require_number(scale, "scale", "above 0", "Leave it out for 1/sqrt(head width).")
        self.q, self.k, self.v = q, k, v
        self.backend = backend
        self.may_have_structure = backend is not None and may_cache(q.device) and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        reads = not self.may_have_structure or not (backend == "triton" or (backend == "auto" and q.is_cuda))
        self.terms = _resolve_terms(position, queries, keys, q, k, v, states, reads)
        self.mask = None if mask is None else Mask.of(mask)
        self.dtype, self.autocast = under_autocast(q)
        self.scale, self.dropout, self.return_lse = scale, float(dropout), return_lse

    def read(self) -> Arguments:
        """The same with all tables read; itself where there is none."""
        terms = read_tables(self.terms)
        if terms is self.terms:
            return self
        known = copy(self)
        known.terms = terms
        return known

    def check(self) -> None:
        """Raise unless they fit together."""
        require_fit(self.q, self.k, self.v)
        self.terms.check(self.q, self.k, self.v)
        if self.mask is not None:
            check_mask(self.mask, self.q, self.k)

    def call(self) -> Call:
        """The call that they make, checked."""
        self.check()
        scale = self.scale
        if scale is None:
            own = self.terms.one(Scale)
            scale = own.value if own is not None else self.q.shape[-1] ** -0.5
        return self.unchecked_call(float(scale))

    def unchecked_call(self, scale: float) -> Call:
        """The same where it is known that they fit, and by which factor the content product is scaled."""
        q, k, v, terms = self.q, self.k, self.v, self.terms
        for index, term in enumerate(terms.items):
            if isinstance(term, Scale):  # it is the call's
                terms = unchecked(Terms, items=terms.items[:index] + terms.items[index + 1 :])
                break
        if not q.dtype == k.dtype == v.dtype == self.dtype:
            q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        return Call(q, k, v, terms, self.mask, scale, self.dropout, None, self.return_lse)


def _refuse(x: Tensor, name: str) -> None:
    """Raise for what is no tensor of attention."""
    require_tensor(x, name, dims=4)
    require_computed(x, name, f"Convert {name}, e.g. {name}.float().")


def require_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless queries, keys and values fit each other."""
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
        fail(wanted, f"{heads} and {k_heads}", "Each key head serves equally many query heads.")


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless all three are on one device and in one dtype, or in such as autocast makes one."""
    alike = q.dtype == k.dtype == v.dtype
    if not alike and not dtype_under_autocast(q) == dtype_under_autocast(k) == dtype_under_autocast(v):
        fail("q, k and v in one dtype", f"{q.dtype}, {k.dtype} and {v.dtype}", "Convert them, or use torch.autocast.")
    if not q.device == k.device == v.device:
        fail("q, k and v on one device", f"{q.device}, {k.device} and {v.device}", "Move them with .to(device).")


def _resolve_terms(
    position: Position | None,
    queries: Coordinates | None,
    keys: Coordinates | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: HiddenStates | None,
    reads: bool,
) -> Terms:
    make = getattr(position, "terms", None)  # terms have none; of a class it is no method
    if callable(make) and not isinstance(position, type):
        if queries is None:
            wanted = "queries= with a mechanism"
            fail(
                wanted, "none", "Give the coordinates of the tokens, e.g. queries=Sequence(n) or Grid(h, w, prefix=1)."
            )
        require_in_attention(position)
        require_queries_and_keys(queries, keys)
        if queries.count != q.shape[2] or (queries if keys is None else keys).count != k.shape[2]:
            _fail_to_count(queries, keys, q, k, v)
        settle = getattr(position, "settle", None)
        if settle is not None:
            settle(q.device)
        if getattr(position, "needs_states", False):
            _require_rows(states, q)
            terms = make(queries, keys, states=states)
        else:
            # Read under hooks, for the second run of a checkpoint has to save as many tensors as the first, also where
            # it runs under a mode. The class is asked: a wrapper that hands on attributes may say `terms` otherwise.
            unread = None if reads or hooks_on_saved_tensors() else getattr(type(position), "_unread_terms", None)
            terms = make(queries, keys) if unread is None else unread(position, queries, keys)
        if not isinstance(terms, Terms):
            made = f"{shape_of(terms)} from {type(position).__name__}"
            fail("Terms from a mechanism's terms(queries, keys)", made, "Return relpos.Terms(...).")
        return terms
    if queries is not None or keys is not None:
        wanted = "coordinates only with a mechanism"
        fail(wanted, "terms or no position", "Terms have their own: leave out queries= and keys=.")
    if states is not None:
        fail("states only with a mechanism", "terms or no position", "Terms were made with theirs: leave out states=.")
    if position is None:
        return Terms()
    if isinstance(position, Term):
        return Terms(position)
    if not isinstance(position, Terms):
        remedy = "Build the mechanism first, or wrap a dense tensor as DenseBias(bias)."
        if isinstance(position, str):
            sizes = f"num_heads={q.shape[1]}, head_dim={q.shape[3]}" if q.dim() == 4 else "num_heads=..., head_dim=..."
            remedy = f"Build it first: relpos.create_position({position!r}, {sizes}, queries=...)."
        fail("position to be terms or a mechanism", shape_of(position), remedy)
    return position


def _fail_to_count(queries: Coordinates, keys: Coordinates | None, q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    require_fit(q, k, v)  # which says better what is wrong where these do not fit each other
    name, coordinates, count = "queries", queries, q.shape[2]
    if queries.count == count:
        name, coordinates, count = "keys", queries if keys is None else keys, k.shape[2]
    remedy = "Coordinates include the prefix; if keys differ from queries, pass keys=."
    fail(f"{name} coordinates for {count} tokens", f"{coordinates!r} with {coordinates.count}", remedy)


def require_in_attention(position: object) -> None:
    """Raise for a mechanism that acts on tokens alone. One made elsewhere may not say where it acts."""
    if getattr(position, "acts_on_tokens", False) and not getattr(position, "acts_in_attention", True):
        remedy = "Call its embed() on the tokens before they are projected."
        fail("a mechanism that acts in attention", f"{type(position).__name__}, which acts on tokens", remedy)


def check_mask(mask: Mask, q: Tensor, k: Tensor) -> None:
    """Raise unless a mask fits queries and keys."""
    mask.check(q.shape[2], k.shape[2])
    for name, x in fields_of(mask).items():
        if not isinstance(x, Tensor):
            continue
        check_device(x, f"Mask {name}", q)
        if name == "allowed":
            if not (broadcasts(x.shape[0], q.shape[0]) and broadcasts(x.shape[1], q.shape[1])):
                wanted = f"a mask of {q.shape[0]} elements and {q.shape[1]} heads, or 1 of either"
                fail(
                    wanted,
                    shape_of(x),
                    "For a mask of keys, [B, M], pass valid[:, None, None, :] or Mask.padding(valid).",
                )
        elif x.dim() == 2 and not broadcasts(x.shape[0], q.shape[0]):
            wanted = f"Mask {name} for a batch of {q.shape[0]}"
            fail(wanted, shape_of(x), "Give one row, or one per element of the batch.")
    if mask.blocks is not None:
        check_device(mask.blocks.layout, "the mask's block layout", q)
        check_heads(mask.blocks.layout, "the mask's block layout", q)
    if mask.also is not None:
        check_mask(mask.also, q, k)


def _require_rows(states: object, q: Tensor) -> None:
    """Raise where states are of another batch; all else of them the mechanism checks."""
    for one in states if isinstance(states, tuple) else (states,):
        if isinstance(one, Tensor) and one.dim() == 3 and not broadcasts(one.shape[0], q.shape[0]):
            fail(f"states of the {q.shape[0]} rows of q, or of 1", shape_of(one), "Pass what q is projected from.")
