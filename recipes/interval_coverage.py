"""How often the report's 95% intervals hold the truth, and how often a bootstrap's would: simulated seeds and images.

    python recipes/interval_coverage.py        half a minute; prints a line a case

Outcomes are seed effect + image effect + noise, all normal, over 100 images, with a true mean of 0.
"""

from __future__ import annotations

import numpy as np

from relpos.report.statistics import crossed_interval

TRIALS = 1500
RESAMPLES = 500
CASES = {"seeds as large as images": (1.0, 1.0, 1.0), "images alone": (0.0, 1.0, 0.2), "seeds alone": (1.0, 0.1, 0.1)}


def bootstrap_covers(values: np.ndarray, random: np.random.Generator) -> bool:
    """Whether a percentile interval over resampled seeds and images (Owen's pigeonhole bootstrap) holds 0."""
    seeds, images = values.shape
    by_seed = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES)
    by_image = random.multinomial(images, np.full(images, 1 / images), size=RESAMPLES)
    means = np.einsum("rs,si,ri->r", by_seed, values, by_image, optimize=True) / values.size
    low, high = np.quantile(means, [0.025, 0.975])
    return bool(low <= 0 <= high)


def main() -> None:
    """Print the coverage of both intervals for every case and number of seeds."""
    random = np.random.default_rng(0)
    for name, (seed_spread, image_spread, noise) in CASES.items():
        for seeds in (2, 3, 5, 10):
            ours = theirs = 0
            for _ in range(TRIALS):
                values = seed_spread * random.normal(size=(seeds, 1)) + image_spread * random.normal(size=(1, 100))
                values = values + noise * random.normal(size=(seeds, 100))
                ours += crossed_interval(values, seeds=tuple(range(seeds))).covers_zero
                theirs += bootstrap_covers(values, random)
            print(f"{name:26s} {seeds:2d} seeds: crossed layout {ours / TRIALS:.1%}, bootstrap {theirs / TRIALS:.1%}")


if __name__ == "__main__":
    main()
