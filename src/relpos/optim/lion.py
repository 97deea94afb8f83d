"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

Algorithm 2 there:

    direction = sign(beta1 * m + (1 - beta1) * g)
    m         = beta2 * m + (1 - beta2) * g

The direction uses the momentum before its update, with another beta. Every weight moves by the rate, so use a rate 3 to
10 times below AdamW's and a decay as many times above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.optim.base import DecoupledOptimizer, ParameterGroups


class Lion(DecoupledOptimizer):
    """Sign momentum, with one tensor of state per parameter.

    Every weight moves by the rate: use one 3 to 10 times below AdamW's, and a decay as many times above.

    Source: Chen et al. 2023, algorithm 2.

    Args:
        params: tensors, or groups of them.
        lr: learning rate.
        betas: of the direction, and of the momentum.
        weight_decay: decoupled, times the rate.

    Raises:
        ValueError: a rate, beta or decay is out of range; in `step`, sparse gradients.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> before = model.weight.detach().clone()
        >>> optimizer = relpos.Lion(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> before - model.weight.detach()  # each weight moves by the rate
        tensor([[0.1000, 0.1000]])
    """

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        momenta = self._states(params, "exp_avg")
        directions = list(torch._foreach_mul(momenta, beta1))
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        self._move(group, params, directions)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
