"""The FlexAttention engine. Without a GPU: what it makes of a call, by `flex_attention` as it is, forward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_steps import call_of
from test_streaming import COORDINATES, MASKS, B, H, N, biased
from test_terms_in_engines import CASES, inputs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import relpos
from relpos import LineBias, LineVectors, Mask, Sequence, attention, lines
from relpos.engines import flex
from relpos.engines.flex import FLEX
from relpos.engines.unseen import without_unseen

FAST_SHARE = 10  # of its tests, in the fast part

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

UNSERVED = (
    "AxisVectors",
    "DenseBias",
    "DenseBias of keys",
    "IndexedBias",
    "RowRule",
    "several",
    "Rotation of values",
)  # values turn before an engine
SERVED = [
    name
    for name, case in CASES.items()
    if not any(word in name for word in UNSERVED) and "value side" not in str(case.lacks)
]


def both(queries: int, keys: int | None = None, *, position: Any = None, mask: Mask | None = None) -> None:
    """Output and log-sum-exp of a call against the definition's."""
    q, k, v = (torch.randn(B, H, count, 8) for count in (queries, keys or queries, keys or queries))
    compare([q, k, v], position, mask)


def compare(tensors: list[torch.Tensor], position: Any, mask: Mask | None) -> None:
    call = without_unseen(call_of(*tensors, position=position, mask=mask, return_lse=True)).rotated()
    with torch.no_grad():
        ours = flex.attend(call, flex_attention, create_block_mask)
        theirs = attention(*tensors, position=position, mask=mask, backend="reference", return_lse=True)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SERVED)
def test_terms_mean_what_the_definition_says(name: str) -> None:
    case = CASES[name]
    tensors, leaves, _ = inputs(case, torch.float32)
    compare(tensors, case.terms(*leaves), case.mask)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flex_attention` without Dynamo, a third of a second a mask. It reads each term and `a mask of every part`."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("name", COORDINATES)
def test_every_layout(name: str, untraced: None) -> None:
    queries, keys = COORDINATES[name]
    position, shapes = biased(queries, keys)
    both(queries.count, None if keys is None else keys.count, position=position(torch.randn(shapes[0])))


CHOSEN = torch.arange(N) % 5 == 0
WITHIN = Mask(left=2, right=2, query_global=CHOSEN, key_global=CHOSEN) & Mask.causal()


@pytest.mark.parametrize("mask", [*MASKS.values(), WITHIN], ids=[*MASKS, "globals within a limit"])
def test_every_mask(mask: Mask, untraced: None) -> None:
    position, shapes = biased(Sequence(N))
    both(N, position=position(torch.randn(shapes[0])), mask=mask)


def test_what_is_hidden_may_hold_anything(untraced: None) -> None:
    """A product with 0 is no help, but the call that engines get has none of it. `test_gpu.py` has the gradients."""
    seen = torch.arange(N) < torch.tensor([[20], [3]])
    bad = [torch.randn(B, H, N, 8).masked_fill(~seen[:, None, :, None], torch.nan) for _ in range(3)]
    compare(bad, None, Mask.padding(seen))


def test_each_element_has_blocks_of_its_own(untraced: None) -> None:
    """One has documents of 100 tokens, the other a single one. FlexAttention reads blocks only where it is compiled."""
    made = []

    def make(*arguments: Any, **settings: Any) -> Any:
        made.append(create_block_mask(*arguments, **settings))
        return made[-1]

    mask = Mask.packed(torch.arange(300) // torch.tensor([[100], [300]]))
    flex.attend(call_of(*(torch.randn(2, 1, 300, 8) for _ in range(3)), mask=mask), flex_attention, make)
    assert made[0].to_dense().sum(dim=(1, 2, 3)).tolist() == [7, 9]


SHORT = torch.randn(1, 2, 6, 16)


def vectors(n: int, side: Any) -> LineVectors:
    line = lines(Sequence(n))
    return LineVectors(torch.randn(1, line.length, 16), None, line, side)


class OnCuda(torch.Tensor):
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("q", "given", "said"),
    [
        (SHORT, {}, None),
        (SHORT, {"position": LineBias(torch.randn(2, 11), lines(Sequence(6)))}, None),
        (SHORT, {"dropout": 0.1}, "dropout"),
        (SHORT.double(), {}, "float64"),
        (SHORT[..., :8], {}, "head widths below 16"),
        (SHORT, {"position": vectors(6, "value")}, "LineVectors on the value side"),
        (torch.randn(1, 2, 300, 16), {"position": vectors(300, "query")}, "more than 512"),
        (SHORT, {"position": relpos.DenseBias(torch.randn(1, 1, 6, 6))}, "DenseBias"),
    ],
)
def test_it_says_what_it_lacks(q: torch.Tensor, given: dict[str, Any], said: str | None) -> None:
    call = call_of(q, q, q, **given)
    object.__setattr__(call, "q", call.q.as_subclass(OnCuda))
    lack = FLEX.unsupported(call)
    assert lack is None if said is None else said in str(lack)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_it_wants_a_gpu() -> None:
    with pytest.raises(NotImplementedError, match="a CUDA device"):
        attention(SHORT, SHORT, SHORT, backend="flex")
