"""Which tokens see and are visible, against the dense mask."""

from typing import Any

import pytest
import torch
from drawn_masks import made, masks
from hypothesis import given

from relpos import Mask, patterns
from relpos.core.visibility import hides_nothing, visible_tokens


def check(mask: Mask, n: int, m: int) -> None:
    whole = mask.dense(n, m)
    rows, columns = visible_tokens(mask, n, m, torch.device("cpu"))
    assert not hides_nothing(mask, n, m) or (rows.all() and columns.all())
    for ours, exact in ((rows, whole.any(dim=3)), (columns, whole.any(dim=2))):
        assert torch.equal(*torch.broadcast_tensors(ours, exact))


@given(masks())
def test_every_mask(case: tuple[dict[str, Any], int, int]) -> None:
    parts, n, m = case
    check(made(parts), n, m)


@pytest.mark.parametrize("at_once", [1, 50])
def test_blocks_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relpos.core.visibility._AT_ONCE", at_once)
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
    rows, columns = visible_tokens(mask, 3, 3, torch.device("cpu"))
    assert rows is columns
    check(mask, 3, 3)


def test_the_ends_of_the_integers() -> None:
    most = torch.iinfo(torch.int64)
    low, high = torch.tensor([most.min, 2]), torch.tensor([most.max, most.max])
    check(Mask(low=low, high=high, key_order=torch.arange(3), query_order=torch.arange(2)), 2, 3)
