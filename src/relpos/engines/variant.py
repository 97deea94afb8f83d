"""What of a call decides which compiled kernels it runs, and small calls that run the same ones.

A variant is dtype and head widths, which terms there are and how each is laid out, which parts the mask has, grouped
keys, dropout: plain values, which can be compared and hashed. What kernels take as numbers while they run (how many
tokens, how far a window reaches) is no part of it. The small calls of a variant hold random numbers in their own
memory: none of a user's tensors is read.
"""

from __future__ import annotations

from dataclasses import fields
from operator import index
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from relpos.core import (
    Blocks,
    Coordinates,
    Grid,
    LineBias,
    Lines,
    Mask,
    Positions,
    QueryBias,
    Rotation,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Term,
    Terms,
    lines,
)
from relpos.engines.call import Call

FEW = 256
"""Tokens up to which kernels may take other ways; see `triton.FEW`."""
BATCH, KEY_HEADS, SHARING = 2, 2, 2
_PREFIX = 3
_CELLS = (16, 32, 64)
"""Widths of a grid's rows for which tiles differ."""

Size = Literal["odd", "full"]
TOKENS: dict[tuple[Size, bool], int] = {
    ("odd", False): 299, ("full", False): 384, ("odd", True): 197, ("full", True): 256,
}  # fmt: skip
"""About how many tokens a small call has, by whether they are few: several of the largest tiles, of 128, of which the
last is cut, or all are full."""
_CUT: dict[Size, int] = {"odd": 38, "full": 128}
"""How many keys there are less, where they are others than the queries."""


class Variant(NamedTuple):
    """What decides which kernels run.

    Attributes:
        dtype: of q, k and v.
        widths: of the heads of q and k, and of v.
        grouped: whether query heads share key heads.
        few: whether neither queries nor keys are more than `FEW`.
        cross: whether there are other numbers of queries than of keys.
        terms: kind and layout of each term, see `_describe`.
        mask: each part that it has with its dimensions and dtype, or of a bound whether it is 0; None for no mask.
        dropout: whether there is any.
    """

    dtype: torch.dtype
    widths: tuple[int, int]
    grouped: bool
    few: bool
    cross: bool
    terms: tuple[tuple[Any, ...], ...]
    mask: tuple[tuple[Any, ...], ...] | None
    dropout: bool

    def words(self) -> str:
        """In a few words."""
        parts = [str(self.dtype).removeprefix("torch."), f"head width {self.widths[0]}"]
        parts += [str(term[0]) for term in self.terms]
        if self.mask is not None:
            parts.append("a mask of " + " and ".join(str(part[0]) for part in self.mask))
        parts += ["grouped keys"] * self.grouped + ["dropout"] * self.dropout
        return ", ".join(parts)


def variant_of(call: Call) -> Variant | None:
    """The variant of a call; None where it has a term of which no small twin is known."""
    terms = [_describe(term) for term in call.terms if not isinstance(term, Scale)]
    if any(term is None for term in terms):
        return None
    n, m = call.q.shape[2], call.k.shape[2]
    return Variant(
        dtype=call.q.dtype,
        widths=(index(call.q.shape[3]), index(call.v.shape[3])),  # which makes numbers of symbols
        grouped=_known(call.q.shape[1] != call.k.shape[1]),
        few=_known(max(n, m) <= FEW),
        cross=_known(n != m),
        terms=tuple(term for term in terms if term is not None),
        mask=None if call.mask is None else _parts(call.mask),
        dropout=_known(call.dropout > 0),
    )


def _known(x: bool) -> bool:
    """A comparison as a plain value: a compiler that holds sizes as symbols then knows it too."""
    return True if x else False  # noqa: SIM210


def _describe(term: Term) -> tuple[Any, ...] | None:
    """Kind of a term, and what of it decides."""
    if isinstance(term, LineBias):
        return ("LineBias", _known(term.values.shape[0] == 1), term.values.dtype, *_laid_out(term.lines))
    if isinstance(term, Rotation):
        given = (term.query, term.key, term.query_magnitude, term.key_magnitude)
        shared = tuple(None if x is None else (_known(x.shape[0] == 1), _known(x.shape[1] == 1)) for x in given)
        return ("Rotation", term.layout, index(term.query.shape[3]), term.query.dtype, shared)
    if isinstance(term, QueryBias):
        return ("QueryBias", _known(term.u.shape[0] == 1), term.u.dtype)
    if isinstance(term, Sinks):
        return ("Sinks", term.logits.dtype)
    return ("Softcap",) if isinstance(term, Softcap) else None


def _laid_out(where: Lines) -> tuple[Any, ...]:
    """Axes, 0 for irregular ones, the width of a grid's rows, prefixes, and whether lines differ within the batch."""
    query, key = where.layout.query, where.layout.key
    differ = any(_known(x.dim() == 2 and x.shape[0] > 1) for x in (where.query, where.key))
    if query is None or key is None:
        return (0, 0, False, False, differ)
    row = max(query.sizes[-1], key.sizes[-1])
    cells = next((cells for cells in _CELLS if row <= cells), _CELLS[-1]) if len(query.sizes) > 1 else 0
    return (len(query.sizes), cells, _known(query.prefix > 0), _known(key.prefix > 0), differ)


