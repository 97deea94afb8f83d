"""Which tokens see and are seen, against the mask written out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from relpos import Blocks, Mask, patterns
from relpos.core.seen import hides_nothing, seen


@st.composite
def masks(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """What any mask is made of: orders, bounds and intervals, segments, globals, a limit and blocks, each or not."""
    n = draw(st.integers(1, 9))
    m = draw(st.one_of(st.just(n), st.integers(1, 9)))
    batch = draw(st.integers(1, 3))

    def tensor(count: int, low: int, high: int) -> torch.Tensor:
        shape = (count,) if draw(st.booleans()) else (draw(st.sampled_from((1, batch))), count)
        size = count if len(shape) == 1 else shape[0] * count
        values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return torch.tensor(values, dtype=draw(st.sampled_from((torch.int32, torch.int64)))).view(shape)

    def some(count: int, low: int, high: int) -> torch.Tensor | None:
        return tensor(count, low, high) if draw(st.booleans()) else None

    bounds = {name: draw(st.none() | st.integers(-2, 3)) for name in ("left", "right", "limit")}
    parts: dict[str, Any] = {"low": some(n, -2, 8), "high": some(n, 0, 11)}
    ordered = n != m or draw(st.booleans())
    if ordered:
        parts |= {"query_order": tensor(n, -1, 8), "key_order": tensor(m, -1, 8)}
    if draw(st.booleans()):
        parts |= {"query_segments": tensor(n, -1, 2), "key_segments": tensor(m, -1, 2)}
        if n == m and draw(st.booleans()):
            parts["key_segments"] = parts["query_segments"]
    for name, count in (("query_global", n), ("key_global", m)):
        chosen = some(count, 0, 1)
        parts[name] = None if chosen is None else chosen.bool()
    parts |= bounds
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        shape = (draw(st.integers(1, 2)), -(-n // size), -(-m // size))
        count = shape[0] * shape[1] * shape[2]
        layout = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        parts["blocks"] = layout.view(shape), size
    return parts, n, m


def check(mask: Mask, n: int, m: int) -> None:
    whole = mask.dense(n, m)
    rows, columns = seen(mask, n, m, torch.device("cpu"))
    if hides_nothing(mask, n, m):
        assert rows.all()
        assert columns.all()
    for ours, exact in ((rows, whole.any(dim=3)), (columns, whole.any(dim=2))):
        assert torch.equal(*torch.broadcast_tensors(ours, exact))


@given(masks())
def test_every_mask(case: tuple[dict[str, Any], int, int]) -> None:
    parts, n, m = case
    if "blocks" in parts:
        parts["blocks"] = Blocks(*parts["blocks"])
    check(Mask(**parts), n, m)


@pytest.mark.parametrize("at_once", [1, 50])
def test_blocks_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relpos.core.seen._AT_ONCE", at_once)
    mask = patterns.big_bird(41, 4, window=1, global_blocks=0, random_blocks=1, heads=3) & Mask.causal()
    check(mask & Mask.packed(torch.arange(41) % 5 - 1, torch.arange(41) % 3 - 1), 41, 41)


@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(),
        Mask.window(2, 0),
        patterns.longformer(12, 3, [0]),
        patterns.big_bird(12, 4) & Mask.causal(),
        Mask(left=0, right=0, key_global=torch.arange(12) > 3),
    ],
    ids=["causal", "window", "longformer", "big bird", "globals"],
)
def test_tokens_that_see_themselves_are_known(mask: Mask) -> None:
    assert hides_nothing(mask, 12, 12)
    check(mask, 12, 12)


def test_padding_is_read_off() -> None:
    mask = Mask.padding(torch.tensor([[True, True, False], [True, False, False]])) & Mask.causal()
    found = seen(mask, 3, 3, torch.device("cpu"))
    assert found[0] is found[1]
    check(mask, 3, 3)


def test_the_ends_of_the_integers() -> None:
    most = torch.iinfo(torch.int64)
    check(Mask(low=torch.tensor([most.min, 2]), high=torch.tensor([most.max, most.max]), key_order=torch.arange(3),
               query_order=torch.arange(2)), 2, 3)  # fmt: skip
