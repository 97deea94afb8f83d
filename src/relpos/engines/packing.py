"""A call in the form for a custom operator: a list of tensors, a list of integers, and everything else as one string.

Custom operators take tensors and plain values, so terms and masks are taken apart here and put together again inside.
The string is the `repr` of nested tuples, which holds the whole structure of a call: it can be compared, cached with a
compiled graph and read back in another process. Integers are passed separately because in a compiled graph they may
be symbols. Rotations and query biases are applied before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from relpos.core.gather import Rows
from relpos.core.line import Layout, Lines, Ramp
from relpos.core.tree import CLASSES
from relpos.engines.call import Call

_PLAIN: dict[str, type] = {cls.__name__: cls for cls in (Call, Layout, Ramp)}
"""Data classes that are not pytrees; the others are registered."""


Packed = tuple[list[Tensor], list[int], str]
"""Tensors, each once; integers; and the structure that holds both."""


def pack(call: Call) -> Packed:
    """The call as an operator takes it."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = _take_apart(call, tensors, numbers)
    return tensors, numbers, str(structure)


def _take_apart(node: Any, tensors: list[Tensor], numbers: list[int]) -> Any:
    if isinstance(node, Tensor):
        for index, known in enumerate(tensors):
            if known is node:
                return ("Tensor", index)
        tensors.append(node)
        return ("Tensor", len(tensors) - 1)
    if isinstance(node, tuple):
        return ("tuple", *(_take_apart(x, tensors, numbers) for x in node))
    if node is None or isinstance(node, str | bool):
        return node
    if isinstance(node, float | torch.SymFloat):
        return node.__float__()  # a plain number, even if a compiler made it a symbol
    if isinstance(node, int | torch.SymInt):
        numbers.append(node)  # type: ignore[arg-type]  # a symbol is one
        return ("int", len(numbers) - 1)
    parts = (getattr(node, field.name) for field in fields(node))
    return (type(node).__name__, *(_take_apart(part, tensors, numbers) for part in parts))


def unpack(tensors: list[Tensor], numbers: list[int], structure: str) -> Call:
    """The call again, without the checks that were done when its terms were made."""
    call: Call = _put_together(_read(structure), tensors, numbers)
    return call


@lru_cache(maxsize=1024)
def _read(structure: str) -> Any:
    return ast.literal_eval(structure)


def _put_together(node: Any, tensors: list[Tensor], numbers: list[int]) -> Any:
    if not isinstance(node, tuple):
        return node
    kind, *parts = node
    if kind == "Tensor":
        return tensors[parts[0]]
    if kind == "int":
        return numbers[parts[0]]
    values = [_put_together(part, tensors, numbers) for part in parts]
    if kind == "tuple":
        return tuple(values)
    cls = _PLAIN.get(kind) or CLASSES[kind]
    instance: Any = object.__new__(cls)
    for field, value in zip(fields(cls), values, strict=True):
        object.__setattr__(instance, field.name, value)
    return instance


_PartMaker = Callable[[Sequence[Tensor], Sequence[Lines | Rows]], Any]


class CallForm:
    """How calls of one structure are taken apart for an autograd node, and put together again for its backward. `pack`
    works this out anew for each call.

    Lines and row numbers stay whole: they are most of a call, have no gradient, never change and hold a cache. A form
    keeps nothing of the call that it is made from.

    Args:
        call: one of them.
        as_packed: whether the tensors of lines are listed too, in the order of `pack`: the second run of a checkpoint
            must save as many, and may use the operator though the first run did not.
    """

    def __init__(self, call: Call, *, as_packed: bool) -> None:
        self._as_packed = as_packed
        self._tensors: list[Callable[[Call], Tensor]] = []
        self._whole: list[Callable[[Call], Lines | Rows]] = []
        make = self._maker(call, (), [])
        assert make is not None
        self._make = make

    def tensors(self, call: Call) -> list[Tensor]:
        """The call's tensors, each once."""
        return [get(call) for get in self._tensors]

    def whole(self, call: Call) -> list[Lines | Rows]:
        """The lines and row numbers of its terms."""
        return [get(call) for get in self._whole]

    def call(self, tensors: Sequence[Tensor], lines: Sequence[Lines | Rows]) -> Call:
        """The call made of these."""
        call: Call = self._make(tensors, lines)
        return call

    def _index(self, x: Tensor, path: Path, known: list[Tensor]) -> int:
        for index, other in enumerate(known):
            if other is x:
                return index
        known.append(x)
        self._tensors.append(_at(path))
        return len(known) - 1

    def _maker(self, node: Any, path: Path, known: list[Tensor]) -> _PartMaker | None:
        """A function that makes a part of the call again; None if the part is the same in all calls."""
        if isinstance(node, Lines | Rows):
            for name in ("query", "key") if self._as_packed and isinstance(node, Lines) else ():
                self._index(getattr(node, name), (*path, name), known)
            number = len(self._whole)
            self._whole.append(_at(path))
            return lambda tensors, lines: lines[number]
        if isinstance(node, Tensor):
            index = self._index(node, path, known)
            return lambda tensors, lines: tensors[index]
        if isinstance(node, tuple) and node:
            makers = [self._maker(part, (*path, at), known) or _always(part) for at, part in enumerate(node)]
            return lambda tensors, lines: tuple([make(tensors, lines) for make in makers])
        if type(node).__name__ not in CLASSES and type(node) is not Call:
            return None
        places: list[tuple[str, int]] = []
        varying: list[tuple[str, _PartMaker]] = []
        same: dict[str, Any] = {}
        for field in fields(node):
            name, part, there = field.name, getattr(node, field.name), (*path, field.name)
            if isinstance(part, Tensor):
                places.append((name, self._index(part, there, known)))
            elif (make_part := self._maker(part, there, known)) is not None:
                varying.append((name, make_part))
            else:
                same[name] = part
        kind = type(node)

        def make(tensors: Sequence[Tensor], lines: Sequence[Lines | Rows]) -> Any:
            instance: Any = object.__new__(kind)
            attributes = instance.__dict__
            attributes.update(same)
            for name, index in places:
                attributes[name] = tensors[index]
            for name, make_part in varying:
                attributes[name] = make_part(tensors, lines)
            return instance

        return make


Path = tuple[str | int, ...]


def _always(x: Any) -> _PartMaker:
    return lambda tensors, lines: x


def _at(path: Path) -> Callable[[Any], Any]:
    """A function that gets the part of a call at a path."""
    steps = [attrgetter(step) if isinstance(step, str) else itemgetter(step) for step in path]

    def get(node: Any) -> Any:
        for step in steps:
            node = step(node)
        return node

    return steps[0] if len(steps) == 1 else get