def _parts(mask: Mask) -> tuple[tuple[Any, ...], ...]:
    found: list[tuple[Any, ...]] = []
    for field in fields(mask):
        x = getattr(mask, field.name)
        if isinstance(x, Tensor):
            found.append((field.name, _known(x.dim() == 2 and x.shape[0] > 1), x.dtype))
        elif isinstance(x, Blocks):
            found.append((field.name, _known(x.layout.shape[0] > 1)))
        elif x is not None:
            found.append((field.name, _known(x == 0)))
    return tuple(found)


def small_call(variant: Variant, size: Size) -> Call:
    """A call of a variant on the CPU, of random numbers from a generator of its own.

    All that may be learned requires gradients, but for angles: learned ones are turned by PyTorch.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = variant.dtype, learned: bool = True) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
        return made.requires_grad_(learned)

    queries, keys = _places(variant, size, generator)
    n, m = queries.count, keys.count
    heads = KEY_HEADS * (SHARING if variant.grouped else 1)
    width, meets = variant.widths
    made: list[Term] = []
    for kind, *rest in variant.terms:
        match kind:
            case "LineBias":
                one, dtype = rest[:2]
                where = lines(queries, None if keys is queries else keys, device=torch.device("cpu"))
                made.append(LineBias(normal(1 if one else heads, where.length, dtype=dtype), where))
            case "Rotation":
                layout, pairs, dtype, shared = rest
                tensors = [
                    None if axes is None else normal(
                        1 if axes[0] else BATCH, 1 if axes[1] else heads, count, pairs, dtype=dtype, learned=False
                    )
                    for axes, count in zip(shared, (n, m, n, m), strict=True)
                ]  # fmt: skip
                assert tensors[0] is not None
                made.append(Rotation(tensors[0], tensors[1], layout, 1.0, tensors[2], tensors[3]))
            case "QueryBias":
                made.append(QueryBias(normal(1 if rest[0] else heads, width, dtype=rest[1])))
            case "Sinks":
                made.append(Sinks(normal(heads, dtype=rest[0])))
            case "Softcap":
                made.append(Softcap(2.0))
    return Call(
        q=normal(BATCH, heads, n, width),
        k=normal(BATCH, KEY_HEADS, m, width),
        v=normal(BATCH, KEY_HEADS, m, meets),
        terms=Terms(*made),
        mask=None if variant.mask is None else _mask(variant.mask, heads, n, m, generator),
        scale=width**-0.5,
        dropout=0.25 if variant.dropout else 0.0,
        seed=torch.tensor(12345, device="cpu") if variant.dropout else None,
        return_lse=False,  # which engines that have it give all the same
    )


def _places(variant: Variant, size: Size, generator: torch.Generator) -> tuple[Coordinates, Coordinates]:
    """Where the queries and keys of a small call are; one object where they are the same."""
    count = TOKENS[size, variant.few]
    fewer = count - (_CUT[size] if variant.cross else 0)
    laid_out = next((term[3:] for term in variant.terms if term[0] == "LineBias"), (1, 0, False, False, False))
    axes, cells, prefix, key_prefix, differ = laid_out
    sides: list[Coordinates] = []
    for tokens, first in ((count, prefix), (fewer, key_prefix)):
        before = _PREFIX if first else 0
        if axes == 0:
            shape = (BATCH, tokens) if differ else (tokens,)
            anywhere = torch.randint(0, tokens, shape, generator=generator, device="cpu")
            sides.append(Positions(anywhere, low=0, high=tokens - 1))
        elif axes == 1:
            sides.append(Sequence(tokens - before, prefix=before))
        else:
            row = cells if size == "full" else cells - 3
            outer = (2,) * (axes - 2)
            sides.append(Grid(*outer, max(2, (tokens - before) // row // 2 ** len(outer)), row, prefix=before))
    return (sides[0], sides[1]) if variant.cross or prefix != key_prefix else (sides[0], sides[0])


def _mask(parts: tuple[tuple[Any, ...], ...], heads: int, n: int, m: int, generator: torch.Generator) -> Mask:
    """A mask with these parts: some tiles all seen, some in part, some not at all."""
    made: dict[str, Any] = {}
    far, near = max(n, m) // 3, max(n, m) // 16
    for name, what, *dtype in parts:
        count = m if name.startswith("key") else n
        token = torch.arange(count, device="cpu")
        if name in ("left", "right", "limit"):
            made[name] = 0 if what else far if name == "left" else near
            continue
        if name == "blocks":
            shape = (heads if what else 1, -(-n // near), -(-m // near))
            made[name] = Blocks(torch.rand(shape, generator=generator, device="cpu") < 0.5, near)
            continue
        match name:
            case "low":
                x = token * m // n - far
            case "high":
                x = token * m // n + near
            case "query_order":
                x = token * m // n
            case "key_order":
                x = token
            case "query_global" | "key_global":
                x = token % 50 == 0
            case _:  # segments, the last of them padding
                x = torch.where(token >= count - 5, -1, token * 4 // count)
        if what:  # the elements of the batch differ
            x = torch.stack([x.roll(number * near) for number in range(BATCH)])
        made[name] = x.to(dtype[0])
    if n != m and not {"low", "high", "left", "right", "limit"}.isdisjoint(made):  # orders, where it has none
        made = {"query_order": torch.arange(n) * m // n, "key_order": torch.arange(m), **made}
    return Mask(**made)
