"""How tensors lie in memory changes no result: the streaming engine against the definition."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_steps import assert_accurate, step
from torch import Tensor

from covering import pairwise
from relpos import Grid, LineBias, LineVectors, Mask, Sequence, lines
from relpos.engines.streaming.cpu import cpu_kernel
from relpos.engines.streaming.plan import planning

FAST_CASES = 2  # of each of its tests, in the fast part

B, H, N, D = 2, 4, 37, 8


def in_order(*axes: int) -> Callable[[Tensor], Tensor]:
    """The axes from the slowest to the fastest in memory."""
    back = [axes.index(axis) for axis in range(4)]
    return lambda x: x.permute(axes).contiguous().permute(back)


def part_of(axis: int, step: int, behind: int) -> Callable[[Tensor], Tensor]:
    """A slice along one axis of a tensor that is NaN elsewhere."""

    def laid(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[axis] = behind + shape[axis] * step
        return x.new_full(shape, torch.nan).movedim(axis, 0)[behind::step].movedim(0, axis).copy_(x)

    return laid


def one_along(*axes: int) -> Callable[[Tensor], Tensor]:
    """The first along some axes, expanded: strides of 0."""

    def laid(x: Tensor) -> Tensor:
        first = x
        for axis in axes:
            first = first.narrow(axis, 0, 1)
        return first.clone().expand(x.shape)

    return laid


CONVOLUTION = "tokens last, as a 1 x 1 convolution has them"
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads behind tokens": in_order(0, 2, 1, 3),
    CONVOLUTION: in_order(0, 1, 3, 2),
    "heads last": in_order(0, 2, 3, 1),
    "width behind the batch": in_order(0, 3, 1, 2),
    "batch last": in_order(1, 2, 3, 0),
    "every other number": part_of(3, 2, 0),
    "every third token": part_of(2, 3, 0),
    "a part of the width": part_of(3, 1, 5),
    "some tokens": part_of(2, 1, 1),
    "some heads": part_of(1, 1, 3),
    "one token": one_along(2),
    "one number": one_along(3),
    "one head": one_along(0, 1),
    "rows that overlap": lambda x: x.flatten().as_strided(x.shape, (5, 7, 3, 1)),
}
ANEW = {"one token", "one number", "one head", "rows that overlap"}
"""Layouts that change the numbers, to some whose gradients cancel: they are those of one tensor at a time."""


LINE, GRID = lines(Sequence(N - 2, prefix=2)), lines(Grid(5, 7, prefix=2))
KEYS = lines(Sequence(N))
BIAS = (lambda x: LineBias(x, LINE)), [(H, LINE.length)]
NEAR = (torch.arange(KEYS.length) - N + 1).clamp(-4, 4) + 4


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, Any]]] = {
    "bias": (*BIAS, {}),
    "bias, one batch": (*BIAS, {"batch": 1}),
    "bias, causal": (*BIAS, {"mask": Mask.causal()}),
    "bias, bfloat16": (*BIAS, {"dtype": torch.bfloat16}),
    "bias, float64": (*BIAS, {"dtype": torch.float64}),
    "bias, one number wide": (*BIAS, {"width": 1, "values_width": 1}),
    "grouped": (*BIAS, {"groups": 2}),
    "grouped, one head, bfloat16": (*BIAS, {"groups": 1, "batch": 1, "dtype": torch.bfloat16}),
    "narrow values": (*BIAS, {"values_width": 5}),
    "scattered segments": (*BIAS, {"mask": Mask.packed(torch.arange(N) % 3)}),
    "a grid": (lambda x: LineBias(x, GRID), [(H, GRID.length)], {}),
    "vectors": (lambda x: LineVectors(x, None, KEYS, "key"), [(1, KEYS.length, D)], {}),
    "few vectors": (lambda x: LineVectors(x, NEAR, KEYS, "key"), [(1, 9, D)], {}),
    "a window alone": (lambda: None, [], {"mask": Mask.window(9, 2), "batch": 1}),
}


FAST = ("bias, one batch", "bias, causal", "bias, one number wide", "grouped")
ROWS = pairwise(CALLS, LAYOUTS, ((0,), (1,), (2,), (3,), (0, 1, 2, 3)))
ROWS += [row for row in itertools.product(CALLS, [CONVOLUTION], ((1,), (2,), (0, 1, 2, 3))) if row not in ROWS]
"""Which call, which layout, and which of q, k, v and the output's gradient lie so."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CALLS])
def test_every_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of q, k, v and the output's gradient lies so, or all of them do: as near to the definition as the same engine
    is on dense tensors, which other files hold to the definition's own rounding."""
    for module, constant in ((planning, "ROWS"), (planning, "_NATIVE_ROWS"), (cpu_kernel, "_CAUSAL_ROWS")):
        monkeypatch.setattr(module, constant, 16)
    position, shapes, given = CALLS[name]
    dtype, batch, groups = given.get("dtype", torch.float32), given.get("batch", B), given.get("groups", H)
    width = given.get("width", D)
    values_width = given.get("values_width", width)
    sizes = (
        (batch, H, N, width),
        (batch, groups, N, width),
        (batch, groups, N, values_width),
        (batch, H, N, values_width),
    )
    plain = [torch.randn(size).to(dtype) for size in sizes]
    leaves = [torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)) for shape in shapes]
    lower = torch.float32 if dtype == torch.float64 else dtype

    def results(backend: str, tensors: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        *qkv, upstream = tensors
        return step(backend, [*qkv, *leaves], position, upstream, mask=given.get("mask"))

    for layout, which in (row[1:] for row in ROWS if row[0] == name):
        places = which[:1] if layout in ANEW else which
        laid = [LAYOUTS[layout](x) if place in places else x for place, x in enumerate(plain)]
        dense = [x.contiguous() for x in laid]
        exact = results("reference", [x.double() for x in dense], [x.double() for x in leaves])
        cost = results("streaming", [x.to(lower) for x in dense], [x.float() for x in leaves])
        mine = results("streaming", laid, leaves)
        assert_accurate(mine, exact, cost, dtype, terms=1.0, what=f"{layout} {places}")
