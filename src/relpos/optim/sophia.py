"""Sophia: a momentum over an estimate of the Hessian's diagonal, clipped per entry (Liu et al. 2023, Alg. 3).

    m = beta1 * m + (1 - beta1) * g
    h = beta2 * h + (1 - beta2) * estimate                       every k steps
    w = w - lr * clamp(m / max(rho * h, eps), -1, 1)

The estimate does not come from the training gradient, so the training loop must make it. Sophia-G, the
Gauss-Newton-Bartlett estimate (Alg. 2), takes a backward pass on labels sampled from the model:

    if step % 10 == 0:
        sampled_loss(model(x)).backward()
        optimizer.update_hessian(labels.numel())             number of labels in the loss's mean
        optimizer.zero_grad()

Sophia-H, Hutchinson's (Alg. 1), takes a derivative of the gradient along a random vector:

    if step % 10 == 0:
        optimizer.update_hessian_by_hutchinson(loss(model(x)))

It differentiates twice: attention's engines "reference" and "sdpa" can; "streaming", "triton" and "flex" cannot.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core.checks import fail, require_int, require_number, shape_of
from relpos.optim.base import DecoupledOptimizer, ParameterGroups


class Sophia(DecoupledOptimizer):
    """Clipped second-order steps, with two tensors of state per parameter.

    Every few steps, call `update_hessian` after `sampled_loss(...).backward()`, or
    `update_hessian_by_hutchinson(loss)`; without them every entry is clipped and moves by the rate.

    Source: Liu et al. 2023 (Sophia), algorithm 3.

    Args:
        params: tensors, or groups of them.
        lr: learning rate.
        betas: of the momentum, and of the Hessian's estimate.
        rho: factor on the Hessian: the smaller, the more entries are clipped and move by exactly the rate.
        weight_decay: decoupled, times the rate.
        eps: the smallest divisor of a momentum.

    Raises:
        ValueError: a rate, beta, rho, eps or decay is out of range; in `step`, sparse gradients.

    Examples:
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
        >>> optimizer = relpos.Sophia(model.parameters(), lr=1e-3)
        >>> relpos.sampled_loss(model(x)).backward()
        >>> optimizer.update_hessian(count=16)  # every ten steps, say
        >>> optimizer.zero_grad()
        >>> model(x).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        rho: float = 0.01,
        weight_decay: float = 1e-1,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "weight_decay": weight_decay, "eps": eps})
        for group in self.param_groups:
            require_number(group["rho"], "rho", "above 0", "The paper uses 0.01 to 0.05.")
            require_number(group["eps"], "eps", "above 0", "It keeps entries without curvature from dividing by 0.")

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        beta1 = group["betas"][0]
        momenta, hessians = self._states(params, "exp_avg"), self._states(params, "hessian")
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta1)
        divisors = list(torch._foreach_mul(hessians, group["rho"]))
        torch._foreach_clamp_min_(divisors, group["eps"])
        directions = list(torch._foreach_div(momenta, divisors))
        torch._foreach_clamp_max_(directions, 1.0)
        torch._foreach_clamp_min_(directions, -1.0)
        self._move(group, params, directions)

    @torch.no_grad()
    def update_hessian(self, count: int) -> None:
        """Update the Hessian with Sophia-G's estimate: `count` times the square of the parameters' current gradients.

        Args:
            count: number of labels in the mean of `sampled_loss`: tokens of a language model, images.

        Raises:
            ValueError: no parameter has a gradient.
        """
        require_int(count, "count", at_least=1)
        found = False
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                gradients = [self._gradient(p) for p in params]
                self._average(group, params, list(torch._foreach_mul(gradients, gradients)), float(count))
                found = True
        if not found:
            fail("gradients of sampled_loss", "none", "Call sampled_loss(model(x)).backward() first.")

    def update_hessian_by_hutchinson(self, loss: Float[Tensor, ""]) -> None:
        """Update the Hessian with Sophia-H's estimate, u times (Hessian times u) with normal u, of a loss with its
        graph.

        Does not change `.grad`.

        Raises:
            ValueError: the loss is not a scalar with a graph.
        """
        if loss.dim() or not loss.requires_grad:
            fail("a loss of one number with its graph", shape_of(loss), "Pass it before calling backward() on it.")
        every = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(loss, every, create_graph=True, allow_unused=True)
        used = {p: g for p, g in zip(every, gradients, strict=True) if g is not None}
        directions = {p: torch.randn_like(p) for p in used}
        along = sum((g * directions[p]).sum() for p, g in used.items())
        if not isinstance(along, Tensor) or not along.requires_grad:  # the loss is linear in every parameter
            products: tuple[Tensor | None, ...] = (None,) * len(used)
        else:
            products = torch.autograd.grad(along, list(used), allow_unused=True)
        curved = {p: torch.zeros_like(p) if x is None else x for p, x in zip(used, products, strict=True)}
        with torch.no_grad():
            for group in self.param_groups:
                params = [p for p in group["params"] if p in curved]
                if params:
                    estimates = torch._foreach_mul([directions[p] for p in params], [curved[p] for p in params])
                    self._average(group, params, list(estimates), 1.0)

    def _average(self, group: dict[str, Any], params: list[Tensor], estimates: list[Tensor], factor: float) -> None:
        beta2 = group["betas"][1]
        hessians = self._states(params, "hessian")
        torch._foreach_mul_(hessians, beta2)
        torch._foreach_add_(hessians, estimates, alpha=(1 - beta2) * factor)


def sampled_loss(scores: Float[Tensor, "*B classes"]) -> Float[Tensor, ""]:
    """The mean cross entropy of labels drawn from the model's own scores: what Sophia-G's estimate differentiates.

    Draws from PyTorch's generator; no gradient passes through the draw.

    Args:
        scores: `[..., classes]`, the model's output before a softmax.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: not floating-point scores with at least 2 dimensions.

    Examples:
        >>> logits = torch.randn(8, 10, requires_grad=True)
        >>> relpos.sampled_loss(logits).shape  # labels drawn from the model's own output, for Sophia
        torch.Size([])
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() < 2:
        fail("scores to be floating point, [..., classes]", shape_of(scores), "Pass the model's output, with .float().")
    flat = scores.flatten(0, -2)
    drawn = torch.multinomial(flat.detach().float().softmax(dim=-1), 1)[:, 0]
    return F.cross_entropy(flat, drawn)
