"""relpos's targets, and whether a run met them. Ratios are medians over the rounds of one run.

CPU targets are for two cores, GPU targets for an H200.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relpos.bench.cases import families
from relpos.bench.peers import DENSE, FLEX, FREE, FREE_CUDNN, FREE_OURS, READY
from relpos.engines import backends

Entry = Mapping[str, Any]
_ENGINES = tuple(f"relpos-{name}" for name in backends())


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        peers: the figure is relative to the fastest of these, or to their least memory; if empty, to all engines.
        measure: time; memory; "us", additional microseconds (fastest round against fastest round); "GiB", extra memory
            itself.
        engine: the engine measured, if it is not the run's main engine.
    """

    case: str
    words: str
    against: str
    at_most: float
    peers: tuple[str, ...] = (FREE,)
    measure: Literal["time", "memory", "us", "GiB"] = "time"
    engine: str | None = None


def targets() -> tuple[Target, ...]:
    """All targets."""
    return (*_on_cpu(), *_on_gpu())


def _on_cpu() -> tuple[Target, ...]:
    """CPU targets: 8 heads of 64, batch 1."""
    free, deberta = "bias-free SDPA", "transformers DeBERTa-v2"
    layer = "training step of a layer, N = 2,048"
    vectors = {"shaw": "Shaw key and value", "transformer_xl": "Transformer-XL", "deberta": "DeBERTa"}
    return (
        Target("line-4096-float32-forward", "forward, relative bias, N = 4,096", free, 1.05),
        Target("line-4096-float32-step", "training step, learned relative bias, N = 4,096", free, 1.25),
        Target("line-4096-float32-step-causal", "the same, causal", f"{free}, causal", 1.25),
        Target("grid-64x64+1-float32-step", "training step, 64 x 64 grid with class token", free, 1.35),
        Target("line-4096-bfloat16-forward", "forward, relative bias, N = 4,096, bfloat16", f"{free}, bfloat16", 0.5),
        Target(
            "line-4096-bfloat16-step", "training step, relative bias, N = 4,096, bfloat16", f"{free}, bfloat16", 0.7
        ),
        *(
            Target(f"layer-{name}-2048-float32-step", f"{layer}, {title}", deberta, 0.5, ("deberta-v2",))
            for name, title in vectors.items()
        ),
        Target("layer-deberta-512-float32-step", "the same of DeBERTa, N = 512", deberta, 0.9, ("deberta-v2",)),
        Target(
            "layer-grid-32x32+1-float32-step",
            "training step of a layer, 32 x 32 grid with class token",
            "the layer without bias",
            1.35,
            ("layer-free",),
        ),
        *(
            Target(case.name, f"auto, {case.batch:,} windows of {case.count}, {case.what}", "the best engine", 1.05, ())
            for case in families()["windows"]
        ),
        *_small(),
        Target("line-16384-float32-step", "extra memory in GiB, training step, N = 16,384", "", 0.6, (), "GiB"),
    )


def _small() -> tuple[Target, ...]:
    """Targets for small cases: additional microseconds and ratios against SDPA with a precomputed bias; one thread."""
    ready, one, few = "SDPA, bias ready", "t5-64-float32-forward-q1", "64-float32-forward"
    more = (
        (one, "us more, 1 query x 64 keys, terms ready", 50, "terms"),
        (one, "us more, the same through T5Bias", 150, "auto"),
        (one, "us more, the same while decoding", 70, "decoding"),
        (f"line-{few}", "us more, 64 x 64, a learned bias, read as a view", 60, "auto"),
        (f"t5-{few}", "us more, 64 x 64, T5Bias", 160, "auto"),
        ("line-64-float32-step", "us more, training step, 64 x 64, a learned bias", 200, "auto"),
        ("t5-64-float32-step", "us more, training step, 64 x 64, T5Bias", 200, "auto"),
    )
    times = (
        ("grid-8x8+1-float32-step-b8-h4-d16", "training step, 8 x 65 tokens, 4 heads of 16", 1.1),
        ("grid-7x7-float32-step-b32", "training step, 32 windows of 7 x 7", 1.05),
        ("grid-14x14+1-float32-step-b8", "training step, 8 x 197 tokens", 1.05),
    )
    return (
        *(Target(case, words, ready, at_most, (READY,), "us", engine) for case, words, at_most, engine in more),
        *(Target(case, words, ready, at_most, (READY,)) for case, words, at_most in times),
    )


