"""Tensors on the device meta have shapes and no numbers: attention gives a shape, and computes nothing."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from relpos import CoPE, Mask, Sequence, Sinks, T5Bias, attention
from relpos.engines.selection import ENGINES

META = torch.device("meta")


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("an engine computes")

    for engine in ENGINES:
        monkeypatch.setattr(type(engine), "run", run)


def on_meta(*shape: int, **more: Any) -> torch.Tensor:
    return torch.empty(*shape, device=META, **more)


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_shapes_of_a_call(dtype: torch.dtype, grouped: bool) -> None:
    """A rule of rows would run block by block, which takes seconds."""
    n, groups = 8192, 2 if grouped else 4
    q, k, v = (on_meta(2, heads, n, width, dtype=dtype, requires_grad=True) for heads, width in (
        (4, 8), (groups, 8), (groups, 6)))  # fmt: skip
    with META:
        mechanisms = None, T5Bias(4), CoPE(8, max_position=64)
    for mechanism in mechanisms:
        for mask in (None, Mask.causal()):
            place = {} if mechanism is None else {"position": mechanism, "queries": Sequence(n)}
            out, lse = attention(q, k, v, mask=mask, return_lse=True, dropout=0.1, **place)  # type: ignore[call-overload]
            assert (out.shape, out.dtype, out.device) == ((2, 4, n, 6), dtype, META)
            assert (lse.shape, lse.dtype, lse.device) == ((2, 4, n), torch.float32, META)
            leaves = [q, k, v, *(() if mechanism is None else mechanism.parameters())]
            found = torch.autograd.grad(out.sum() + lse.sum(), leaves)
            assert [x.shape for x in found] == [x.shape for x in leaves]


@pytest.mark.usefixtures("_no_engine")
def test_what_does_not_fit_is_said() -> None:
    q = on_meta(1, 2, 4, 8)
    with pytest.raises(ValueError, match="expected LineBias on meta; got cpu"):
        attention(q, q, q, position=T5Bias(2).terms(Sequence(4)))
    with pytest.raises(ValueError, match="q, k and v on one device"):
        attention(q, q.new_zeros(1, 2, 4, 8, device="cpu"), q)
    assert attention(q, q, q, position=Sinks(on_meta(2))).shape == q.shape


def test_what_counts_operations_sees_them() -> None:
    q = on_meta(1, 2, 16, 8)
    with FlopCounterMode(display=False) as counted:
        attention(q, q, q)
    assert counted.get_total_flops() == 2 * 2 * 2 * 16 * 16 * 8


def test_an_engine_asked_for_by_name_runs() -> None:
    q = on_meta(1, 2, 16, 8)
    for backend in ("reference", "sdpa", "streaming"):
        assert attention(q, q, q, backend=backend).shape == q.shape
