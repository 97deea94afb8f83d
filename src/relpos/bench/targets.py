"""What relpos must reach, and whether a run reached it. Ratios are medians over the rounds of one run on two cores."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relpos.bench.cases import families

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        measure: "ratio" to the case's own peer; "best", to the fastest engine; "memory", extra GiB.
    """

    case: str
    words: str
    against: str
    at_most: float
    measure: Literal["ratio", "best", "memory"] = "ratio"


def targets() -> tuple[Target, ...]:
    """All that is asked: 8 heads of 64, batch 1."""
    free, deberta = "bias-free SDPA", "transformers DeBERTa-v2"
    vectors = {"shaw": "Shaw key and value", "transformer_xl": "Transformer-XL", "deberta": "DeBERTa"}
    return (
        Target("line-4096-float32-forward", "forward, line bias, N = 4,096", free, 1.05),
        Target("line-4096-float32-step", "training step, learned line bias, N = 4,096", free, 1.25),
        Target("line-4096-float32-step-causal", "the same, causal", f"{free}, causal", 1.25),
        Target("grid-64x64+1-float32-step", "training step, 64 x 64 grid with class token", free, 1.35),
        Target("line-4096-bfloat16-forward", "forward, line bias, N = 4,096, bfloat16", f"{free}, bfloat16", 0.5),
        Target("line-4096-bfloat16-step", "training step, line bias, N = 4,096, bfloat16", f"{free}, bfloat16", 0.7),
        *(
            Target(f"layer-{name}-2048-float32-step", f"training step of a layer, N = 2,048, {title}", deberta, 0.5)
            for name, title in vectors.items()
        ),
        *(
            Target(
                case.name, f"auto, {case.batch:,} windows of {case.count}, {case.what}", "the best engine", 1.05, "best"
            )
            for case in families()["windows"]
        ),
        Target("line-16384-float32-step", "extra memory in GiB, training step, N = 16,384", "", 0.6, "memory"),
    )


def judge(entries: Sequence[Entry], engine: str = "auto") -> list[dict[str, Any]]:
    """Asked and reached, of the targets whose cases were run. `met` is None where there is no figure."""
    judged = []
    for target in targets():
        of_case = [entry for entry in entries if entry["case"] == target.case]
        if not of_case:
            continue
        reached, reason = _reached(target, of_case, f"relpos-{engine}")
        judged.append(
            {
                "case": target.case,
                "what": target.words,
                "against": target.against,
                "engine": engine,
                "asked": target.at_most,
                "reached": reached,
                "met": None if reached is None else reached <= target.at_most,
                "reason": reason,
            }
        )
    return judged


def _reached(target: Target, entries: Sequence[Entry], name: str) -> tuple[float | None, str | None]:
    own = next((entry for entry in entries if entry["peer"] == name), None)
    if own is None:
        return None, f"{name} was not run"
    if target.measure == "memory":
        extra = own["extra_mib"]
        return (None, own["reason"] or "memory was not measured") if extra is None else (round(extra / 1024, 3), None)
    if own["ms"] is None:
        return None, own["reason"]
    if target.measure == "ratio":
        return (None, f"{own['against']} did not run") if own["ratio"] is None else (own["ratio"]["median"], None)
    engines = [entry for entry in entries if entry["peer"].startswith("relpos-") and entry["ms"] and entry is not own]
    if not engines:
        return None, "no engine was run by name"
    best = min(engines, key=lambda entry: entry["ms"]["median"])
    pairs = zip(own["rounds_ms"], best["rounds_ms"], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3), None


FITTED = "line-{}-float32-step"
_FEWEST = 3


def memory_fits(entries: Sequence[Entry], lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """For each peer, extra memory of a training step as a line over N: KiB a token, and the largest relative residual.

    Of three lengths or more.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for n in lengths:
        for entry in entries:
            if entry["case"] == FITTED.format(n) and entry["extra_mib"] is not None:
                points.setdefault(entry["peer"], []).append((n, entry["extra_mib"]))
    fits = {}
    for peer, measured in points.items():
        if len(measured) < _FEWEST:
            continue
        tokens, mib = np.asarray(measured, dtype=np.float64).T
        slope, start = np.polyfit(tokens, mib, 1)
        residual = np.abs(slope * tokens + start - mib) / np.maximum(mib, 1.0)
        fits[peer] = {
            "kib_a_token": round(float(slope) * 1024, 3),
            "mib_at_0": round(float(start), 2),
            "largest_relative_residual": round(float(residual.max()), 3),
            "points": [[int(a), float(b)] for a, b in measured],
        }
    return fits
