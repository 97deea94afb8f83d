"""Numbers of the host go to a device once: later a GPU need not wait for them, and a CUDA graph can be captured."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from relpos import Grid, Sequence
from relpos.position import presets
from relpos.position.base.site import Site
from relpos.position.base.states import terms_at_rest

META = torch.device("meta")
"""Stands for a GPU: it is not the CPU."""


@pytest.mark.parametrize("name", sorted(presets()))
def test_terms_made_again_copy_nothing_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = presets()[name]
    where: Sequence | Grid = Grid(3, 4) if 1 not in preset.token_axes else Sequence(6)
    site = Site(num_heads=4, head_dim=16, embed_dim=64, queries=where)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which does not know this device
    mechanism = preset.build(site).to(META)
    terms_at_rest(mechanism, where)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("numbers of the host were copied again")

    monkeypatch.setattr(torch, "tensor", refused)
    monkeypatch.setattr(torch.Tensor, "to", _only_between_dtypes(torch.Tensor.to))
    terms_at_rest(mechanism, where)


def _only_between_dtypes(to: Any) -> Any:
    def checked(x: torch.Tensor, *arguments: Any, **given: Any) -> Any:
        moved = to(x, *arguments, **given)
        assert moved.device == x.device, "a tensor of the host was copied again"
        return moved

    return checked
