"""The variant of a call: what decides which compiled kernels it runs; and small calls that run the same kernels.

A variant has the dtype, the head widths, the terms with their layouts, the parts of the mask, grouped keys and dropout,
as plain values that can be compared and hashed. What kernels take as run-time arguments (the number of tokens, the size
of a window) is not in it. Small calls hold random numbers; no tensor of a user is read.
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
    QueryScale,
    Rotation,
    Sequence,
    Sinks,
    Softcap,
    Term,
    Terms,
    lines,
)
from relpos.engines.call import Call

FEW = 256
"""Up to this many tokens, kernels may differ; see `triton.limits.FEW`."""
BATCH, KEY_HEADS, SHARING = 2, 2, 2
_PREFIX = 3
_CELLS = (16, 32, 64)
"""Grid widths are rounded up to these; tiles differ between them."""

Size = Literal["odd", "full"]
TOKENS: dict[tuple[Size, bool], int] = {
    ("odd", False): 299, ("full", False): 384, ("odd", True): 197, ("full", True): 256,
}  # fmt: skip
"""About how many tokens a small call has, by whether they are few: several of the largest tiles, of 128 tokens, the
last one partial ("odd") or all full."""
_CUT: dict[Size, int] = {"odd": 38, "full": 128}
"""How many fewer keys than queries there are, if their numbers differ."""


class Variant(NamedTuple):
    """What decides which kernels a call runs.

    Attributes:
        dtype: of q, k and v.
        widths: the head widths of q and k, and of v.
        grouped: whether query heads share key heads.
        few: whether there are at most `FEW` queries and keys.
        cross: whether the numbers of queries and keys differ.
        terms: kind and layout of each term; see `_describe`.
        mask: for each tensor of the mask its dimensions and dtype, for each bound whether it is 0; None for no mask.
        dropout: whether there is dropout.
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
        """A short description, for messages."""
        parts = [str(self.dtype).removeprefix("torch."), f"head width {self.widths[0]}"]
        parts += [str(term[0]) for term in self.terms]
        if self.mask is not None:
            parts.append("a mask of " + " and ".join(str(part[0]) for part in self.mask))
        parts += ["grouped keys"] * self.grouped + ["dropout"] * self.dropout
        return ", ".join(parts)


def variant_of(call: Call) -> Variant | None:
    """The variant of a call; None if no small call can be made for one of its terms."""
    terms = [_describe(term) for term in call.terms]
    if any(term is None for term in terms):
        return None
    n, m = call.q.shape[2], call.k.shape[2]
    return Variant(
        dtype=call.q.dtype,
        widths=(index(call.q.shape[3]), index(call.v.shape[3])),  # symbols become plain numbers
        grouped=_known(call.q.shape[1] != call.k.shape[1]),
        few=_known(max(n, m) <= FEW),
        cross=_known(n != m),
        terms=tuple(term for term in terms if term is not None),
        mask=None if call.mask is None else _parts(call.mask),
        dropout=_known(call.dropout > 0),
    )


def _known(x: bool) -> bool:
    """A comparison as a plain value, even if a compiler holds sizes as symbols."""
    return True if x else False  # noqa: SIM210


def _describe(term: Term) -> tuple[Any, ...] | None:
    """The kind of a term and its properties that select kernels; None if no small call can be made for it."""
    if isinstance(term, LineBias):
        return ("LineBias", _known(term.values.shape[0] == 1), term.values.dtype, *_layout(term.lines))
    if isinstance(term, Rotation) and term.widens == 1:
        given = (term.query, term.key, term.query_magnitude, term.key_magnitude)
        shared = tuple(None if x is None else (_known(x.shape[0] == 1), _known(x.shape[1] == 1)) for x in given)
        return ("Rotation", term.layout, index(term.query.shape[3]), term.query.dtype, shared)
    if isinstance(term, QueryBias):
        return ("QueryBias", _known(term.u.shape[0] == 1), term.u.dtype)
    if isinstance(term, QueryScale):
        return ("QueryScale", term.on, term.factor.dtype, *(_known(size == 1) for size in term.factor.shape[:2]))
    if isinstance(term, Sinks):
        axes = [_known(size == 1) for size in term.logits.shape[:2]] if term.of_queries else []
        return ("Sinks", term.logits.dtype, *axes)
    return ("Softcap",) if isinstance(term, Softcap) else None


def _layout(of_lines: Lines) -> tuple[Any, ...]:
    """Number of axes (0: irregular), width of a grid, whether there are prefixes, whether lines differ in the batch."""
    query, key = of_lines.layout.query, of_lines.layout.key
    differ = any(_known(x.dim() == 2 and x.shape[0] > 1) for x in (of_lines.query, of_lines.key))
    if query is None or key is None:
        return (0, 0, False, False, differ)
    width = max(query.sizes[-1], key.sizes[-1])
    cells = next((cells for cells in _CELLS if width <= cells), _CELLS[-1]) if len(query.sizes) > 1 else 0
    return (len(query.sizes), cells, _known(query.prefix > 0), _known(key.prefix > 0), differ)


