"""Masks: O(N) structure against the sentence that defines it, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from relpos import Blocks, Mask


def meaning(mask: Mask, queries: int, keys: int, batch: int, heads: int) -> torch.Tensor:
    """The head of core/mask.py, word by word."""

    def read(x: torch.Tensor | None, b: int, i: int, default: int | None) -> int | None:
        if x is None:
            return default
        return int(x[i]) if x.dim() == 1 else int(x[0 if x.shape[0] == 1 else b, i])

    out = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    mine = read(mask.query_segments, b, i, 0)
                    theirs = read(mask.key_segments, b, j, 0)
                    segment = mine == theirs and mine is not None and mine >= 0
                    order = read(mask.key_order, b, j, j)
                    own = read(mask.query_order, b, i, i)
                    assert order is not None
                    assert own is not None
                    inside = True
                    if mask.left is not None:
                        inside = inside and own - mask.left <= order
                    if mask.right is not None:
                        inside = inside and order <= own + mask.right
                    low, high = read(mask.low, b, i, None), read(mask.high, b, i, None)
                    inside = inside and (low is None or low <= order) and (high is None or order <= high)
                    lifted = read(mask.query_global, b, i, 0) or read(mask.key_global, b, j, 0)
                    within = mask.limit is None or order <= own + mask.limit
                    block = True
                    if mask.blocks is not None:
                        layout, size = mask.blocks.layout, mask.blocks.size
                        block = bool(layout[0 if layout.shape[0] == 1 else h, i // size, j // size])
                    out[b, h, i, j] = segment and (inside or bool(lifted)) and within and block
    return out


@st.composite
def masks(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """The arguments of a mask, `blocks` as layout and size, and the numbers of queries and keys."""
    queries = draw(st.integers(1, 6))
    keys = draw(st.sampled_from((queries, draw(st.integers(1, 6)))))

    def tensor(count: int, low: int, high: int) -> torch.Tensor:
        shape = draw(st.sampled_from(((count,), (1, count), (2, count))))
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(st.integers(low, high), min_size=size, max_size=size))).view(shape)

    def maybe(count: int, low: int, high: int) -> torch.Tensor | None:
        return tensor(count, low, high) if draw(st.booleans()) else None

    bound = st.none() | st.integers(0, 4)
    unequal = queries != keys
    segments = draw(st.booleans())
    size = draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 2)), -(-queries // size), -(-keys // size))
    bits = draw(st.integers(0, 2 ** math.prod(shape) - 1))
    blocks = torch.tensor([bits >> place & 1 for place in range(math.prod(shape))]).bool().view(shape)
    arguments = {
        "left": draw(bound),
        "right": draw(bound),
        "limit": draw(bound),
        "low": maybe(queries, -3, 6),
        "high": maybe(queries, -3, 6),
        "query_order": tensor(queries, -3, 6) if unequal or draw(st.booleans()) else None,
        "key_order": tensor(keys, -3, 6) if unequal or draw(st.booleans()) else None,
        "query_segments": tensor(queries, -1, 1) if segments else None,
        "key_segments": tensor(keys, -1, 1) if segments else None,
        "query_global": tensor(queries, 0, 1).bool() if draw(st.booleans()) else None,
        "key_global": tensor(keys, 0, 1).bool() if draw(st.booleans()) else None,
        "blocks": (blocks, size) if draw(st.booleans()) else None,
    }
    return arguments, queries, keys


@given(masks())
def test_dense_meaning(drawn: tuple[dict[str, Any], int, int]) -> None:
    arguments, queries, keys = drawn
    blocks = arguments.pop("blocks")
    mask = Mask(**arguments, blocks=None if blocks is None else Blocks(*blocks))
    dense = mask.dense(queries, keys)
    assert dense.shape[0] in (1, 2)
    assert dense.shape[1] in (1, 2)
    wanted = meaning(mask, queries, keys, batch=2, heads=2)
    assert torch.equal(dense.expand(2, 2, queries, keys), wanted)
    if not mask.may_blank_rows:
        assert wanted.any(dim=-1).all()


@given(st.data())
def test_dense_of_a_part_is_a_part_of_dense(data: st.DataObject) -> None:
    arguments, queries, keys = data.draw(masks())
    blocks = arguments.pop("blocks")
    mask = Mask(**arguments, blocks=None if blocks is None else Blocks(*blocks))
    size = 1 if blocks is None else blocks[1]
    rows, columns = (
        slice(start, data.draw(st.integers(start + 1, count)))
        for count in (queries, keys)
        for start in [size * data.draw(st.integers(0, (count - 1) // size))]
    )
    part = mask.narrow(rows, columns)
    dense = part.dense(rows.stop - rows.start, columns.stop - columns.start)
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
    assert torch.equal(Mask.causal().dense(n, n)[0, 0], j <= i)
    assert torch.equal(Mask.window(2, 1).dense(n, n)[0, 0], (i - 2 <= j) & (j <= i + 1))
    assert torch.equal(Mask.window(None, 0).dense(n, n)[0, 0], j <= i)
    segments = torch.tensor([0, 0, 1, 1, -1])
    same = (segments[:, None] == segments) & (segments >= 0)[:, None]
    assert torch.equal(Mask.packed(segments).dense(n, n)[0, 0], same)
    valid = torch.tensor([[True, False, True], [False, True, True]])
    assert torch.equal(Mask.padding(valid).dense(3, 3)[:, 0], valid[:, :, None] & valid[:, None, :])
    seen = Mask.padding(valid, queries=torch.ones(4, dtype=torch.bool)).dense(4, 3)
    assert torch.equal(seen[:, 0], valid[:, None, :].expand(2, 4, 3))
    assert Mask().dense(2, 3).all()


def test_causal_with_a_cache() -> None:
    mask = Mask.causal(torch.arange(3, 5), torch.arange(5))
    assert torch.equal(mask.dense(2, 5)[0, 0], torch.ones(5, 5).tril().bool()[3:])


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


def test_plain_causal_and_blank_rows() -> None:
    assert Mask.causal().is_plain_causal
    assert not Mask.causal(torch.arange(3)).is_plain_causal
    assert not Mask.window(1, 0).is_plain_causal
    assert not Mask.window(1, 0).may_blank_rows
    assert Mask.packed(torch.tensor([0, -1])).may_blank_rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mask(query_segments=torch.zeros(3).int()),
        lambda: Mask(low=torch.zeros(3)),
        lambda: Mask(query_global=torch.zeros(3).int()),
        lambda: Mask.window(-1, 0),
        lambda: Mask.padding(torch.ones(3)),
        lambda: Mask.causal() & Mask(right=0, query_order=torch.arange(3), key_order=torch.arange(3)),
        lambda: Mask.window(2, 0) & Mask(key_global=torch.ones(3).bool()),
        lambda: Mask(limit=0.0),
        lambda: Mask.packed(torch.zeros(3).int()) & Mask.packed(torch.zeros(3).int()),
        lambda: Mask(blocks=Blocks(torch.ones(1, 2, 2).bool(), 2)).dense(6, 6),
        lambda: Mask.packed(torch.zeros(4).int()).dense(3, 3),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors(make: object) -> None:
    with pytest.raises(ValueError, match=r"expected .*; got .*\. "):
        make()  # type: ignore[operator]


def test_no_tensor_of_a_mask_is_n_by_m() -> None:
    n = 512
    mask = Mask.window(3, 0) & Mask.packed(torch.zeros(n).int())
    tensors = [leaf for leaf in pytree.tree_leaves(mask) if isinstance(leaf, torch.Tensor)]
    assert [tensor.numel() for tensor in tensors] == [n, n]


def test_masks_of_other_numbers_of_queries_are_not_joined() -> None:
    three, four = (Mask(low=torch.zeros(2, n, dtype=torch.long)) for n in (3, 4))
    with pytest.raises(ValueError, match="low of as many queries in two masks; got 3 and 4"):
        three & four


@pytest.mark.parametrize("bounds", [{"left": -1}, {"right": -1}, {"left": 2, "right": -3}])
def test_a_bound_below_zero_may_blank_rows(bounds: dict[str, int]) -> None:
    assert Mask(**bounds).may_blank_rows
    assert not Mask.causal().may_blank_rows


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
    with pytest.raises(ValueError, match="expected tensors of the same pairs in two masks"):
        Mask(allowed=own) & Mask(allowed=other)
    row = torch.tensor([True, False, True, True, True, False])[None, None, None]
    assert torch.equal((Mask(allowed=own) & Mask(allowed=row)).dense(4, 6)[0, 0], row[0, 0].expand(4, 6))