def _on_gpu() -> tuple[Target, ...]:
    """GPU targets: 8 heads, bfloat16."""
    rows: list[Target] = []
    ours, flash, best = "our kernel without bias", "bias-free SDPA, flash", "bias-free SDPA, the best"
    for what, words, of_ours, of_flash, of_best in (
        ("forward", "forward", 1.2, 1.15, 1.5),
        ("step", "training step", 1.3, 1.4, 1.9),
    ):
        for width in ("", "-d128"):
            case = f"line-8192-bfloat16-{what}{width}-cuda"
            line = f"{words}, relative bias, N = 8,192, D = {128 if width else 64}"
            rows += [
                Target(case, line, ours, of_ours, (FREE_OURS,)),
                Target(case, line, flash, of_flash),
                Target(case, line, best, of_best, (FREE, FREE_CUDNN)),
            ]
    for width in ("", "-d128"):
        case = f"line-8192-bfloat16-step-causal{width}-cuda"
        rows.append(Target(case, f"the same, causal, D = {128 if width else 64}", flash, 1.5))
    step = "line-8192-bfloat16-step-cuda"
    rows += [
        Target(step, "training step, N = 8,192", "compiled FlexAttention, learned table", 0.5, (FLEX,)),
        Target("grid-64x64+1-bfloat16-step-cuda", "training step, 64 x 64 grid with class token", flash, 1.6),
        Target(step, "memory, training step, N = 8,192", flash, 1.1, (FREE,), "memory"),
    ]
    for size in (7, 8):
        case = f"grid-{size}x{size}-bfloat16-step-b4096-cuda"
        words = f"training step, 4,096 windows of {size**2}, our kernels"
        rows.append(Target(case, words, "SDPA, dense bias", 0.7, (DENSE,), engine="triton"))
    return tuple(rows)


def judge(entries: Sequence[Entry], engine: str = "auto") -> list[dict[str, Any]]:
    """The goal and the figure of every target whose case was run. `met` is None if there is no figure."""
    judged = []
    for target in targets():
        of_case = [entry for entry in entries if entry["case"] == target.case]
        if not of_case:
            continue
        measured = target.engine or engine
        reached, reason = _reached(target, of_case, f"relpos-{measured}")
        judged.append(
            {
                "case": target.case,
                "what": target.words,
                "against": target.against,
                "engine": measured,
                "asked": target.at_most,
                "reached": reached,
                "met": None if reached is None else reached <= target.at_most,
                "reason": reason,
            }
        )
    return judged


def _reached(target: Target, entries: Sequence[Entry], name: str) -> tuple[float | None, str | None]:
    """The figure, or the reason why there is none."""
    ours = next((entry for entry in entries if entry["peer"] == name), None)
    if ours is None:
        return None, f"{name} was not run"
    if ours["reason"] is not None and ours["ms"] is None:
        return None, ours["reason"]
    if target.measure in ("memory", "GiB") and ours["extra_mib"] is None:
        return None, ours["reason"] or "memory was not measured"
    if target.measure == "GiB":
        return round(ours["extra_mib"] / 1024, 3), None
    if target.peers:
        rivals = [entry for entry in entries if entry["peer"] in target.peers]
    else:
        rivals = [entry for entry in entries if entry["peer"] in _ENGINES and entry is not ours]
    rivals = [entry for entry in rivals if entry["ms"]]
    if not rivals:
        return None, f"{' and '.join(target.peers) or 'other engines'} did not run"
    if target.measure == "memory":
        rivals = [entry for entry in rivals if entry["extra_mib"]]
        if not rivals:
            return None, "their memory was not measured"
        return round(ours["extra_mib"] / min(entry["extra_mib"] for entry in rivals), 3), None
    best = min(rivals, key=lambda entry: entry["ms"]["median"])
    if target.measure == "us":
        return round(1e3 * (min(ours["rounds_ms"]) - min(best["rounds_ms"])), 1), None
    pairs = zip(ours["rounds_ms"], best["rounds_ms"], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3), None


FITTED = "line-{}-float32-step", "line-{}-bfloat16-step-cuda"
_FEWEST = 3


def memory_fits(entries: Sequence[Entry], lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """A linear fit of each peer's extra memory in a training step over N: KiB per token, largest relative residual.

    A fit needs three lengths or more.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for n in lengths:
        for entry in entries:
            if entry["case"] in (name.format(n) for name in FITTED) and entry["extra_mib"] is not None:
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