def _parts(mask: Mask) -> tuple[tuple[Any, ...], ...]:
    found: list[tuple[Any, ...]] = []
    for field in fields(mask):
        x = getattr(mask, field.name)
        if isinstance(x, Tensor):
            found.append((field.name, _known(x.dim() == 2 and x.shape[0] > 1), x.dtype))
        elif isinstance(x, Blocks):
            found.append((field.name, _known(x.layout.shape[0] > 1)))
        elif isinstance(x, Mask):
            found.append((field.name, _parts(x)))
        elif x is not None:
            found.append((field.name, _known(x == 0)))
    return tuple(found)


def small_call(variant: Variant, size: Size) -> Call:
    """A call of a variant on the CPU, with random numbers from its own generator.

    All floating-point tensors require gradients, except angles, because PyTorch applies learned ones.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = variant.dtype, learned: bool = True) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
        return made.requires_grad_(learned)

    queries, keys = _coordinates(variant, size, generator)
    n, m = queries.count, keys.count
    heads = KEY_HEADS * (SHARING if variant.grouped else 1)
    width, value_width = variant.widths
    made: list[Term] = []
    for kind, *rest in variant.terms:
        match kind:
            case "LineBias":
                shared, dtype = rest[:2]
                line = lines(queries, None if keys is queries else keys, device=torch.device("cpu"))
                made.append(LineBias(normal(1 if shared else heads, line.length, dtype=dtype), line))
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
                axes = [1 if one else size for one, size in zip(rest[1:], (BATCH, heads), strict=False)]
                made.append(Sinks(normal(*((*axes, n) if axes else (heads,)), dtype=rest[0])))
            case "QueryScale":
                on, dtype, *shared = rest
                axes = [1 if one else size for one, size in zip(shared, (BATCH, heads), strict=True)]
                made.append(QueryScale(normal(*axes, n, dtype=dtype), on))
            case "Softcap":
                made.append(Softcap(2.0))
    return Call(
        q=normal(BATCH, heads, n, width),
        k=normal(BATCH, KEY_HEADS, m, width),
        v=normal(BATCH, KEY_HEADS, m, value_width),
        terms=Terms(*made),
        mask=None if variant.mask is None else _mask(variant.mask, heads, n, m, generator),
        scale=width**-0.5,
        dropout=0.25 if variant.dropout else 0.0,
        seed=torch.tensor(12345, device="cpu") if variant.dropout else None,
        return_lse=False,  # engines that have it return it anyway
    )


def _coordinates(variant: Variant, size: Size, generator: torch.Generator) -> tuple[Coordinates, Coordinates]:
    """The coordinates of queries and keys of a small call; the same object if they are equal."""
    count = TOKENS[size, variant.few]
    fewer = count - (_CUT[size] if variant.cross else 0)
    layout = next((term[3:] for term in variant.terms if term[0] == "LineBias"), (1, 0, False, False, False))
    axes, cells, has_prefix, has_key_prefix, differ = layout
    both: list[Coordinates] = []
    for tokens, with_prefix in ((count, has_prefix), (fewer, has_key_prefix)):
        prefix = _PREFIX if with_prefix else 0
        if axes == 0:
            shape = (BATCH, tokens) if differ else (tokens,)
            positions = torch.randint(0, tokens, shape, generator=generator, device="cpu")
            both.append(Positions(positions, low=0, high=tokens - 1))
        elif axes == 1:
            both.append(Sequence(tokens - prefix, prefix=prefix))
        else:
            row = cells if size == "full" else cells - 3
            outer = (2,) * (axes - 2)
            both.append(Grid(*outer, max(2, (tokens - prefix) // row // 2 ** len(outer)), row, prefix=prefix))
    return (both[0], both[1]) if variant.cross or has_prefix != has_key_prefix else (both[0], both[0])


def _mask(parts: tuple[tuple[Any, ...], ...], heads: int, n: int, m: int, generator: torch.Generator) -> Mask:
    """A mask with these parts, under which some tiles are allowed whole, some in part and some not at all."""
    made: dict[str, Any] = {}
    far, near = max(n, m) // 3, max(n, m) // 16
    for name, detail, *dtype in parts:
        count = m if name.startswith("key") else n
        token = torch.arange(count, device="cpu")
        if name in ("left", "right", "limit"):
            made[name] = 0 if detail else far if name == "left" else near
            continue
        if name == "also":
            made[name] = _mask(detail, heads, n, m, generator)
            continue
        if name == "blocks":
            shape = (heads if detail else 1, -(-n // near), -(-m // near))
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
        if detail:  # different for each batch element
            x = torch.stack([x.roll(number * near) for number in range(BATCH)])
        made[name] = x.to(dtype[0])
    if n != m and not {"low", "high", "left", "right", "limit"}.isdisjoint(made):  # intervals then need orders
        made = {"query_order": torch.arange(n) * m // n, "key_order": torch.arange(m), **made}
    return Mask(**made)
