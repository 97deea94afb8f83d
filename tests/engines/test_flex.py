"""The FlexAttention engine. Without a GPU: what it makes of a call, by `flex_attention` as it is, forward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_streaming import COORDINATES, MASKS, B, H, N, biased
from test_terms_in_engines import CASES, inputs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import relpos
from relpos import LineBias, LineVectors, Mask, Sequence, attention, lines
from relpos.engines import flex
from relpos.engines.arguments import prepare
from relpos.engines.flex import FLEX
from relpos.engines.hidden import without_hidden

FAST_SHARE = 4  # of its tests, in the fast part

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

UNSERVED = ("AxisVectors", "LowRank", "DenseBias", "DenseBias of keys", "RowRule", "several")
SERVED = [
    name
    for name, case in CASES.items()
    if not any(word in name for word in UNSERVED) and "value side" not in str(case.lacks)
]


def both(*tensors: torch.Tensor, position: Any, mask: Mask | None = None) -> None:
    """Output and log-sum-exp against the definition's."""
    call = prepare(
        *tensors, position=position, queries=None, keys=None, mask=mask, scale=None, dropout=0.0, return_lse=True
    )
    with torch.no_grad():
        ours = flex.attend(without_hidden(call).rotated(), flex_attention, create_block_mask)
        theirs = attention(*tensors, position=position, mask=mask, backend="reference", return_lse=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SERVED)
def test_terms_mean_what_the_definition_says(name: str) -> None:
    case = CASES[name]
    (q, k, v), leaves, _ = inputs(case, torch.float32)
    both(q, k, v, position=case.terms(*leaves), mask=case.mask)


@pytest.mark.parametrize("name", COORDINATES)
def test_every_layout(name: str) -> None:
    queries, keys = COORDINATES[name]
    position, shapes = biased(queries, keys)
    n, m = queries.count, (queries if keys is None else keys).count
    both(*(torch.randn(B, H, count, 8) for count in (n, m, m)), position=position(torch.randn(shapes[0])))


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    position, shapes = biased(Sequence(N))
    both(*(torch.randn(B, H, N, 8) for _ in range(3)), position=position(torch.randn(shapes[0])), mask=MASKS[name])


def test_globals_within_a_limit() -> None:
    chosen = torch.arange(N) % 5 == 0
    mask = Mask(left=2, right=2, query_global=chosen, key_global=chosen) & Mask.causal()
    both(*(torch.randn(B, H, N, 8) for _ in range(3)), position=None, mask=mask)


def test_what_is_hidden_may_hold_anything() -> None:
    """A product with 0 is no help, but the call that engines get has none of it. `test_gpu.py` has the gradients."""
    seen = torch.arange(N) < torch.tensor([[20], [3]])
    q, k, v = (torch.randn(B, H, N, 8) for _ in range(3))
    bad = [x.masked_fill(~seen[:, None, :, None], torch.nan) for x in (q, k, v)]
    both(*bad, position=None, mask=Mask.padding(seen))


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 6, 16)
    line = lines(Sequence(6))
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="a CUDA device"):
            attention(q, q, q, backend="flex")

    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    def lacks(x: torch.Tensor = q, dropout: float = 0.0, **given: Any) -> str | None:
        call = prepare(
            x, x, x, queries=None, keys=None, scale=None, dropout=dropout, return_lse=False, mask=None,
            **({"position": None} | given),
        )  # fmt: skip
        object.__setattr__(call, "q", call.q.as_subclass(OnCuda))
        return FLEX.unsupported(call)

    many = lines(Sequence(300))
    long = torch.randn(1, 2, 300, 16)
    assert lacks() is None
    assert lacks(position=LineBias(torch.randn(2, 11), line)) is None
    assert lacks(dropout=0.1) == "dropout"
    assert lacks(q.double()) == "float64"
    assert lacks(q[..., :8]) == "head widths below 16"
    assert lacks(position=LineVectors(torch.randn(1, 11, 16), None, line, "value")) == "LineVectors on the value side"
    assert "more than 512" in str(lacks(long, position=LineVectors(torch.randn(1, 599, 16), None, many, "query")))
    assert lacks(position=relpos.DenseBias(torch.randn(1, 1, 6, 6))) == "DenseBias"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of FlexAttention's compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_on_a_gpu() -> None:
    line = lines(Sequence(256), device=torch.device("cuda"))
    leaves = [torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3)]
    values = torch.randn(4, line.length, device="cuda", requires_grad=True)
    found = []
    for backend in ("flex", "reference"):
        out = attention(*leaves, position=LineBias(values, line), backend=backend)
        assert isinstance(out, torch.Tensor)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, values])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
