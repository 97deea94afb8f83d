"""Intervals for figures and for their paired differences, over test images (or blocks of text) and seeds.

    outcome[s, i]   share of image i's trials that the model with seed s classified correctly, or the bits per byte that
                    it needs for block i
    mean            of outcome over s and i
    difference      mean of first[s, i] - second[s, i]: paired, so that an image's difficulty for both cancels

Seeds and images are crossed: every model sees every image, and both are random samples. With the mean squares of the
two-way layout (S seeds, N images), the variance of the mean is estimated as

    (MS_seeds + MS_images - MS_rest) / (S N),     not below the larger of the first two alone,

its degrees of freedom by Satterthwaite's formula. The interval is mean +- t * sqrt(variance). Few seeds that differ
much give a wide interval (t is 12.7 with two seeds, 2.8 with five). Images that differ much with seeds that agree give
the usual narrow one. With one seed, only images vary and `covers_seeds` is False: the interval describes these models,
not the mechanism. If nothing varies, the rule of three bounds a share: with N images, an outcome that never occurred
may have a share up to 1 - 0.05^(1/N). There is no correction for comparing many mechanisms, or for comparing with the
one that came out best.

Source: Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics 2(6), 1946; the
crossed random-effects layout as in Searle, Casella and McCulloch, "Variance Components", 1992, chapter 4.
Not to be confused with resampling only images, which treats the trained models as fixed, or with the bootstrap over
seeds and images (docs/log.md), whose percentile intervals are too narrow with two to five seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    `covers_seeds` is False if there was only one seed. `seeds` are those behind the figure.
    """

    mean: float
    low: float
    high: float
    images: int
    seeds: tuple[int, ...]
    covers_seeds: bool

    @property
    def covers_zero(self) -> bool:
        """Whether the interval includes zero."""
        return self.low <= 0.0 <= self.high


def mean_interval(
    outcomes: Mapping[int, NDArray[np.float64]], *, least: float | None = 0.0, most: float | None = 1.0
) -> Interval:
    """The mean of one mechanism: `outcomes[seed]` is `[images]`, from `least` to `most`, which also clip the interval.

    Raises `ValueError` for no seeds, no images, or seeds with different numbers of images.
    """
    interval = crossed_interval(
        _stack(outcomes, name="outcomes"), seeds=tuple(sorted(outcomes)), share=most is not None
    )
    high = interval.high if most is None else min(most, interval.high)
    low = interval.low if least is None else max(least, interval.low)
    return Interval(interval.mean, low, high, interval.images, interval.seeds, interval.covers_seeds)


def paired_difference(
    first: Mapping[int, NDArray[np.float64]], second: Mapping[int, NDArray[np.float64]], *, share: bool = True
) -> Interval:
    """First minus second, over common seeds and the same test images in the same order.

    `share` means that outcomes lie between 0 and 1.

    Raises `ValueError` if they share no seed or have different numbers of images.
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
    return crossed_interval(one - other, seeds=seeds, share=share)


def crossed_interval(values: NDArray[np.float64], *, seeds: tuple[int, ...], share: bool = False) -> Interval:
    """The interval of the mean of `values` `[seeds, images]`, both random; see the module's docstring."""
    count, images = values.shape
    mean = float(values.mean())
    covers_seeds = count > 1
    if float(np.ptp(values)) == 0.0:
        # Rounding may change the mean of equal numbers, and a tie would not be zero.
        only, rare = float(values[0, 0]), 1 - (1 - CONFIDENCE) ** (1 / images) if share else 0.0
        return Interval(only, only - rare, only + rare, images, seeds, covers_seeds)
    by_image = values.mean(axis=0)
    from_images = float(by_image.var(ddof=1)) / images if images > 1 else 0.0
    variance, freedom = from_images, float(max(1, images - 1))
    if covers_seeds:
        by_seed = values.mean(axis=1)
        from_seeds = float(by_seed.var(ddof=1)) / count
        rest = values - by_seed[:, None] - by_image[None, :] + mean
        doubly = float((rest**2).sum()) / max(1, (count - 1) * (images - 1)) / (count * images)
        variance = max(from_seeds + from_images - doubly, from_seeds, from_images)
        shares = from_seeds**2 / (count - 1) + from_images**2 / max(1, images - 1)
        freedom = variance**2 / shares if shares > 0 else float(images - 1)
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * variance**0.5
    return Interval(mean, mean - reach, mean + reach, images, seeds, covers_seeds)


def _stack(outcomes: Mapping[int, NDArray[np.float64]], *, name: str) -> NDArray[np.float64]:
    if not outcomes:
        raise ValueError(f"{name}: expected the outcomes of at least one seed, got none")
    lengths = {len(values) for values in outcomes.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"{name}: expected the same test images for every seed, got {sorted(lengths)} images")
    return np.stack([np.asarray(outcomes[seed], dtype=np.float64) for seed in sorted(outcomes)])
