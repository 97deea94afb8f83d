"""The formulas of rotations, with 50 digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpmath import cos, floor, log, mp, mpf, sin
from mpmath import pi as PI

mp.dps = 50
POSITIONS = (0, 1, 2, 7, 100, 4095, 100000)
HALF, INTERLEAVED = "half", "interleaved"
Case = dict[str, Any]


def pairs_of(layout: str, pairs: int) -> list[list[int]]:
    """The two dimensions of each pair."""
    if layout == HALF:
        return [[p, p + pairs] for p in range(pairs)]
    return [[2 * p, 2 * p + 1] for p in range(pairs)]


def content(size: int, shift: int = 0) -> list[float]:
    """Numbers that float16 holds exactly."""
    return [((5 * d + 3 * shift) % 17 - 8) / 8 for d in range(size)]


def rotation(
    name: str,
    source: str,
    parameters: Case,
    bands: Sequence[mpf],
    *,
    head_dim: int,
    layout: str = HALF,
    written: str | None = None,
    positions: Sequence[Sequence[Any]] = tuple((x,) for x in POSITIONS),
    axis: Sequence[int] | None = None,
    magnitude: Any = 1,
) -> Case:
    """A case of a rotation: angle = position[axis] * frequency, for each pair."""
    axis = [0] * len(bands) if axis is None else axis
    x, takes = content(head_dim), pairs_of(layout, len(bands))
    gives = pairs_of(written or layout, len(bands))
    angles = [[mpf(place[a]) * w for a, w in zip(axis, bands, strict=True)] for place in positions]
    rotated = []
    for row in angles:
        y = [mpf(one) for one in x]
        for (a, b), (c, d), angle in zip(takes, gives, row, strict=True):
            y[c] = magnitude * (x[a] * cos(angle) - x[b] * sin(angle))
            y[d] = magnitude * (x[a] * sin(angle) + x[b] * cos(angle))
        rotated.append(y)
    return {
        "name": name,
        "kind": "rotation",
        "source": source,
        "parameters": {"head_dim": head_dim, **parameters},
        "layout": layout,
        "input_pairs": takes,
        "output_pairs": gives,
        "axis": list(axis),
        "positions": [list(place) for place in positions],
        "frequencies": list(bands),
        "magnitude": magnitude,
        "angles": angles,
        "input": x,
        "output": rotated,
    }


def plain(pairs: int, base: Any) -> list[mpf]:
    """RoFormer's frequencies, from the fastest."""
    return [mpf(base) ** (mpf(-p) / pairs) for p in range(pairs)]


def larger(base: Any, pairs: int, by: Any) -> mpf:
    """NTK's base: the slowest pair `by` times slower."""
    return base * mpf(by) ** (mpf(2 * pairs) / (2 * pairs - 2))


def yarn(pairs: int, base: int, factor: Any, trained: int, fast: int = 32, slow: int = 1) -> list[mpf]:
    """YaRN: slow pairs interpolated, fast ones kept, a ramp between whole pairs."""

    def turns(count: int) -> mpf:
        return 2 * pairs * log(trained / (count * 2 * PI)) / (2 * log(base))

    low, high = max(int(floor(turns(fast))), 0), min(-int(floor(-turns(slow))), 2 * pairs - 1)
    ramp = [min(max((p - low) / mpf(high - low), 0), 1) for p in range(pairs)]
    return [w / factor * t + w * (1 - t) for w, t in zip(plain(pairs, base), ramp, strict=True)]


def llama3(pairs: int, base: int, factor: Any, trained: int, low: Any, high: Any) -> list[mpf]:
    """Llama 3.1: long waves interpolated, short ones kept, smooth between."""
    found = []
    for w in plain(pairs, base):
        wave = 2 * PI / w
        smooth = (trained / wave - low) / (high - low)
        if wave > mpf(trained) / low:
            found.append(w / factor)
        elif wave < mpf(trained) / high:
            found.append(w)
        else:
            found.append((1 - smooth) * w / factor + smooth * w)
    return found


def magnitude_of(factor: Any, by: Any = 1) -> mpf:
    """YaRN's magnitude, and DeepSeek's mscale."""
    return mpf(1) + by * log(factor) / 10
