"""Dropout by counter: fair, independent of how it is drawn, and a function of the seed alone."""

import itertools

import pytest
import torch

from relpos.core.random import kept_pairs, mix_

WORD = 0xFFFFFFFF


def lowbias32(x: int) -> int:
    """Wellons' published function, in plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ (x >> 16)


def draw(seed: int, batch: int, heads: int, rows: range, columns: range, dropout: float) -> torch.Tensor:
    return kept_pairs(torch.tensor(seed), batch, heads, torch.tensor([*rows]), torch.tensor([*columns]), dropout)


def test_mix_is_the_published_function() -> None:
    words = [0, 1, 2, 0x80000000, WORD, *torch.randint(2**32, (200,)).tolist()]
    mixed = mix_(torch.tensor(words).to(torch.int32))
    assert [word & WORD for word in mixed.tolist()] == [lowbias32(word) for word in words]


def test_pairs_by_loops() -> None:
    kept = draw(2**32 - 5, 2, 3, range(4), range(5), 0.3)
    for b, h, i, j in itertools.product(range(2), range(3), range(4), range(5)):
        word = lowbias32(2**32 - 5)
        for number in (b, h, i, j):
            word = lowbias32(word ^ number)
        assert bool(kept[b, h, i, j]) == (word >= int(0.3 * 2**32))


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
def test_mean(dropout: float) -> None:
    """Within four standard deviations of a fair coin, for each of several seeds and over all."""
    means = [draw(seed, 2, 4, range(64), range(64), dropout).float().mean().item() for seed in range(8)]
    deviation = (dropout * (1 - dropout)) ** 0.5
    assert all(abs(mean - (1 - dropout)) < 4 * deviation / (2 * 4 * 64 * 64) ** 0.5 for mean in means)
    assert abs(sum(means) / 8 - (1 - dropout)) < 4 * deviation / (8 * 2 * 4 * 64 * 64) ** 0.5


def test_a_block_alone_is_the_block_of_the_whole() -> None:
    whole = draw(7, 2, 3, range(40), range(50), 0.2)
    block = draw(7, 2, 3, range(11, 17), range(30, 50), 0.2)
    assert torch.equal(whole[:, :, 11:17, 30:50], block)
    shuffled = torch.randperm(40)
    other = kept_pairs(torch.tensor(7), 2, 3, shuffled, torch.arange(50), 0.2)
    assert torch.equal(whole[:, :, shuffled], other)


def test_neighbours_are_independent() -> None:
    """No correlation between a pair and the next in any coordinate, nor between seeds."""
    kept = draw(3, 4, 4, range(64), range(64), 0.5).double() * 2 - 1
    count = kept.numel()
    for axis in range(4):
        assert abs((kept * kept.roll(1, axis)).mean()) < 5 / count**0.5
    assert abs((kept * kept.mT).mean()) < 5 / count**0.5 + 1 / 64
    other = draw(4, 4, 4, range(64), range(64), 0.5).double() * 2 - 1
    assert abs((kept * other).mean()) < 5 / count**0.5
