"""A call as a custom operator can carry it: a list of tensors, a list of integers, and everything else as one string.

Custom operators take tensors and plain values, so terms and masks are taken apart here and put together again inside.
The string is the `repr` of nested tuples, which says all of a call's structure: it can be compared, cached with a
compiled graph and read back in another process. Integers stand beside it because in a compiled graph they may be
symbols. Rotations and query biases are applied before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import (
    AxisVectors,
    Blocks,
    DenseBias,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    QueryBias,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Softcap,
    Terms,
    at_least_float32,
    rotate,
)
from relpos.core.line import Layout, Ramp
from relpos.engines import dense
from relpos.engines.call import Call


@dataclass(frozen=True, eq=False)
class Work:
    """What the operator does: a call whose rotation has been applied and whose rules by row are dense biases.

    Attributes:
        q, k, v: `[B, H, N, D]`, `[B, G, M, D]`, `[B, G, M, V]`: what meets in the content product, and the values.
        plain_q, plain_k: unrotated, where vectors meet them and they differ from q and k; else None.
        terms: biases, vectors, a soft cap, sinks.
        mask: or None.
        scale: of the content product.
        dropout: probability; seed: or None.
        first_row: the number of the first query, for dropout.
        tokens: where the batch is made of C stretches of n tokens for each of its elements, their numbers, for dropout.
    """

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M V"]
    plain_q: Float[Tensor, "B H N D"] | None
    plain_k: Float[Tensor, "B _ M D"] | None
    terms: Terms
    mask: Mask | None
    scale: float
    dropout: float
    seed: Int[Tensor, ""] | None
    first_row: int
    tokens: Int[Tensor, "C n"] | None = None


_APPLIED = (Rotation, QueryBias, Scale, RowRule)
_MEETS_PLAIN = (LineVectors, AxisVectors)


def work_of(call: Call, rotate: Callable[..., Tensor] = rotate) -> Work:
    """The call with its rotation and query bias applied; its rules by row are left to the engine.

    Args:
        rotate: what applies the rotation, for an engine that has its own.
    """
    q, k, v = call.q, call.k, call.v
    plain_q = plain_k = None
    rotation = call.terms.one(Rotation)
    if rotation is not None or call.terms.one(QueryBias) is not None:
        if any(isinstance(term, _MEETS_PLAIN) for term in call.terms):
            plain_q, plain_k = q, k
        a_head = rotation is not None and rotation.key is not None and rotation.key.shape[1] != 1
        magnitudes = None if rotation is None else rotation.key_magnitude
        if a_head or (magnitudes is not None and magnitudes.shape[1] != 1):
            k, v = k.repeat_interleave(call.groups, dim=1), v.repeat_interleave(call.groups, dim=1)
        q, k = dense.content(call.terms, q, k, rotate)
    terms = Terms(*(term for term in call.terms if not isinstance(term, _APPLIED)))
    return Work(q, k, v, plain_q, plain_k, terms, call.mask, call.scale, call.dropout, call.seed, 0)


def of_nothing(call: Call) -> tuple[Tensor, Tensor]:
    """The result of no batch, queries or keys: zeros, to which gradients lead all the same."""
    leaves = (call.q, call.k, call.v, *pytree.tree_leaves(call.terms))
    learned = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
    nothing = sum(x.reshape(-1)[:0].sum() for x in learned)
    out = (call.q.new_zeros(*call.q.shape[:3], call.v.shape[3]) + nothing).to(call.q.dtype)
    lse = at_least_float32(call.q).new_full(call.q.shape[:3], -torch.inf) + nothing
    sinks = call.terms.one(Sinks)
    return out, lse if sinks is None else lse.logaddexp(sinks.logits.to(lse.dtype)[:, None])


_NODES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        AxisVectors, Blocks, DenseBias, Layout, LineBias, Lines, LineVectors, LowRank, Mask, Ramp, Sinks, Softcap,
        Terms, Work,
    )
}  # fmt: skip


Packed = tuple[list[Tensor], list[int], str]
"""Tensors, each once; integers; and the structure that holds both."""


def pack(work: Work) -> Packed:
    """The work as an operator takes it."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = _take_apart(work, tensors, numbers)
    return tensors, numbers, str(structure)


def _take_apart(node: Any, tensors: list[Tensor], numbers: list[int]) -> Any:
    if isinstance(node, Tensor):
        for place, known in enumerate(tensors):
            if known is node:
                return ("Tensor", place)
        tensors.append(node)
        return ("Tensor", len(tensors) - 1)
    if isinstance(node, tuple):
        return ("tuple", *(_take_apart(x, tensors, numbers) for x in node))
    if is_dataclass(node):
        parts = (getattr(node, field.name) for field in fields(node))
        return (type(node).__name__, *(_take_apart(part, tensors, numbers) for part in parts))
    if node is None or isinstance(node, str | bool):
        return node
    if isinstance(node, float | torch.SymFloat):
        return node.__float__()  # one number, where a compiler makes symbols of numbers
    numbers.append(node)
    return ("int", len(numbers) - 1)


def unpack(tensors: list[Tensor], numbers: list[int], structure: str) -> Work:
    """The work again. What was checked when the terms were made is not checked twice."""
    work: Work = _put_together(_read(structure), tensors, numbers)
    return work


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
    cls = _NODES[kind]
    made: Any = object.__new__(cls)
    for field, value in zip(fields(cls), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made
