"""The intervals against closed forms, against a fitted two-way layout, and against simulated truth."""

import numpy as np
import pytest
from scipy import stats

from relpos.report.statistics import crossed_interval, mean_interval, paired_difference


def test_outcomes_that_never_vary_are_known_by_the_rule_of_three() -> None:
    ones = dict.fromkeys(range(3), np.ones(36))
    zeros = dict.fromkeys(range(3), np.zeros(36))
    rare = 1 - 0.05 ** (1 / 36)
    assert 0.079 < rare < 3 / 36
    interval = mean_interval(ones)
    assert (interval.mean, interval.low, interval.high) == (1.0, 1.0 - rare, 1.0)
    tie = paired_difference(ones, ones)
    assert (tie.mean, tie.low, tie.high) == (0.0, -rare, rare), "36 images do not say that two are equal"
    assert tie.covers_zero
    assert not paired_difference(ones, zeros).covers_zero
    bits = paired_difference(ones, ones, share=False)
    assert bits.low == bits.high == 0.0, "bits have no end to be near"


def test_small_case_agrees_with_the_layout_written_out() -> None:
    values = np.array([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.0, 0.25]])
    mean = values.mean()
    squares = {
        "seeds": sum(4 * (row.mean() - mean) ** 2 for row in values) / 1,
        "images": sum(2 * (column.mean() - mean) ** 2 for column in values.T) / 3,
        "rest": sum(
            (values[s, i] - values[s].mean() - values[:, i].mean() + mean) ** 2 for s in range(2) for i in range(4)
        )
        / 3,
    }
    seeds, images = squares["seeds"] / 8, squares["images"] / 8
    variance = max(seeds + images - squares["rest"] / 8, seeds, images)
    freedom = variance**2 / (seeds**2 / 1 + images**2 / 3)
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
    interval = crossed_interval(values, seeds=(0, 1))
    np.testing.assert_allclose([interval.mean, interval.low, interval.high], [mean, mean - reach, mean + reach])


def test_one_seed_is_a_t_interval_over_images_and_says_so() -> None:
    outcomes = np.random.default_rng(0).random(400)
    interval = mean_interval({3: outcomes})
    assert not interval.covers_seeds
    assert interval.seeds == (3,)
    expected = stats.ttest_1samp(outcomes, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose([interval.low, interval.high], [expected.low, expected.high])


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
    interval = paired_difference(first, second, share=False)
    assert interval.low == pytest.approx(0.01)
    assert mean_interval(first).low < mean_interval(second).high


@pytest.mark.parametrize(("seed_spread", "image_spread"), [(0.05, 0.3), (0.3, 0.3), (0.3, 0.05)])
def test_coverage_is_nominal_whatever_varies(seed_spread: float, image_spread: float) -> None:
    random = np.random.default_rng(3)
    trials, hits = 400, 0
    for _ in range(trials):
        seeds = seed_spread * random.normal(size=(3, 1))
        images = image_spread * random.normal(size=(1, 60))
        interval = crossed_interval(0.1 + seeds + images + 0.05 * random.normal(size=(3, 60)), seeds=(0, 1, 2))
        hits += interval.low <= 0.1 <= interval.high
    # Binomial with p = 0.95 stays within four standard deviations, 0.044, of it.
    assert 0.90 <= hits / trials <= 1.0


def test_an_accuracy_stays_between_0_and_1() -> None:
    nearly = {seed: np.r_[np.ones(20), seed / 2] for seed in range(2)}
    interval = mean_interval(nearly)
    assert interval.low >= 0.0
    assert interval.high == 1.0


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
