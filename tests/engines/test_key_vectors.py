"""Vectors on the key side in the streaming engine: by the products of bands, or of a head's keys at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from relpos.core import LineVectors, Mask, Sequence, Terms, lines
from relpos.engines import attention
from relpos.engines.call import Call
from relpos.engines.streaming.key_vectors import KeyBands, KeyProducts
from relpos.engines.streaming.planning import make_plan

B, H, D, ROWS = 2, 3, 4, 11


@dataclass
class Inputs:
    """What a call reads, and the vectors of a term on the key side."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    vectors: Tensor
    bias: Tensor

    @staticmethod
    def random(n: int, m: int, dtype: torch.dtype = torch.float64, width: int = D, std: float = 1.0) -> Inputs:
        generator = torch.Generator().manual_seed(n)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        q, k, v, upstream = (random(B, H, count, width) for count in (n, m, m, n))
        inputs = Inputs(q, k, v, upstream, std * random(H, ROWS, width), random(H, width))
        for x in inputs.learned:
            x.requires_grad_()
        return inputs

    @property
    def learned(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.vectors, self.bias]

    def terms(self, *, buckets: bool = True) -> Terms:
        """Offsets beyond a few read the first vector or the last; or each its own, and the others zeros."""
        line = lines(Sequence(self.q.shape[2]), Sequence(self.k.shape[2]))
        middle = torch.arange(line.length) - line.length // 2 + ROWS // 2
        index = middle.clamp(0, ROWS - 1) if buckets else None
        return Terms(LineVectors(self.vectors, index, line, "key", bias=self.bias))

    def results(self, backend: str, mask: Mask | None = None, *, buckets: bool = True) -> list[Tensor]:
        """Output and gradients, of keys that are not learned none."""
        terms = self.terms(buckets=buckets)
        out = attention(self.q, self.k, self.v, position=terms, mask=mask, backend=backend)
        assert isinstance(out, Tensor)
        learned = [x for x in self.learned if x.requires_grad]
        return [out, *torch.autograd.grad(out, learned, self.upstream)]


def _close(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.detach().abs().max())))


PADDING = Mask.padding(torch.arange(170) < torch.tensor([[170], [60]]))


@pytest.mark.parametrize(
    ("n", "buckets", "mask", "kind"),
    [
        (170, True, None, KeyProducts),
        (170, True, Mask.causal(), KeyProducts),
        (170, True, Mask.window(9, 2), KeyProducts),
        (170, True, PADDING, KeyBands),
        (170, False, None, KeyBands),
        (ROWS, True, None, KeyBands),
        (ROWS + 1, True, None, KeyProducts),
    ],
    ids=["all", "causal", "window", "padding", "an entry each", "few queries", "a query more"],
)
def test_keys_are_multiplied_once_where_vectors_are_fewer_than_queries(
    n: int, buckets: bool, mask: Mask | None, kind: type
) -> None:
    inputs = Inputs.random(n, 170)
    call = Call(inputs.q, inputs.k, inputs.v, inputs.terms(buckets=buckets), mask, D**-0.5)
    (term,) = make_plan(call, backward=True).vectors.terms  # type: ignore[attr-defined]
    assert type(term) is kind
    _close(inputs.results("streaming", mask, buckets=buckets), inputs.results("reference", mask, buckets=buckets))


def test_vectors_learn_where_keys_do_not() -> None:
    inputs = Inputs.random(90, 80)
    inputs.k.requires_grad_(False)
    _close(inputs.results("streaming"), inputs.results("reference"))


def test_inputs_whose_rows_lie_apart() -> None:
    """As those of a layer, whose heads lie side by side in each token."""
    inputs = Inputs.random(90, 90)
    expected = inputs.results("reference")
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    inputs.q, inputs.k, inputs.v = (x.requires_grad_() for x in apart)
    inputs.upstream = inputs.upstream.transpose(1, 2).contiguous().transpose(1, 2)
    _close(inputs.results("streaming"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [0.5, 3.0])
def test_errors_of_far_offsets(dtype: torch.dtype, std: float) -> None:
    """Sums over a thousand offsets are at most twice as far from float64's as those of all pairs at once."""
    inputs = Inputs.random(700, 700, dtype, width=16, std=std)
    wide = Inputs(*(x.detach().double() for x in vars(inputs).values()))
    for x in wide.learned:
        x.requires_grad_()
    exact = wide.results("reference")
    for ours, theirs, true in zip(inputs.results("streaming"), inputs.results("reference"), exact, strict=True):
        error, expected = ((x.double() - true).square().mean().sqrt() for x in (ours, theirs))
        assert error <= 2 * expected
