"""Intervals for accuracies and for paired differences of accuracies, over test images and seeds at once.

    outcome[s, i]   share of image i's trials that the model trained with seed s classified right
    accuracy        mean of outcome over s and i
    difference      mean of first[s, i] - second[s, i]: paired, so what makes an image hard for both cancels

Seeds and images are crossed: every model sees every image. The pigeonhole bootstrap resamples the two independently,
S seeds of S and N images of N with replacement, and takes the mean over the resampled rows and columns; the interval
runs from the 2.5% to the 97.5% quantile of those means.

What it is not. With few seeds the resampling of seeds is coarse: three seeds make ten distinct resamples, two make
three. A percentile interval then is too narrow where seeds, rather than images, make the difference uncertain:
simulated with normal seed effects as large as the images' standard deviation over 100 images, nominally 95% intervals
cover the truth 67% of the time with two seeds, 74% with three, 83% with five and 92% with ten; where the uncertainty is
mostly in the images they cover 92% to 98%. With one seed only images are resampled and `covers_seeds` is False: the
interval then is about these very models, not about the mechanism. Nor is anything corrected for comparing many
mechanisms, or for comparing with the one that happened to come out best.

Source: Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1(2), 2007.
Not to be confused with resampling images alone, which takes the trained models for granted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
RANDOM_SEED = 2007


@dataclass(frozen=True)
class Interval:
    """A mean with its percentile interval.

    `covers_seeds` is False where one seed alone was there to resample. `seeds` are those the figure is made of.
    """

    mean: float
    low: float
    high: float
    images: int
    seeds: tuple[int, ...]
    covers_seeds: bool

    @property
    def covers_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def mean_interval(outcomes: Mapping[int, NDArray[np.float64]]) -> Interval:
    """The accuracy of one mechanism: `outcomes[seed]` is `[images]`, values 0 to 1.

    Raises `ValueError` for no seeds, no images, or seeds with different numbers of images.
    """
    return bootstrap(_stack(outcomes, name="outcomes"), seeds=tuple(sorted(outcomes)))


def paired_difference(first: Mapping[int, NDArray[np.float64]], second: Mapping[int, NDArray[np.float64]]) -> Interval:
    """First minus second, over the seeds that both have and the same test images in the same order.

    Raises `ValueError` where they share no seed or were scored on different numbers of images.
    """
    seeds = tuple(sorted(set(first) & set(second)))
    if not seeds:
        raise ValueError(
            "a paired difference needs a seed that both have: "
            f"the first has {sorted(first)}, the second {sorted(second)}"
        )
    one = _stack({seed: first[seed] for seed in seeds}, name="first")
    other = _stack({seed: second[seed] for seed in seeds}, name="second")
    if one.shape != other.shape:
        raise ValueError(
            f"a paired difference needs the same test images: the first has {one.shape[1]}, the second {other.shape[1]}"
        )
    return bootstrap(one - other, seeds=seeds)


def bootstrap(values: NDArray[np.float64], *, seeds: tuple[int, ...]) -> Interval:
    """The pigeonhole bootstrap of the mean of `values` `[seeds, images]`. The same values give the same interval."""
    count, images = values.shape
    mean = float(values.mean())
    covers_seeds = count > 1
    if float(np.ptp(values)) == 0.0:
        # Every resample has this very mean; summing it would only add rounding, and move a tie off zero.
        only = float(values[0, 0])
        return Interval(only, only, only, images, seeds, covers_seeds)
    seed_weights, image_weights = _weights(count, images)
    means = np.sum((image_weights @ values.T) * seed_weights, axis=1) / (count * images)
    tail = (1.0 - CONFIDENCE) / 2.0
    # Outcomes are small fractions: twelve decimals keep every real difference and drop what rounding adds to a zero.
    low, high = np.round(np.quantile(means, [tail, 1.0 - tail]), 12)
    return Interval(mean, float(low), float(high), images, seeds, covers_seeds)


@lru_cache(maxsize=4)
def _weights(seeds: int, images: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each seed `[resamples, seeds]` and each image `[resamples, images]` is drawn, kept between calls.

    All comparisons of one shape share the resamples, so that figures side by side differ by their data alone.
    """
    random = np.random.default_rng(RANDOM_SEED)
    seed_weights = random.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=RESAMPLES).astype(np.float64)
    image_weights = random.multinomial(images, np.full(images, 1.0 / images), size=RESAMPLES).astype(np.float64)
    return seed_weights, image_weights


def _stack(outcomes: Mapping[int, NDArray[np.float64]], *, name: str) -> NDArray[np.float64]:
    if not outcomes:
        raise ValueError(f"{name}: expected the outcomes of at least one seed, got none")
    lengths = {len(values) for values in outcomes.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"{name}: expected the same test images for every seed, got {sorted(lengths)} images")
    return np.stack([np.asarray(outcomes[seed], dtype=np.float64) for seed in sorted(outcomes)])
