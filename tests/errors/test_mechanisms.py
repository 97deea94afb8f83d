"""What every mechanism says to no coordinates, to places that it does not serve, and to other growth than its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ingredients import require_said

from relpos import (
    ALiBi,
    ClippedBias,
    CoPE,
    DecomposedPosition,
    DisentangledPosition,
    FactoredBias,
    FIREBias,
    Grid,
    ImageRelativePosition,
    Kerple,
    LearnedPositionEmbedding,
    LogContinuousBias,
    Mechanism,
    MultimodalRotary,
    NoPosition,
    Positions,
    RelativePositionBias,
    RotaryDINOv3,
    RotaryEmbedding,
    RotaryMixed,
    RowRule,
    Sandwich,
    Sequence,
    ShawPosition,
    SinusoidalPositionEmbedding,
    T5Bias,
    TransformerXLPosition,
    TUPEPosition,
    XPos,
)

CELLS = Positions(torch.zeros(6, 2, dtype=torch.long), low=(0, 0), high=(1, 2))
BETWEEN = Positions(torch.rand(6), low=0, high=1)

ON_A_LINE: list[Mechanism] = [
    ClippedBias(4), DisentangledPosition(4, 8, 32), FIREBias(4), Kerple(4), RelativePositionBias(4, seq_len=6),
    Sandwich(4), ShawPosition(8), T5Bias(4), TransformerXLPosition(4, 8, 32),
]  # fmt: skip
ON_A_GRID: list[Mechanism] = [
    DecomposedPosition(8, (2, 3)), FactoredBias(4, (2, 3)), ImageRelativePosition(4, 8), LogContinuousBias(4, (2, 3)),
    RelativePositionBias(4, (2, 3)), RotaryDINOv3(8), RotaryMixed(4, 8),
]  # fmt: skip
BETWEEN_TOKENS: list[Mechanism] = [RotaryEmbedding(8), XPos(8)]
TUPE = TUPEPosition(4, 8, 32, seq_len=6)
ON_TOKENS: list[Mechanism] = [LearnedPositionEmbedding(8, seq_len=6), SinusoidalPositionEmbedding(8)]
ELSEWHERE: list[Mechanism] = [ALiBi(4), CoPE(8), MultimodalRotary(8, (2, 1, 1)), TUPE]
IN_ATTENTION = [*ON_A_LINE, *ON_A_GRID, *BETWEEN_TOKENS, *ELSEWHERE]
ONE_SIDE_AT_A_TIME = LearnedPositionEmbedding, MultimodalRotary, RotaryMixed, SinusoidalPositionEmbedding
"""They call what they are given coordinates: they do not know of which side."""
GROWTH = {
    "FactoredBias": "interpolated, clipped",
    "LearnedPositionEmbedding": "interpolated, repeated",
    "RelativePositionBias": "interpolated, clipped",
    "TUPEPosition": "interpolated, repeated",
}


def name(mechanism: Mechanism) -> str:
    return type(mechanism).__name__


def placed(mechanism: Mechanism) -> Callable[..., Any]:
    """What takes coordinates."""
    if mechanism in ON_TOKENS:
        return lambda *sides: mechanism.embed(torch.zeros(2, 6, 8), *sides)
    return mechanism.terms


@pytest.mark.parametrize("wrong", [6, (2, 3)])
@pytest.mark.parametrize("mechanism", [*IN_ATTENTION, *ON_TOKENS], ids=name)
def test_coordinates_are_none_of_these(mechanism: Mechanism, wrong: Any) -> None:
    one_side = isinstance(mechanism, ONE_SIDE_AT_A_TIME)
    text = f"to be coordinates (Sequence, Grid or Positions); got {type(wrong).__name__} {wrong}. Write Sequence(len..."
    require_said(lambda: placed(mechanism)(wrong), f"{'coordinates' if one_side else 'queries'} {text}")
    if mechanism in IN_ATTENTION:
        right = Grid(2, 3) if mechanism in ON_A_GRID else Sequence(6)
        require_said(lambda: mechanism.terms(right, wrong), f"{'coordinates' if one_side else 'keys'} {text}")


@pytest.mark.parametrize("mechanism", [*ON_A_LINE, *BETWEEN_TOKENS, *ON_TOKENS, TUPE], ids=name)
def test_a_line_has_no_cells(mechanism: Mechanism) -> None:
    text = "coordinates with one axis or a Grid for a one-axis mechanism; got Positions with 2 axes. Use ..."
    require_said(lambda: placed(mechanism)(CELLS), text)


@pytest.mark.parametrize("mechanism", [*ON_A_LINE, ALiBi(4)], ids=name)
def test_what_has_whole_offsets_has_none_between_tokens(mechanism: Mechanism) -> None:
    text = "integer coordinates; got floating-point Positions. Only rotations support floating-point positions."
    require_said(lambda: mechanism.terms(BETWEEN), text)


@pytest.mark.parametrize("mechanism", [*IN_ATTENTION, *ON_TOKENS, NoPosition()], ids=name)
def test_a_mechanism_grows_by_its_own_rules_to_a_length(mechanism: Mechanism) -> None:
    to = Grid(3, 3) if mechanism in ON_A_GRID else Sequence(9)
    rules = GROWTH.get(name(mechanism), "as is")
    text = (
        f"a growth rule of {name(mechanism)} (it has {rules}); got 'bent'. A mechanism without rules works only at ..."
    )
    require_said(lambda: mechanism.grow(to, "bent"), text)
    expected = "length to be an integer of at least 1; got"
    require_said(lambda: mechanism.extend(0), f"{expected} int 0. Pass a larger one.")
    require_said(lambda: mechanism.extend(9.0), f"{expected} float 9.0. Pass length as a Python int.")  # type: ignore[arg-type]


def test_cope_keeps_its_width_when_it_is_cut() -> None:
    (term,) = CoPE(8).terms(Sequence(6)).of(RowRule)
    assert term.narrow(slice(2, 4), slice(0, 6)).width == 8  # type: ignore[attr-defined]
