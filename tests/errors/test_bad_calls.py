"""Whatever stands for one argument of a pattern or of a plain attention, the call works or gives one clear line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ingredients import META, x

from relpos import (
    CoPE,
    Grid,
    Mask,
    MultiHeadAttention,
    RowRule,
    Sequence,
    attention,
    explain,
    flash_attention,
    linear_attention,
    patterns,
)

ANYTHING: list[Any] = [
    None, "x", b"x", 1.5, float("nan"), 3 + 4j, True, 0, -1, 7, int, object(), lambda: 1,
    [], (), {}, [1], (1,), (1, 2), (0, 0), (1.5, 2), ("a", "b"), [0.5], ["a"], [-1], [99], [True],
    torch.zeros(3), torch.tensor(2), torch.tensor([0.5]), torch.tensor([True, False]), torch.ones(2, 2).bool(),
    torch.zeros(2, 3, 4), torch.zeros(2, 6, 3), torch.zeros(0, 6, 3), torch.zeros(2, 6, 3, dtype=torch.long),
    Grid(2, 3), Grid(2, 3, prefix=1), Sequence(6),
]  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "local": (patterns.local, {"window_size": 3, "causal": False}),
    "dilated": (patterns.dilated, {"length": 6, "window_size": 3, "dilation": 2, "causal": False}),
    "fixed": (patterns.fixed, {"length": 6, "stride": 3, "summaries": 1, "causal": False}),
    "strided": (patterns.strided, {"length": 6, "stride": 3, "causal": False}),
    "longformer": (patterns.longformer, {"length": 6, "window_size": 3, "global_tokens": [0]}),
    "block_sparse": (patterns.block_sparse, {"layout": torch.ones(2, 2).bool(), "size": 3}),
    "big_bird": (
        patterns.big_bird,
        {"length": 12, "size": 2, "window": 3, "global_blocks": 1, "random_blocks": 1, "heads": 2, "seed": 0},
    ),
    "windows": (patterns.windows, {"grid": Grid(4, 6), "size": (2, 3), "shift": (1, 1)}),
    "partition": (patterns.partition, {"x": torch.zeros(2, 4, 6, 3), "size": (2, 3), "shift": (1, 1)}),
    "join": (patterns.join, {"x": torch.zeros(8, 6, 3), "grid": Grid(4, 6), "size": (2, 3), "shift": (1, 1)}),
    "linear_attention": (
        linear_attention,
        {
            "q": x(), "k": x(), "v": x(), "feature_map": "elu", "causal": True, "position": None,
            "decay": torch.ones(4), "normalize": True, "form": "chunked", "chunk": 2,
        },
    ),
    "flash_attention": (
        flash_attention,
        {"q": x(), "k": x(), "v": x(), "bias": None, "causal": True, "scale": 1.0, "block_size": 2},
    ),
}  # fmt: skip


def one_line(error: Exception) -> bool:
    return re.fullmatch(r"expected .+; got .+\. .+\S", str(error)) is not None


@pytest.mark.parametrize(("name", "argument"), [(name, own) for name, (_, given) in CALLS.items() for own in given])
def test_anything_in_place_of_an_argument(name: str, argument: str) -> None:
    call, given = CALLS[name]
    call(**given)
    refused = 0
    for other in ANYTHING:
        try:
            call(**{**given, argument: other})
        except (ValueError, NotImplementedError) as error:
            assert one_line(error), (other, error)  # noqa: PT017
            refused += 1
    assert refused > len(ANYTHING) / 2


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "join: other windows": (
        lambda: patterns.join(torch.zeros(7, 6, 3), Grid(4, 6), (2, 3)),
        "windows of (2, 3) cells on Grid(4, 6), 4 for each element of the batch; got a tensor of shape (7, 6, 3)",
    ),
    "join: other cells": (
        lambda: patterns.join(torch.zeros(8, 5, 3), Grid(4, 6), (2, 3)),
        "tokens of windows [W, 6, E]; got a tensor of shape (8, 5, 3)",
    ),
    "join: prefix": (
        lambda: patterns.join(torch.zeros(8, 6, 3), Grid(4, 6, prefix=1), (2, 3)),
        "a grid without a prefix; got Grid(4, 6, prefix=1)",
    ),
    "windows: size": (
        lambda: patterns.windows(Grid(4, 6), 2.0),  # type: ignore[arg-type]
        "a size for each of 2 axes; got float 2.0",
    ),
    "longformer: a mask": (
        lambda: patterns.longformer(2, 3, torch.tensor([True, False])),
        "global_tokens as integers, such as [0]; got a tensor of shape (2,) and dtype bool",
    ),
    "longformer: fractions": (
        lambda: patterns.longformer(6, 3, [0.5]),  # type: ignore[list-item]
        "global_tokens as integers, such as [0]; got list [0.5]",
    ),
    "big_bird: seed": (
        lambda: patterns.big_bird(12, 2, seed=1.0),  # type: ignore[arg-type]
        "seed to be an integer of at most 64 bits; got float 1.0",
    ),
    "big_bird: a large seed": (
        lambda: patterns.big_bird(12, 2, seed=2**64),
        "seed to be an integer of at most 64 bits; got int 18446744073709551616",
    ),
    "flash: scale": (lambda: flash_attention(x(), x(), x(), scale=float("nan")), "scale to be a number above 0; got"),
    "flash: dtypes": (
        lambda: flash_attention(x(), x().double(), x()),
        "q, k and v in one dtype; got torch.float32, torch.float64 and torch.float32",
    ),
    "flash: devices": (lambda: flash_attention(x(), x(), x(device=META)), "q, k and v on one device; got cpu, cpu and"),
    "linear: dtypes": (
        lambda: linear_attention(x(), x(), x().double()),
        "q, k and v in one dtype; got torch.float32, torch.float32 and torch.float64",
    ),
    "linear: devices": (lambda: linear_attention(x(), x(device=META), x()), "q, k and v on one device; got cpu, meta"),
    "linear: decay dtype": (
        lambda: linear_attention(x(), x(), x(), causal=True, decay=torch.ones(4).bool()),
        "a tensor with one decay a query head, [4], in floating point; got a tensor of shape (4,) and dtype bool",
    ),
    "linear: decay device": (
        lambda: linear_attention(x(), x(), x(), causal=True, decay=torch.ones(4, device=META)),
        "the decay on cpu; got meta",
    ),
    "CoPE: width": (
        lambda: attention(x(width=16), x(width=16), x(), position=CoPE(8), queries=Sequence(6)),
        "heads 8 wide for this RowRule; got 16",
    ),
    "CoPE: explain": (
        lambda: explain(x(width=4), x(width=4), x(), position=CoPE(8), queries=Sequence(6), mask=Mask.causal()),
        "heads 8 wide for this RowRule; got 4",
    ),
    "CoPE: layer": (
        lambda: MultiHeadAttention(32, 2, position=CoPE(8))(torch.zeros(1, 6, 32)),
        "heads 8 wide for this RowRule; got 16",
    ),
    "RowRule: width": (
        lambda: RowRule(lambda q, k, allowed, rows: allowed, width=0),
        "RowRule width to be an integer of at least 1; got int 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    call, expected = WRONG[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"expected {expected}")) as caught:
        call()
    assert one_line(caught.value)


def test_every_seed_of_64_bits_will_do() -> None:
    for seed in (-(2**63), -1, 0, 2**64 - 1):
        patterns.big_bird(12, 2, seed=seed)


def test_cope_keeps_its_width_when_it_is_cut() -> None:
    (term,) = CoPE(8).terms(Sequence(6)).of(RowRule)
    assert term.narrow(slice(2, 4), slice(0, 6)).width == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", [linear_attention, flash_attention])
def test_dtypes_may_differ_where_autocast_makes_them_one(call: Callable[..., Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(x(), x(), x().bfloat16())
