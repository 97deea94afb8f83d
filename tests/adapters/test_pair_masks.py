"""Masks of all pairs as the interval of keys that each query sees, or as documents."""

import pytest
import torch

import relpos
from relpos.adapters.common.pair_masks import mask_of_documents, mask_of_pairs

N = 7
AT = torch.arange(N)
SEEN = {
    "causal": AT[:, None] >= AT,
    "chunks": (AT[:, None] // 3 >= AT // 3) & (AT[:, None] // 3 - 1 <= AT // 3),
    "padded": (AT[:, None] < 5) & (AT < 5),
    "late": AT.expand(N, N) >= 2,
    "nothing": torch.zeros(N, N, dtype=torch.bool),
}


@pytest.mark.parametrize("name", SEEN)
def test_intervals(name: str) -> None:
    hidden = torch.stack([~SEEN[name], ~SEEN["causal"]])
    mask = mask_of_pairs(hidden, N)
    assert mask is not None
    assert mask.allowed is None
    assert torch.equal(mask.dense(N, N)[:, 0], ~hidden)


def test_keys() -> None:
    hidden = torch.tensor([[[False, True, False, True]], [[False] * 4]])  # not consecutive: by key they may be so
    mask = mask_of_pairs(hidden, 4)
    assert mask is not None
    assert torch.equal(mask.dense(4, 4)[:, 0], ~hidden.expand(-1, 4, -1))


def test_a_query_with_a_gap_is_not_served() -> None:
    hidden = ~SEEN["causal"][None].repeat(2, 1, 1)
    assert mask_of_pairs(hidden, N) is not None
    hidden[1, 5, 2] = True  # after it was read
    assert mask_of_pairs(hidden, N) is None
    assert mask_of_pairs(hidden[:1], N) is not None
    assert mask_of_pairs(hidden, N + 1) is None


def test_a_mask_is_read_once() -> None:
    hidden = ~SEEN["causal"][None]
    assert mask_of_pairs(hidden, N) is mask_of_pairs(hidden, N)
    with torch.inference_mode():
        hidden = hidden.clone()
        first = mask_of_pairs(hidden, N)
        hidden[0, 5, 2] = True
        assert first is not None
        assert mask_of_pairs(hidden, N) is None


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_read_is_the_one_that_came(window: int | None, dtype: torch.dtype) -> None:
    """Of documents, and of every mask that differs from theirs by a pair."""
    n, lengths = 6, (1, 3, 2)
    of_token = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (of_token[:, None] == of_token) & (distance >= 0) & (distance < (window or n))
    found = 0
    for pair in range(n * n + 1):
        changed = seen.flatten().clone()
        if pair < n * n:
            changed[pair] = ~changed[pair]
        changed = changed.view(1, 1, n, n)
        lowest = torch.finfo(torch.float32).min
        given = changed if dtype == torch.bool else torch.where(changed, 0.0, lowest)
        mask = mask_of_documents(given, window)
        found += mask is not None
        if mask is not None:
            zero = torch.zeros(1, 1, n, 2)
            assert torch.equal(relpos.attention_weights(zero, zero, mask=mask) > 0, changed)
            assert mask_of_documents(given, window) is mask, "read once"
    assert mask is not None
    assert found < n
    assert mask_of_documents(torch.where(changed, 0.0, -1e4), window) is None
    changed[0, 0, 3, 3], changed[0, 0, 3, 4] = False, True  # as many as it was, from where it was
    assert mask_of_documents(changed, window) is None
