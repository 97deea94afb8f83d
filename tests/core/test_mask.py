"""Masks: O(N) structure against the sentence that defines it, pair by pair."""

import itertools
import math
from typing import Any

import pytest
import torch
from drawn_masks import BATCH, HEADS, made, masks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from relpos import Blocks, Mask


def meaning(mask: Mask, queries: int, keys: int) -> torch.Tensor:
    """The head of core/mask.py, word by word."""

    def read(x: torch.Tensor | None, b: int, i: int, default: Any) -> Any:
        if x is None:
            return default
        return int(x[i]) if x.dim() == 1 else int(x[0 if x.shape[0] == 1 else b, i])

    out = torch.zeros(BATCH, HEADS, queries, keys, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(BATCH), range(HEADS), range(queries), range(keys)):
        mine, theirs = read(mask.query_segments, b, i, 0), read(mask.key_segments, b, j, 0)
        segment = mine == theirs and mine >= 0
        own, order = read(mask.query_order, b, i, i), read(mask.key_order, b, j, j)
        low, high = read(mask.low, b, i, -math.inf), read(mask.high, b, i, math.inf)
        inside = low <= order <= high
        inside = inside and (mask.left is None or own - mask.left <= order)
        inside = inside and (mask.right is None or order <= own + mask.right)
        lifted = read(mask.query_global, b, i, 0) or read(mask.key_global, b, j, 0)
        within = mask.limit is None or order <= own + mask.limit
        block = True
        if mask.blocks is not None:
            layout, size = mask.blocks.layout, mask.blocks.size
            block = bool(layout[0 if layout.shape[0] == 1 else h, i // size, j // size])
        out[b, h, i, j] = segment and (inside or bool(lifted)) and within and block
    return out


@given(masks())
def test_dense_meaning(drawn: tuple[dict[str, Any], int, int]) -> None:
    parts, queries, keys = drawn
    mask = made(parts)
    dense, wanted = mask.dense(queries, keys), meaning(mask, queries, keys)
    assert torch.equal(dense.expand_as(wanted), wanted)
    if not mask.may_blank_rows:
        assert wanted.any(dim=-1).all()


@given(st.data())
def test_dense_of_a_part_is_a_part_of_dense(data: st.DataObject) -> None:
    parts, queries, keys = data.draw(masks())
    mask = made(parts)
    size = 1 if mask.blocks is None else mask.blocks.size
    rows, columns = (
        slice(start, data.draw(st.integers(start + 1, count)))
        for count in (queries, keys)
        for start in [size * data.draw(st.integers(0, (count - 1) // size))]
    )
    dense = mask.narrow(rows, columns).dense(rows.stop - rows.start, columns.stop - columns.start)
    assert torch.equal(dense, mask.dense(queries, keys)[:, :, rows, columns])


def test_narrow_keeps_the_plain_causal_mask_on_the_diagonal() -> None:
    assert Mask.causal().narrow(slice(2, 5), slice(2, 5)).is_plain_causal
    assert Mask.window(2, 1).narrow(slice(2, 5), slice(2, 5)).query_order is None
    below = Mask.causal().narrow(slice(2, 5), slice(0, 5))
    assert torch.equal(below.dense(3, 5), Mask.causal().dense(5, 5)[:, :, 2:])


def test_narrow_knows_the_counts_where_a_tensor_does() -> None:
    mask = Mask.packed(torch.tensor([0, 0, 1, 1])) & Mask.causal()
    whole = mask.dense(4, 4)
    assert torch.equal(mask.narrow(slice(-2, None), slice(None)).dense(2, 4), whole[:, :, 2:])
    assert torch.equal(mask.narrow(slice(None), slice(None)).dense(4, 4), whole)
    assert Mask().narrow(slice(None), slice(3, None)).dense(2, 2).all()
    layout = Blocks(torch.tensor([[[True, False, True], [False, True, True]]]), 2)
    cut = Mask(blocks=layout).narrow(slice(2, None), slice(2, None))
    assert torch.equal(cut.dense(2, 3), Mask(blocks=layout).dense(4, 5)[:, :, 2:, 2:])


def test_narrow_knows_the_counts_where_a_boolean_tensor_does() -> None:
    allowed = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.7
    order = {"query_order": torch.arange(6), "key_order": torch.arange(8)}
    both = Mask.causal() & Mask.of(allowed)
    whole = (Mask.causal(**order) & Mask.of(allowed)).dense(6, 8)
    assert torch.equal(both.narrow(slice(2, None), slice(None)).dense(4, 8), whole[:, :, 2:])
    assert torch.equal(both.narrow(slice(-2, None), slice(3, None)).dense(2, 5), whole[:, :, -2:, 3:])
    rows = Mask.of(allowed[:, :1])  # of keys it says nothing
    assert torch.equal(rows.narrow(slice(-2, None), slice(5, 20)).dense(2, 15), rows.dense(6, 20)[:, :, -2:, 5:])
    on_meta = Mask.causal() & Mask.of(allowed.to("meta"))
    assert on_meta.narrow(slice(2, None), slice(None)).query_order.is_meta  # type: ignore[union-attr]


def test_narrow_makes_orders_where_it_is_told() -> None:
    mask = Mask.causal().narrow(slice(1, 3), slice(0, 3), device=torch.device("meta"))
    assert mask.query_order.is_meta  # type: ignore[union-attr]
    assert mask.key_order.is_meta  # type: ignore[union-attr]
    low = Mask(low=torch.zeros(3, device="meta", dtype=torch.long)).narrow(slice(1, 3), slice(0, 2))
    assert low.key_order.is_meta  # type: ignore[union-attr]


@given(st.data())
def test_and_is_both(data: st.DataObject) -> None:
    bound = st.none() | st.integers(0, 4)
    n = data.draw(st.integers(1, 6))

    def numbers() -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(st.integers(-1, 4), min_size=n, max_size=n)))

    def interval() -> Mask:
        low, high = (numbers() if data.draw(st.booleans()) else None for _ in range(2))
        return Mask(left=data.draw(bound), right=data.draw(bound), low=low, high=high)

    masks = [interval(), interval(), Mask.packed(numbers())]
    if data.draw(st.booleans()):
        masks.append(Mask(blocks=Blocks(torch.rand(1, n, n) < 0.5, 1)))
    joined = masks[0]
    for mask in masks[1:]:
        joined = joined & mask
    wanted = torch.stack([mask.dense(n, n).expand(1, 1, n, n) for mask in masks]).all(dim=0)
    assert torch.equal(joined.dense(n, n), wanted)


@given(st.data())
def test_a_bound_on_the_right_holds_for_the_globals_of_another_mask(data: st.DataObject) -> None:
    n, bound = data.draw(st.integers(1, 6)), st.none() | st.integers(0, 3)
    bits = st.lists(st.booleans(), min_size=n, max_size=n)
    rows, columns = torch.tensor(data.draw(bits)), torch.tensor(data.draw(bits))
    with_globals = Mask(left=data.draw(bound), right=data.draw(bound), query_global=rows, key_global=columns)
    ahead = Mask.window(None, data.draw(st.integers(0, 3)))
    wanted = with_globals.dense(n, n) & ahead.dense(n, n)
    for joined in (with_globals & ahead, ahead & with_globals, ahead & with_globals & ahead):
        assert torch.equal(joined.dense(n, n), wanted)


def test_named_masks() -> None:
    n = 5
    i, j = torch.arange(n)[:, None], torch.arange(n)
    segments = torch.tensor([0, 0, 1, 1, -1])
    for mask, wanted in (
        (Mask(), torch.ones(n, n).bool()),
        (Mask.causal(), j <= i),
        (Mask.window(2, 1), (i - 2 <= j) & (j <= i + 1)),
        (Mask.window(None, 0), j <= i),
        (Mask.packed(segments), (segments[:, None] == segments) & (segments >= 0)[:, None]),
    ):
        assert torch.equal(mask.dense(n, n)[0, 0], wanted)
    assert torch.equal(Mask.causal(torch.arange(3, 5), j).dense(2, n)[0, 0], (j <= i)[3:]), "with a cache"
    valid = torch.tensor([[True, False, True], [False, True, True]])
    assert torch.equal(Mask.padding(valid).dense(3, 3)[:, 0], valid[:, :, None] & valid[:, None, :])
    seen = Mask.padding(valid, queries=torch.ones(4, dtype=torch.bool)).dense(4, 3)
    assert torch.equal(seen[:, 0], valid[:, None, :].expand(2, 4, 3))


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (Mask.causal(), "query_order and key_order"),
        (Mask.causal(torch.arange(3)), "key_order"),
        (Mask(low=torch.zeros(3).int()), "key_order"),
        (Mask(right=0, key_order=torch.arange(5)), "query_order"),
    ],
)
def test_order_is_asked_for_where_lengths_differ(mask: Mask, names: str) -> None:
    with pytest.raises(ValueError, match=rf"expected {names} for"):
        mask.dense(3, 5)


def test_an_interval_by_tensors_needs_no_order_of_queries() -> None:
    mask = Mask(low=torch.tensor([0, 2]), high=torch.tensor([1, 4]), key_order=torch.arange(5))
    assert mask.dense(2, 5)[0, 0].int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("mask", "plain", "blanks"),
    [
        (Mask.causal(), True, False),
        (Mask.causal(torch.arange(3)), False, None),
        (Mask.window(1, 0), False, False),
        (Mask.packed(torch.tensor([0, -1])), False, True),
        (Mask(left=-1), False, True),
        (Mask(right=-1), False, True),
        (Mask(left=2, right=-3), False, True),
    ],
)
def test_plain_causal_and_blank_rows(mask: Mask, plain: bool, blanks: bool | None) -> None:
    assert mask.is_plain_causal is plain
    assert blanks is None or mask.may_blank_rows is blanks


