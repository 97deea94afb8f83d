"""The metric of a comparison and the format of its figures: accuracy over images, bits per byte over text.

    figure  one outcome with its unit        "89.4%"           "2.412 bits"
    number  the same for a table             "89.4"            "2.412"
    gap     the size of a difference         "9.6 points"      "0.123 bits"
    bounds  an interval, without the unit    "4 to 15"         "2.10 to 2.15"

Differences have a sign such that more is better: "ahead" is positive for every metric.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relpos.report.statistics import Interval, mean_interval, paired_difference
from relpos.results import Results, TaskRecord

MINUS = "\N{MINUS SIGN}"
Scored = Mapping[int, NDArray[np.float64]]
"""The outcomes by seed: `[units]` for each."""


@dataclass(frozen=True)
class Measure:
    """A metric.

    Attributes:
        key: its name in `results.json`. name: its name in text.
        better: whether "higher" or "lower" is better.
        unit: the unit of one outcome, such as image. tested: all test units, in words.
        little: a difference of this size is negligible.
    """

    key: Literal["accuracy", "bits_per_byte", "figure"]
    name: str
    better: Literal["higher", "lower"]
    unit: str
    tested: str
    little: float = 0.02

    @property
    def suffix(self) -> str:
        """The unit of a figure that is no share; none for the user's metric."""
        return "" if self.key == "figure" else "bits"

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1 and is written in percent."""
        return self.key == "accuracy"

    def figure(self, value: float) -> str:
        """One outcome with its unit."""
        return f"{self.number(value)}%" if self.is_share else f"{self.number(value)} {self.suffix}".strip()

    def number(self, value: float) -> str:
        """One outcome for a table."""
        if self.key == "figure":
            return f"{value:.4g}".replace("-", MINUS)
        return f"{100.0 * value:.1f}" if self.is_share else f"{value:.3f}"

    def size(self, value: float, *, decimals: int | None = None) -> str:
        """A difference without its unit; a real minus sign, and none before a zero."""
        if self.key == "figure":
            return f"{value:.{3 if decimals is None else decimals}g}".replace("-", MINUS)
        if decimals is None:
            decimals = 1 if self.is_share else 3
        text = f"{(100.0 if self.is_share else 1.0) * value:.{decimals}f}"
        return text.removeprefix("-") if float(text) == 0.0 else text.replace("-", MINUS)

    def gap(self, value: float) -> str:
        """A difference with its unit."""
        return f"{self.size(value)} {'points' if self.is_share else self.suffix}".strip()

    def bounds(self, interval: Interval) -> str:
        """Both ends, with one digit less than the figure if they still differ."""
        few, all_ = (0, 1) if self.is_share else (3, 5) if self.key == "figure" else (2, 3)
        low, high = (self.size(end, decimals=few) for end in (interval.low, interval.high))
        if low == high:
            low, high = (self.size(end, decimals=all_) for end in (interval.low, interval.high))
        return f"{low} to {high}"

    def interval(self, scored: Scored) -> Interval:
        """The mean of outcomes with its interval, clipped to the metric's range."""
        least = None if self.key == "figure" else 0.0
        return mean_interval(scored, least=least, most=1.0 if self.is_share else None)

    def ahead(self, first: Scored, second: Scored) -> Interval:
        """How much better the first is, paired by unit over the seeds that both have."""
        pair = (first, second) if self.better == "higher" else (second, first)
        return paired_difference(*pair, share=self.is_share)

    def rank(self, value: float | None) -> float:
        """A sort key: the best first, those without a figure last."""
        if value is None:
            return float("inf")
        return -value if self.better == "higher" else value


ACCURACY = Measure("accuracy", "accuracy", "higher", "image", "test images")
OTHER_ACCURACY = Measure("accuracy", "accuracy", "higher", "input", "test inputs")
BITS = Measure("bits_per_byte", "bits per byte", "lower", "block", "blocks of test text")


FIGURE = {
    better: Measure("figure", "figure", better, "unit", "test data", little=0.0) for better in ("higher", "lower")
}
"""The user's metric, by which figures are better; only the user knows what difference is negligible."""


def unit_of(task: TaskRecord) -> str:
    """The unit of lengths of text: bytes, or a tokenizer's tokens."""
    return "bytes" if task.tokenizer is None else "tokens"


def by_tokens(task: TaskRecord) -> str:
    """The tokenizer by which a text's bits are measured, as the end of "bits per byte"; empty for bytes."""
    if task.tokenizer is None:
        return ""
    vocabulary = (task.vocabulary or 0) - (task.documents == "packed")  # without the token that begins a document
    return f", tokens by {task.tokenizer} (vocabulary {vocabulary:,}, {task.bytes_per_token or 0:.2f} bytes a token)"


def measure_of(results: Results) -> Measure:
    """The metric of a comparison."""
    if results.settings.better is not None:
        return FIGURE[results.settings.better]
    if results.task.kind == "other":
        return OTHER_ACCURACY
    return BITS if results.task.kind == "text" else ACCURACY
