"""The structure of tensors, terms, lines and masks: everything but the numbers in their tensors.

The checks of a call, and the best way to compute it, depend only on its structure, which layers and steps repeat. A
structure consists of plain values, serves as a lookup key, and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from relpos.core.algebra import Terms
from relpos.core.gather import Rows
from relpos.core.line import Lines
from relpos.core.tree import OWN

_PLAIN = frozenset((type(None), bool, int, float, str))


class _Hashed:
    """A structure with its hash, cached on the object it describes."""

    __slots__ = ("hash", "parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self.parts, self.hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.hash == other.hash and self.parts == other.parts


def structure_of(x: Any, tensors: list[Tensor]) -> Hashable | None:
    """The structure of a tuple, terms or a mask, of its tensors the shape, strides, dtype, device and whether they
    require a gradient. None if a part has none: a function, a tensor of another class, or a tree that another library
    registered.

    Args:
        x: a tuple or a registered tree.
        tensors: the tensors found are appended, except those of lines and of row numbers.
    """
    kind = type(x)
    parts: Iterable[Any]
    if kind is Terms:
        parts = x.items
    elif kind is tuple:
        parts = x
    elif (names := OWN.get(kind)) is not None:
        parts = map(x.__dict__.__getitem__, names)
    else:
        return None
    found: list[Any] = [kind]
    for part in parts:
        kind = type(part)
        if kind is Tensor or kind is Parameter:
            tensors.append(part)
            found.append((part.shape, part.stride(), part.dtype, part.device, part.requires_grad))
        elif kind in _PLAIN:
            found.append(part)
        elif kind is Rows:  # its index is as long as the line
            found.append((Rows, part.rows, part.in_order))
        else:  # lines never change, and are most of a call
            own = part.__dict__.get("_structure") or _of_lines(part) if kind is Lines else structure_of(part, tensors)
            if own is None:
                return None
            found.append(own)
    return tuple(found)


def _of_lines(lines: Lines) -> Hashable | None:
    vectors = structure_of((lines.query, lines.key), [])
    if vectors is None:
        return None
    parts = (Lines, vectors, lines.origin, lines.length, lines.layout, lines.query is lines.key)
    known = lines.__dict__["_structure"] = _Hashed(parts)
    return known
