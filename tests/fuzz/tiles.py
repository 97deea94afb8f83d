"""The engines' constants made small, so that a few dozen tokens cross every border that millions do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STREAMING = {
    "streaming.plan.planning.ROWS": (1, 2, 3, 5, 8, 16, 33),
    "streaming.plan.planning.WIDTH": (1, 2, 3, 5, 7, 16, 40),
    "streaming.plan.planning.PAIRS": (1, 7, 30, 100, 400, 1500),
    "streaming.plan.planning._BACKWARD_WIDTH": (1, 3, 6, 10, 40),
    "streaming.plan.planning._PREFIX_PAIRS": (1, 50, 700),
    "streaming.plan.planning._NATIVE_ROWS": (1, 3, 8, 20),
    "streaming.plan.planning._NATIVE_WIDTH": (1, 4, 9, 30),
    "streaming.cpu.cpu_kernel._ROWS": (1, 4, 16, 50),
    "streaming.cpu.cpu_kernel._CAUSAL_ROWS": (1, 3, 7, 20),
    "streaming.cpu.materialized_bias._ROWS": (1, 4, 9, 30),
    "streaming.cpu.materialized_bias._PAIRS": (1, 60, 900),
    "streaming.cpu.materialized_bias._MOST_PAIRS": (0, 500, 10**6),
    "streaming.plan.dense_plan.MOST_ROWS": (1, 2, 9, 40),
    "streaming.plan.masks.GAP": (0, 1, 3, 8),
    "streaming.plan.masks._FEWEST": (2, 3, 4),
    "streaming.plan.masks.ALIGNED": (1, 2, 5, 16),
    "streaming.plan.masks._OFTEN": (1, 2, 4),
    "streaming.terms.key_vectors._KEYS_AT_ONCE": (1, 2, 5, 16),
    "streaming.terms.vector_term._ROWS_AT_ONCE": (1, 2, 5, 16),
    "streaming.terms.vector_term._LEAST_ALIKE": (1, 2, 4, 9),
    "streaming.plan.regroup._LEAST": (1, 2, 5),
    "dense.PAIRS_AT_ONCE": (1, 10, 60, 300),
}
"""Constant to what it may be set to."""

FAR = {"streaming.terms.near._LEAST_FAR": (1, 2, 7, 32)}
"""The same, of calls with vectors that meet a content."""

TRITON = {
    "triton.launch.SHAPES": (16,),
    "triton.spans.COARSE": (16, 32),
    "triton.limits.FEW": (0, 3, 9),
    "triton.table.PROGRAMS": (1, 5),
}
"""The same of Triton's kernels, whose tiles have 16 tokens a side at least."""

PARTS = {"triton.vector_sets.WORKSPACE": (4_000, 20_000, 100_000)}
"""The same of its kernels of vectors."""

SHAPES = ("triton.launch.WITH_VECTORS", "triton.launch.CROWDED")
"""More tiles, which follow `triton.launch.SHAPES`."""


@contextmanager
def set_to(values: Mapping[str, int]) -> Iterator[None]:
    """The constants at these values."""
    before: list[tuple[Any, str, Any]] = []
    tiles = {path: values["triton.launch.SHAPES"] for path in SHAPES if "triton.launch.SHAPES" in values}
    try:
        for path, value in {**values, **tiles}.items():
            module, _, name = path.rpartition(".")
            owner = importlib.import_module(f"relpos.engines.{module}")
            now = getattr(owner, name)
            before.append((owner, name, now))
            if isinstance(now, dict):  # the sides of every tile
                value = {kind: {**shape, "ROWS": value, "COLUMNS": value} for kind, shape in now.items()}
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
