"""A second derivative is right, or refused in one line that names the backend, whatever the position is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from relpos import ALiBi, RotaryEmbedding, Sequence, T5Bias, attention

FAST_CASES = 8  # of each of its tests, in the fast part

POSITIONS = {"none": lambda: None, "fixed": lambda: ALiBi(2), "rotation": lambda: RotaryEmbedding(8),
             "learned": lambda: T5Bias(2, init_std=0.5)}  # fmt: skip


def second(backend: str, name: str, mask: str | None, n: int) -> tuple[Tensor, ...]:
    """The gradients of a penalty on the gradient of q."""
    torch.manual_seed(0)
    position = POSITIONS[name]()
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, n, 8, dtype=torch.float64)]
    place: dict[str, Any] = {} if position is None else {"position": position, "queries": Sequence(n)}
    out = attention(*leaves, mask=mask, backend=backend, **place)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaves)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("backend", ["auto", "sdpa", "streaming"])
def test_a_second_derivative_is_right_or_refused(backend: str, name: str, mask: str | None) -> None:
    for n in (6, 600):
        try:
            found = second(backend, name, mask, n)
        except NotImplementedError as error:
            said = str(error)
        else:
            assert backend != "streaming"
            torch.testing.assert_close(found, second("reference", name, mask, n))
            continue
        assert said.startswith("expected first derivatives only; got a second derivative of backend ")
        assert said.endswith(" lacks it. Use backend='reference'.")


def test_a_first_derivative_may_keep_its_graph() -> None:
    q = torch.randn(1, 2, 6, 8, requires_grad=True)
    out = attention(q, q, q)
    (plain,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (kept,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert kept.requires_grad
    assert torch.equal(plain, kept)
    eye = torch.eye(8).expand(8, 8).view(8, 1, 1, 1, 8).expand(8, 1, 2, 6, 8)
    batched = torch.autograd.grad(out, q, eye, is_grads_batched=True, create_graph=True)[0]
    assert torch.equal(batched[0], torch.autograd.grad(out, q, eye[0])[0])
