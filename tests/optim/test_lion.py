"""Lion against the paper's pseudocode by loops, number by number."""

import math

import pytest
import torch
from laws import OptimizerLaws

from relpos import Lion


def by_loops(weights: list[float], gradients: list[list[float]], decay: float) -> list[float]:
    """Algorithm 2 of the paper, in Python's own floating point."""
    lr, beta1, beta2 = 3e-3, 0.9, 0.99
    weights, momenta = list(weights), [0.0] * len(weights)
    for step in gradients:
        for i, g in enumerate(step):
            mixed = beta1 * momenta[i] + (1 - beta1) * g
            sign = math.copysign(1.0, mixed) if mixed != 0 else 0.0
            weights[i] -= lr * (sign + decay * weights[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * g
    return weights


class TestLion(OptimizerLaws):
    def build(self, params, **more):  # type: ignore[no-untyped-def]
        return Lion(params, **{"lr": 1e-2, "weight_decay": 0.1, **more})


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_hundred_steps_are_the_papers(decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(7, generator=generator, dtype=torch.float64)
    gradients = torch.randn(100, 7, generator=generator, dtype=torch.float64)
    gradients[:, 6] = 0.0  # whose sign is 0: decay alone
    weight = torch.nn.Parameter(start.clone())
    optimizer = Lion([weight], lr=3e-3, betas=(0.9, 0.99), weight_decay=decay)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    wanted = by_loops(start.tolist(), gradients.tolist(), decay)
    torch.testing.assert_close(weight.data, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-14)


def test_the_direction_is_not_the_sign_of_the_new_momentum() -> None:
    """As in the document relpos started from: after a large gradient and a small one back, the two differ."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Lion([weight], lr=1.0, betas=(0.5, 0.99))
    for gradient in (1.0, -0.015):  # momentum 0.01, then 0.0097; mixed -0.0025
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    assert weight.item() == pytest.approx(-1.0 + 1.0)
    assert optimizer.state[weight]["exp_avg"].item() > 0
