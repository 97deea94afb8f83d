"""Angles of sinusoids and rotations: a coordinate times a frequency.

    frequency[p] = base ** (-p / P)        P per axis; also written base ** (-2 p / d), where d = 2 P is the width

They are computed in float64, so that position 100,000 is as exact as position 1: float32 has an error of 0.004 radians
there, and bfloat16 rounds 1,995 to 1,992. Results are rounded once, to the dtype in use.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, constant

WaveLayout = Literal["interleaved", "half", "grouped"]


def frequencies(count: int, base: float) -> tuple[float, ...]:
    """`base ** (-p / count)` for p = 0 ... count - 1: from 1 radian per position to just above 1 / base."""
    return tuple(base ** (-p / count) for p in range(count))


def angles(coordinates: Coordinates, bands: tuple[float, ...], device: torch.device) -> Float[Tensor, "_ N A P"]:
    """`coordinate[axis] * bands[p]` of every token, float64, with a batch axis of 1 or B; 0 for prefix tokens."""
    return turned(positions(coordinates, device), bands)


def positions(coordinates: Coordinates, device: torch.device) -> Float[Tensor, "_ N A"]:
    """Where every token is, float64, with a batch axis of 1 or B; 0 for prefix tokens."""
    found = coordinates.tokens(device).double()
    found = found if found.dim() == 3 else found[None]
    return torch.nn.functional.pad(found, (0, 0, coordinates.prefix, 0))


def turned(positions: Float[Tensor, "*N A"], bands: tuple[float, ...]) -> Float[Tensor, "*N A P"]:
    """`position[axis] * bands[p]`, of positions in float64."""
    return positions[..., None] * constant(bands, torch.float64, positions.device)


def waves(angle: Float[Tensor, "*N A P"], layout: WaveLayout) -> Float[Tensor, "*N W"]:
    """Sines and cosines of every angle, 2 A P of them, in the layout that `position.sinusoidal` describes."""
    dim = {"interleaved": -1, "half": -2, "grouped": -3}[layout]
    return torch.stack([angle.sin(), angle.cos()], dim=dim).flatten(-3)
