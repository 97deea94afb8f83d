"""Sophia against the paper's pseudocode by loops, and its two estimates against exact diagonals of small models."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from laws import OptimizerLaws
from torch import nn

from relpos import Sophia, sampled_loss


def by_loops(weights: list[float], gradients: list[list[float]], estimates: dict[int, list[float]]) -> list[float]:
    """Algorithm 3 of the paper, in Python's own floating point; the estimates at some steps are given."""
    lr, beta1, beta2, rho, decay, eps = 3e-3, 0.965, 0.99, 0.1, 0.2, 1e-12
    weights, m, h = list(weights), [0.0] * len(weights), [0.0] * len(weights)
    for number, step in enumerate(gradients):
        for i, g in enumerate(step):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            if number in estimates:
                h[i] = beta2 * h[i] + (1 - beta2) * estimates[number][i]
            weights[i] -= lr * decay * weights[i]
            weights[i] -= lr * min(max(m[i] / max(rho * h[i], eps), -1.0), 1.0)
    return weights


class TestSophia(OptimizerLaws):
    def build(self, params, **more):  # type: ignore[no-untyped-def]
        return Sophia(params, **{"lr": 1e-2, "weight_decay": 0.1, **more})

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, Sophia)
        optimizer.update_hessian(6)  # of the training gradients: the laws only want some estimate


def test_a_hundred_steps_are_the_papers() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, generator=generator, dtype=torch.float64)
    gradients = torch.randn(100, 6, generator=generator, dtype=torch.float64)
    gradients[:, 5] *= 1e-4
    weight = nn.Parameter(start.clone())
    optimizer = Sophia([weight], lr=3e-3, rho=0.1, weight_decay=0.2, eps=1e-12)
    estimates = {}
    for number, gradient in enumerate(gradients):
        if number % 10 == 0:
            sampled = torch.randn(6, generator=generator, dtype=torch.float64)
            weight.grad = sampled
            optimizer.update_hessian(7)
            estimates[number] = (7 * sampled.square()).tolist()
        weight.grad = gradient.clone()
        optimizer.step()
    wanted = by_loops(start.tolist(), gradients.tolist(), estimates)
    torch.testing.assert_close(weight.data, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-14)
    moved = optimizer.state[weight]["exp_avg"] / (0.1 * optimizer.state[weight]["hessian"]).clamp(min=1e-12)
    assert (moved.abs() > 1).any(), "some entry is clipped"
    assert (moved.abs() < 1).any(), "and some is not"


@pytest.mark.slow
def test_the_sampled_estimate_is_the_gauss_newton_diagonal() -> None:
    """In the mean over draws: J^T (diag(p) - p p^T) J of the scores, averaged over the batch, by loops."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    params = list(model.parameters())
    exact = [torch.zeros_like(p) for p in params]
    for one in x:
        scores = model(one)
        p = scores.detach().softmax(dim=0)
        rows = [torch.autograd.grad(score, params, retain_graph=True) for score in scores]
        for n, a, b in itertools.product(range(len(params)), range(3), range(3)):
            exact[n] += ((p[a] if a == b else 0.0) - p[a] * p[b]) * rows[a][n] * rows[b][n] / len(x)
    optimizer = Sophia(params, betas=(0.9, 0.0))  # h is the last estimate alone
    total, draws = [torch.zeros_like(p) for p in params], 4000
    for _ in range(draws):
        optimizer.zero_grad()
        sampled_loss(model(x)).backward()
        optimizer.update_hessian(len(x))
        for sum_, p in zip(total, params, strict=True):
            sum_ += optimizer.state[p]["hessian"] / draws
    for mean, wanted in zip(total, exact, strict=True):
        torch.testing.assert_close(mean, wanted, rtol=0.12, atol=0.01)
        assert wanted.abs().max() > 0.05, "the tolerance means something"


@pytest.mark.slow
def test_hutchinsons_estimate_is_the_hessians_diagonal() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
    matrix = torch.randn(4, 4, dtype=torch.float64)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (w @ matrix @ w) ** 2 + w.exp().sum()

    exact = torch.autograd.functional.hessian(loss, weight.detach()).diagonal()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = Sophia([{"params": [weight]}, {"params": [unused]}], betas=(0.9, 0.0))
    mean, draws = torch.zeros_like(weight), 2000
    for _ in range(draws):
        optimizer.update_hessian_by_hutchinson(loss(weight))
        mean += optimizer.state[weight]["hessian"] / draws
    torch.testing.assert_close(mean.detach(), exact, rtol=0.1, atol=0.1 * exact.abs().max().item())
    assert weight.grad is None, "gradients are left alone"
    assert unused not in optimizer.state


def test_a_linear_loss_has_no_curvature() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Sophia([weight])
    optimizer.update_hessian_by_hutchinson((2 * weight).sum())
    assert torch.equal(optimizer.state[weight]["hessian"], torch.zeros(3))


def test_sampled_labels_follow_the_scores() -> None:
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.2])
    scores = p.log().expand(2, 20_000, 3)
    wanted = -(p * p.log()).sum()
    assert sampled_loss(scores).item() == pytest.approx(wanted.item(), rel=0.02)
    torch.manual_seed(1)
    small = torch.randn(4, 3, requires_grad=True)
    found = torch.autograd.grad(sampled_loss(small), small)[0]
    torch.manual_seed(1)
    torch.randn(4, 3)
    drawn = torch.multinomial(small.detach().softmax(dim=-1), 1)[:, 0]
    torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(small, drawn), small)[0])


def test_what_it_needs_is_said(unchecked: None) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Sophia([weight])
    for call, says in (
        (lambda: optimizer.update_hessian(1), r"gradients of sampled_loss; got none"),
        (lambda: optimizer.update_hessian(0), "count"),
        (lambda: optimizer.update_hessian_by_hutchinson(torch.ones(())), "a loss of one number with its graph"),
        (lambda: Sophia([weight], rho=0.0), "rho to be a number above 0"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
