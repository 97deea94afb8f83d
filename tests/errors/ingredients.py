"""What the tables of wrong calls are made of: small right things, one of which each row spoils."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos import (
    Grid,
    LineBias,
    Positions,
    RelativePositionBias,
    Sequence,
    Site,
    VisionTransformer,
    lines,
)
from relpos.core import axis_lines

Row = tuple[Callable[[], Any], str]
"""A wrong call, and what its message says behind "expected": what was expected, what came, the remedy. `...` stands for
anything."""

LINE = lines(Sequence(6))
AXES = axis_lines(Grid(2, 3))
TABLE = RelativePositionBias(4, seq_len=6)
WINDOW = RelativePositionBias(4, window_size=(2, 3))
ANGLES = torch.zeros(1, 1, 6, 4)
META = torch.device("meta")
"""Stands for any other device."""


def x(
    batch: int = 2,
    heads: int = 4,
    tokens: int = 6,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Queries, keys or values."""
    return torch.ones(batch, heads, tokens, width, dtype=dtype, device=device)


def places(*shape: int) -> Positions:
    """Irregular positions, all at 0, of a line of six."""
    return Positions(torch.zeros(*shape, dtype=torch.long), low=0, high=5)


def line_bias(n: int = 6, heads: int = 4, m: int | None = None) -> LineBias:
    """A bias on the line of two sequences."""
    line = lines(Sequence(n), None if m is None else Sequence(m))
    return LineBias(torch.zeros(heads, line.length), line)


def site(**changes: Any) -> Site:
    """A site with some of its fields replaced."""
    return Site(**{"num_heads": 4, "head_dim": 8, "embed_dim": 32, "queries": Grid(2, 3), **changes})


def vit(**changes: Any) -> VisionTransformer:
    """A small vision transformer with some of its arguments replaced."""
    small = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 3, "embed_dim": 16, "depth": 1}
    return VisionTransformer(**{**small, "num_heads": 2, **changes})


def is_one_line(message: object) -> bool:
    """Whether it says what was expected, what came, and the remedy."""
    return re.fullmatch(r"expected .+; got .+\. .+\S", str(message)) is not None


def require_said(call: Callable[[], Any], text: str, kind: type[Exception] = ValueError) -> None:
    """That a wrong call says this in one line, as in a `Row`."""
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert type(caught.value) is kind
    assert is_one_line(line), f"not of the form 'expected ...; got .... Remedy': {line}"
    pattern = re.escape(f"expected {text}").replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, line), f"{line!r}, which is not {text!r}"
