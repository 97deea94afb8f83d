"""A kind of term that no engine was taught: right where its `scores` are all that is needed, refused elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from engine_steps import with_gradients
from torch import Tensor

from relpos import Mask, Rotation, attention, explain
from relpos.core import Term, Terms, rotate
from relpos.core.checks import fail
from relpos.core.tree import register, static
from relpos.engines.streaming import STREAMING

B, H, N, D = 2, 3, 7, 4


@register("made_up.Tilt")
@dataclass(frozen=True, eq=False)
class Tilt(Term):
    """Adds `gain[h] * q[i, 0] * (first + i - j)`, with q as it is before rotation."""

    gain: Tensor
    first: int = static(default=0)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.gain.shape != (q.shape[1],):
            fail(f"a Tilt of {q.shape[1]} heads", str(tuple(self.gain.shape)), "Build it for these heads.")

    def narrow(self, queries: slice, keys: slice) -> Tilt:
        return replace(self, first=self.first + (queries.start or 0) - (keys.start or 0))

    def scores(self, q: Tensor, k: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
        apart = self.first + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return self.gain[:, None, None].to(q.dtype) * q[..., :1] * apart


def ingredients() -> tuple[list[Tensor], Tensor]:
    """q, k, v and gains; angles."""
    shapes = *[(B, H, N, D)] * 3, (H,)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return leaves, torch.rand(1, 1, N, 2, dtype=torch.float64)


def written_out(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, angles: Tensor, causal: bool = False) -> Tensor:
    i, j = torch.arange(N)[:, None], torch.arange(N)
    turned = [rotate(x, angles, layout="half") for x in (q, k)]
    score = turned[0] @ turned[1].mT * D**-0.5 + gain[:, None, None] * q[..., :1] * (i - j)
    return (score.masked_fill(j > i, -torch.inf) if causal else score).softmax(dim=-1) @ v


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
def test_values_and_gradients(backend: str, causal: bool, rotated: bool) -> None:
    leaves, angles = ingredients()
    q, k, v, gain = leaves
    position = Terms(Rotation(angles, angles, "half"), Tilt(gain)) if rotated else Tilt(gain)
    found = attention(q, k, v, position=position, mask=Mask.causal() if causal else None, backend=backend)
    exact = written_out(*leaves, angles if rotated else 0 * angles, causal)
    torch.testing.assert_close(with_gradients(found, leaves), with_gradients(exact, leaves))


def test_streaming_names_it() -> None:
    (*tensors, gain), _ = ingredients()
    with pytest.raises(NotImplementedError, match="'streaming', which lacks Tilt"):
        attention(*tensors, position=Tilt(gain), backend="streaming")
    explained = explain(*tensors, position=Tilt(gain), mask=Mask.causal())
    assert explained.passed_over["streaming"] == "it lacks Tilt"


def test_it_is_checked_and_narrowed() -> None:
    q, k, v, gain = (x.detach() for x in ingredients()[0])
    with pytest.raises(ValueError, match="a Tilt of 3 heads"):
        attention(q, k, v, position=Tilt(gain[:2]))
    whole = attention(q, k, v, position=Tilt(gain), mask=Mask.causal())
    last = Terms(Tilt(gain)).narrow(slice(N - 1, N), slice(0, N))
    torch.testing.assert_close(attention(q[:, :, -1:], k, v, position=last), whole[:, :, -1:])


def test_a_plan_without_its_gradient_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming's dense plan asks terms for their scores, so that its forward is right even so."""
    monkeypatch.setattr(type(STREAMING), "served", None)
    (*tensors, gain), angles = ingredients()
    position = Rotation(angles, angles, "half") + Tilt(gain)
    found = attention(*tensors, position=position, backend="streaming")
    torch.testing.assert_close(found, written_out(*tensors, gain, angles))
    with pytest.raises(NotImplementedError, match="no gradient for Tilt"):
        found.sum().backward()


def test_two_trees_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Rotation(Term):
        angle: float = static()

    with pytest.raises(ValueError, match="a tree class with a unique name"):
        register("made_up.Rotation")(Rotation)
