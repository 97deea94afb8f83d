"""Common base of the optimizers: checked numbers, parameters with their gradients, and a momentum per parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relpos.core.checks import fail, require_number, shape_of

ParameterGroups = Any
"""As `torch.optim.Optimizer` takes them: tensors, named tensors, or groups as dictionaries."""


class DecoupledOptimizer(torch.optim.Optimizer):
    """An optimizer whose weight decay shrinks the weights themselves, as AdamW's does (Loshchilov and Hutter 2019).

    All arithmetic is on lists of tensors (`torch._foreach_*`). The rate may be a 0-dimensional tensor, so that a
    compiled step is not recompiled for every rate of a schedule.
    """

    def __init__(self, params: ParameterGroups, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):
                require_number(group["lr"], "lr", "of at least 0", "Pass a learning rate.")
            require_number(group["weight_decay"], "weight_decay", "of at least 0", "0 is none.")
            betas = group["betas"]
            if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
                fail("two betas, at least 0 and below 1", repr(betas), "Pass betas=(beta1, beta2).")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the gradients. `closure`, if given, computes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params, [self._gradient(p) for p in params])
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the parameters of a group that have gradients."""

    @staticmethod
    def _gradient(parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            fail("dense gradients", shape_of(gradient), "Build the embedding with sparse=False.")
        return gradient

    def _states(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """The state tensor `name` of each parameter, created as zeros."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in params]

    @staticmethod
    def _move(group: dict[str, Any], params: list[Tensor], directions: list[Tensor]) -> None:
        """Decay the parameters, then subtract the rate times the directions, which are overwritten."""
        rate, decay = group["lr"], group["weight_decay"]
        if decay:
            torch._foreach_mul_(params, 1 - rate * decay)
        torch._foreach_mul_(directions, rate)
        torch._foreach_sub_(params, directions)
