"""The bootstrap against closed forms, against another program's count, and against simulated truth."""

import itertools

import numpy as np
import pytest

from relpos.report.statistics import bootstrap, mean_interval, paired_difference


def test_all_equal_outcomes_have_an_interval_of_no_width() -> None:
    ones = dict.fromkeys(range(3), np.ones(50))
    zeros = dict.fromkeys(range(3), np.zeros(50))
    interval = mean_interval(ones)
    assert (interval.mean, interval.low, interval.high) == (1.0, 1.0, 1.0)
    third = mean_interval(dict.fromkeys(range(3), np.full(50, 1 / 3)))
    assert third.low == third.mean == third.high == 1 / 3
    tie = paired_difference(ones, ones)
    assert (tie.mean, tie.low, tie.high) == (0.0, 0.0, 0.0)
    assert tie.covers_zero
    assert not paired_difference(ones, zeros).covers_zero


def test_small_case_agrees_with_every_resample_counted() -> None:
    values = np.array([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.0, 0.25]])
    means = [
        values[np.ix_(seeds, images)].mean()
        for seeds in itertools.product(range(2), repeat=2)
        for images in itertools.product(range(4), repeat=4)
    ]
    exact = np.quantile(means, [0.025, 0.975])
    interval = bootstrap(values, seeds=(0, 1))
    # Quantiles of 2,000 resamples of a mean with steps of about 1/32 may fall one or two steps beside the exact ones.
    assert interval.mean == pytest.approx(values.mean())
    np.testing.assert_allclose([interval.low, interval.high], exact, atol=0.07)


def test_one_seed_resamples_images_alone_and_says_so() -> None:
    outcomes = np.random.default_rng(0).random(400)
    interval = mean_interval({3: outcomes})
    assert not interval.covers_seeds
    assert interval.seeds == (3,)
    standard_error = outcomes.std() / np.sqrt(400)
    # 2,000 resamples know a 2.5% quantile to about 6% of the standard error; a tenth of the half width leaves room.
    np.testing.assert_allclose(interval.high - interval.mean, 1.96 * standard_error, rtol=0.1)


def test_seeds_widen_the_interval_when_they_differ() -> None:
    images = np.random.default_rng(1).random(200)
    apart = {seed: np.clip(images + 0.2 * (seed - 2), 0, 1) for seed in range(5)}
    alike = dict.fromkeys(range(5), images)
    wide, narrow = mean_interval(apart), mean_interval(alike)
    assert wide.covers_seeds
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_pairing_takes_out_what_makes_images_hard() -> None:
    random = np.random.default_rng(2)
    hard = random.random(300)
    first = dict.fromkeys(range(3), hard + 0.01)
    second = dict.fromkeys(range(3), hard)
    interval = paired_difference(first, second)
    assert interval.low == pytest.approx(0.01)
    assert mean_interval(first).low < mean_interval(second).high


def test_coverage_is_nominal_where_images_make_the_uncertainty() -> None:
    random = np.random.default_rng(3)
    trials, hits = 120, 0
    for _ in range(trials):
        difference = 0.1 + 0.3 * random.normal(size=(1, 60)) + 0.05 * random.normal(size=(3, 60))
        interval = bootstrap(difference, seeds=(0, 1, 2))
        hits += interval.low <= 0.1 <= interval.high
    # Binomial with p = 0.95 stays within four standard deviations, 0.08, of it.
    assert 0.87 <= hits / trials <= 1.0


def test_interval_turns_round_with_the_pair() -> None:
    random = np.random.default_rng(4)
    first = {seed: random.random(40) for seed in range(3)}
    second = {seed: random.random(40) for seed in range(3)}
    one, other = paired_difference(first, second), paired_difference(second, first)
    assert one.mean == pytest.approx(-other.mean)
    np.testing.assert_allclose([one.low, one.high], [-other.high, -other.low], atol=1e-9)


def test_only_shared_seeds_count() -> None:
    first = {0: np.ones(10), 1: np.ones(10)}
    second = {1: np.zeros(10), 2: np.ones(10)}
    interval = paired_difference(first, second)
    assert interval.seeds == (1,)
    assert interval.mean == 1.0


def test_no_shared_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a seed that both have: the first has \[0\], the second \[1\]"):
        paired_difference({0: np.ones(4)}, {1: np.ones(4)})


def test_other_images_are_an_error() -> None:
    with pytest.raises(ValueError, match="the first has 4, the second 5"):
        paired_difference({0: np.ones(4)}, {0: np.ones(5)})


def test_the_same_outcomes_give_the_same_interval() -> None:
    outcomes = {seed: np.random.default_rng(seed).random(30) for seed in range(2)}
    assert mean_interval(outcomes) == mean_interval(dict(reversed(outcomes.items())))
