"""A call as a custom operator can carry it: a list of tensors, a list of integers, and everything else as one string.

Custom operators take tensors and plain values, so terms and masks are taken apart here and put together again inside.
The string is the `repr` of nested tuples, which says all of a call's structure: it can be compared, cached with a
compiled graph and read back in another process. Integers are passed separately because in a compiled graph they may
be symbols. Rotations and query biases are applied before.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from relpos.core.line import Layout, Lines, Ramp
from relpos.core.tree import CLASSES
from relpos.engines.call import Call

_PLAIN: dict[str, type] = {cls.__name__: cls for cls in (Call, Layout, Ramp)}
"""Data classes that are no trees; the others are registered."""


Packed = tuple[list[Tensor], list[int], str]
"""Tensors, each once; integers; and the structure that holds both."""


def take_apart(call: Call) -> tuple[list[Tensor], list[int], Any]:
    """The call's tensors, each once, its integers, and how they stand in it, for `put_together`, in this process.

    Lines stay whole: they are most of a call, have no gradient, never change and keep what follows from them. Their
    tensors are in the list all the same, in the order of `pack`: what a checkpoint computes again must save as many,
    and may be run by the operator where the first run was not.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    return tensors, numbers, _take_apart(call, tensors, numbers, whole=True)


def pack(call: Call) -> Packed:
    """The call as an operator takes it."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = _take_apart(call, tensors, numbers, whole=False)
    return tensors, numbers, str(structure)


def _take_apart(node: Any, tensors: list[Tensor], numbers: list[int], *, whole: bool) -> Any:
    if whole and isinstance(node, Lines):
        for part in (node.query, node.key):
            _take_apart(part, tensors, numbers, whole=whole)
        return ("whole", node)
    if isinstance(node, Tensor):
        for place, known in enumerate(tensors):
            if known is node:
                return ("Tensor", place)
        tensors.append(node)
        return ("Tensor", len(tensors) - 1)
    if isinstance(node, tuple):
        return ("tuple", *(_take_apart(x, tensors, numbers, whole=whole) for x in node))
    if node is None or isinstance(node, str | bool):
        return node
    if isinstance(node, float | torch.SymFloat):
        return node.__float__()  # one number, where a compiler makes symbols of numbers
    if isinstance(node, int | torch.SymInt):
        numbers.append(node)  # type: ignore[arg-type]  # a symbol is one
        return ("int", len(numbers) - 1)
    parts = (getattr(node, field.name) for field in fields(node))
    return (type(node).__name__, *(_take_apart(part, tensors, numbers, whole=whole) for part in parts))


def unpack(tensors: list[Tensor], numbers: list[int], structure: str) -> Call:
    """The call again. What was checked when the terms were made is not checked twice."""
    return put_together(_read(structure), tensors, numbers)


def put_together(structure: Any, tensors: list[Tensor], numbers: list[int]) -> Call:
    """What `take_apart` took apart."""
    call: Call = _put_together(structure, tensors, numbers)
    return call


@lru_cache(maxsize=1024)
def _read(structure: str) -> Any:
    return ast.literal_eval(structure)


def _put_together(node: Any, tensors: list[Tensor], numbers: list[int]) -> Any:
    if not isinstance(node, tuple):
        return node
    kind, *parts = node
    if kind == "whole":
        return parts[0]
    if kind == "Tensor":
        return tensors[parts[0]]
    if kind == "int":
        return numbers[parts[0]]
    values = [_put_together(part, tensors, numbers) for part in parts]
    if kind == "tuple":
        return tuple(values)
    cls = _PLAIN.get(kind) or CLASSES[kind]
    made: Any = object.__new__(cls)
    for field, value in zip(fields(cls), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made
