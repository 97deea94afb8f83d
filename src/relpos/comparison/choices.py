"""Comparisons of something other than position: kinds of attention, norms, optimizers. Each changes the recipe.

The first of each list is the baseline of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from relpos.core.checks import require_name
from relpos.results import MechanismRecord, What
from relpos.train import Recipe

WHATS: tuple[What, ...] = get_args(What)
POSITIONS = {1: "rotary_1d", 2: "rotary_2d"}
"""The position of every model, by axes: every kind of attention supports a rotation."""


@dataclass(frozen=True)
class Choice:
    """One variant of a model or its training.

    Attributes:
        name, title, summary, source: as for a mechanism in `results.json`.
        change: returns the recipe with this choice.
    """

    name: str
    title: str
    summary: str
    source: str
    change: Callable[[Recipe], Recipe]

    def describe(self) -> MechanismRecord:
        """The choice in `results.json`: a mechanism without growth rules."""
        return MechanismRecord(self.name, self.title, self.summary, self.source, growth=[])


def _keyed(recipe: Recipe, heads: int) -> Recipe:
    return replace(recipe, num_kv_heads=heads)


ATTENTION = (
    Choice("full", "Full attention", "A softmax over every pair of tokens, on the engine that auto chooses.",
           "Vaswani et al. 2017", lambda recipe: recipe),
    Choice("local", "Local attention", "A window: the last 32 tokens of a sequence, or the rows above and below.",
           "Beltagy et al. 2020, arXiv:2004.05150", lambda recipe: replace(recipe, attention="local")),
    Choice("sparse", "Sparse attention", "The Sparse Transformer's fixed pattern: a block of tokens, and the "
           "last token of every block.", "Child et al. 2019, arXiv:1904.10509",
           lambda recipe: replace(recipe, attention="sparse")),
    Choice("linear", "Linear attention", "Features elu + 1 and no softmax; causal in chunks of 64 tokens.",
           "Katharopoulos et al. 2020, arXiv:2006.16236", lambda recipe: replace(recipe, attention="linear")),
    Choice("flash", "FlashAttention from its paper", "Full attention in tiles of 64, in plain PyTorch, for reading: "
           "its speed is not that of a fused kernel.", "Dao et al. 2022, arXiv:2205.14135",
           lambda recipe: replace(recipe, attention="flash")),
    Choice("multi-query", "Multi-query attention", "One head of keys and values for all heads of queries.",
           "Shazeer 2019, arXiv:1911.02150", lambda recipe: _keyed(recipe, 1)),
    Choice("grouped-query", "Grouped-query attention", "Half as many heads of keys and values as of queries.",
           "Ainslie et al. 2023, arXiv:2305.13245", lambda recipe: _keyed(recipe, recipe.num_heads // 2)),
)  # fmt: skip
NORM = (
    Choice("layernorm", "LayerNorm", "Mean and variance of a token's channels.", "Ba et al. 2016, arXiv:1607.06450",
           lambda recipe: replace(recipe, norm="layernorm")),
    Choice("rmsnorm", "RMSNorm", "The root mean square of a token's channels, no mean.",
           "Zhang and Sennrich 2019, arXiv:1910.07467", lambda recipe: replace(recipe, norm="rmsnorm")),
    Choice("groupnorm", "GroupNorm", "Mean and variance of 16 channels of a token at a time, within the token.",
           "Wu and He 2018, arXiv:1803.08494", lambda recipe: replace(recipe, norm="groupnorm")),
    Choice("qk-norm", "QK-norm", "LayerNorm, and also RMSNorm of queries and keys in each head.",
           "Dehghani et al. 2023, arXiv:2302.05442",
           lambda recipe: replace(recipe, norm="layernorm", qk_norm="rmsnorm")),
)  # fmt: skip
OPTIMIZER = (
    Choice("adamw", "AdamW", "Two moments per parameter; PyTorch's, fused.", "Loshchilov and Hutter 2019, "
           "arXiv:1711.05101", lambda recipe: recipe.by("adamw")),
    Choice("lion", "Lion", "The sign of a momentum.", "Chen et al. 2023, arXiv:2302.06675",
           lambda recipe: recipe.by("lion")),
    Choice("sophia-g", "Sophia-G", "A momentum over a Gauss-Newton diagonal, clipped; an estimate every ten steps.",
           "Liu et al. 2023, arXiv:2305.14342", lambda recipe: recipe.by("sophia-g")),
    Choice("sophia-h", "Sophia-H", "The same over Hutchinson's estimate of the Hessian's diagonal.",
           "Liu et al. 2023, arXiv:2305.14342", lambda recipe: recipe.by("sophia-h")),
)  # fmt: skip
CHOICES: dict[str, dict[str, Choice]] = {
    what: {choice.name: choice for choice in choices}
    for what, choices in (("attention", ATTENTION), ("norm", NORM), ("optimizer", OPTIMIZER))
}


def find_choice(what: str, name: str) -> Choice:
    """A choice by name.

    Raises:
        ValueError: no choice has this name.
    """
    require_name(name, CHOICES[what], f"a kind of {what}")
    return CHOICES[what][name]