def test_no_tensor_of_a_mask_is_n_by_m() -> None:
    n = 512
    mask = Mask.window(3, 0) & Mask.packed(torch.zeros(n).int())
    tensors = [leaf for leaf in pytree.tree_leaves(mask) if isinstance(leaf, torch.Tensor)]
    assert [tensor.numel() for tensor in tensors] == [n, n]


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_segments_of_new_tokens_are_told_as_padding_tells_them(batch: int | None) -> None:
    segments = torch.tensor([0, 0, 1, 1, -1, 1])
    segments = segments if batch is None else segments.repeat(batch, 1)
    new = Mask.packed(segments, queries=segments[..., 4:])
    assert torch.equal(new.dense(2, 6), Mask.packed(segments).dense(6, 6)[:, :, 4:])
    assert torch.equal(new.dense(2, 6), Mask.packed(segments[..., 4:], segments).dense(2, 6))
    valid = segments >= 0
    alike = Mask.packed(valid.int() - 1, queries=(valid.int() - 1)[..., 4:])
    assert torch.equal(alike.dense(2, 6), Mask.padding(valid, queries=valid[..., 4:]).dense(2, 6))


def test_tensors_of_unlike_pairs_are_not_joined() -> None:
    own, other = (torch.ones(1, 1, *size).bool() for size in ((4, 6), (4, 5)))
    with pytest.raises(ValueError, match="expected tensors for the same pairs in two masks"):
        Mask(allowed=own) & Mask(allowed=other)
    row = torch.tensor([True, False, True, True, True, False])[None, None, None]
    assert torch.equal((Mask(allowed=own) & Mask(allowed=row)).dense(4, 6)[0, 0], row[0, 0].expand(4, 6))
