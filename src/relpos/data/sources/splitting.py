"""Splits of data that have none, and identical samples in two splits.

A sample's split depends only on its own bytes: the first eight of their SHA-256 are a fraction from 0 to 1. For images:

    0        0.2        0.3                                  1
    |  test   | validation |            train                |

So no sample moves when others are added, and identical samples are in the same split. Labels do not count: the same
image under two labels would otherwise be in two splits. A split that the data have keeps its samples; the others are
taken from the training samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from relpos.data.folder import SHARES
from relpos.data.task import Split

SPLIT_ORDER: tuple[Split, ...] = ("train", "validation", "test")


def split_of(digest: bytes, missing: Collection[Split], shares: Mapping[Any, float] = SHARES) -> Split:
    """The split of a training sample.

    Args:
        digest: of the sample's bytes, by `digest_of`. missing: the splits that the data lack. shares: of test and
            validation, by default those of images.
    """
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    begin = 0.0
    order: list[tuple[Split, float]] = list(shares.items())
    for split, share in order:
        if split in missing:
            if begin <= fraction < begin + share:
                return split
            begin += share
    return "train"


class Leakage:
    """Counts held-out samples that are byte for byte in another split, too."""

    def __init__(self) -> None:
        self._seen: dict[Split, dict[bytes, int]] = {split: {} for split in SPLIT_ORDER}

    def add(self, split: Split, digest: bytes) -> None:
        """Note a sample."""
        self._seen[split][digest] = self._seen[split].get(digest, 0) + 1

    def lines(self, what: str, among: str = "") -> list[str]:
        """A line for each split with samples that are also in an earlier one.

        Args:
            what: the word for samples, in the plural. among: follows, if not all samples were read.
        """
        found = []
        for at, split in enumerate(SPLIT_ORDER):
            mine = self._seen[split]
            for earlier in SPLIT_ORDER[:at]:
                count = sum(times for digest, times in mine.items() if digest in self._seen[earlier])
                if count:
                    also = "training" if earlier == "train" else earlier
                    found.append(
                        f"Leakage: {count} of {sum(mine.values())} {split} {what} are identical to {also} {what}, "
                        f"byte for byte{among}."
                    )
        return found
