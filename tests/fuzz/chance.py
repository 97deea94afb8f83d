"""Choices by a seed."""

from __future__ import annotations

import random
from typing import Any


class Chance:
    """The choices of one seed.

    Args:
        few: whether a call is to be small and simple, for engines that an interpreter runs step by step.
        as_frozen: whether without what came after calls were frozen (`tests/frozen`).
    """

    def __init__(self, seed: int, few: bool = False, as_frozen: bool = False) -> None:
        self.r = random.Random(seed)
        self.newer = random.Random(f"{seed} newer")  # of what came later, so that a seed's call stays as it was
        self.seed = seed
        self.few, self.as_frozen = few, as_frozen

    def sometimes(self, share: float) -> bool:
        return self.r.random() < share

    def of(self, *choices: Any) -> Any:
        return self.r.choice(choices)
