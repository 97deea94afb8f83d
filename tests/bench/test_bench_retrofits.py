"""Timing a model as published and retrofitted, on inputs of its own."""

from __future__ import annotations

import torch

from relpos.adapters.common.libraries import imported
from relpos.bench.retrofits import compare_retrofit


def test_inputs_of_ones_own_and_a_border() -> None:
    """At each length that is given; at one without lengths, as for images."""
    block = imported("torchvision.models.swin_transformer").ShiftedWindowAttention
    layer, seen = block(8, [4, 3], [0, 0], 2), []

    def inputs(length: int | None) -> dict[str, torch.Tensor]:
        seen.append(length)
        return {"x": torch.randn(1, length or 8, 6, 8)}

    report, timings = compare_retrofit(layer, (4, 8), train=True, rounds=1, border=0, inputs=inputs)
    assert report.verified
    assert [one.length for one in timings] == seen == [4, 8]
    assert all(one.ratio > 0 for one in timings)
    assert [one.tokens for one in timings] == [12, 12], "of a window, whatever the image"
    _, (one,) = compare_retrofit(layer, (), train=False, rounds=1, border=0, inputs=inputs)
    assert one.length is seen[-1] is None
