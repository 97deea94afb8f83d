"""The optimizers of recipes, and Sophia's part in the loop: an estimate of the Hessian every few steps.

adamw       PyTorch's (Loshchilov and Hutter 2019)
lion        the sign of a momentum (Chen et al. 2023)
sophia-g    a momentum over the Gauss-Newton diagonal, estimated from labels that the model draws (Liu et al. 2023)
sophia-h    the same over the Hessian's diagonal, estimated along a random vector; differentiates twice
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core.checks import require_choice
from relpos.layers import MultiHeadAttention
from relpos.optim import Lion, Sophia, sampled_loss
from relpos.train.scores import scores_of

OptimizerName = Literal["adamw", "lion", "sophia-g", "sophia-h"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
RHO: dict[OptimizerName, float] = {"sophia-g": 0.05, "sophia-h": 0.01}
"""Sophia's `rho`, which controls clipping: the paper's gamma for each estimate (section 3.1)."""


def make_optimizer(name: OptimizerName, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The named optimizer over `relpos.optim.parameter_groups`, which set rate and decay."""
    require_choice(name, "optimizer", OPTIMIZERS)
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, fused=True)
        case "lion":
            return Lion(groups)
        case _:
            return Sophia(groups, rho=RHO[name])


def cross_entropy(scores: Float[Tensor, "*B classes"], classes: Int[Tensor, "*B"]) -> Float[Tensor, ""]:
    """The mean loss in nats, in float32, of one class per image, or per token."""
    return F.cross_entropy(scores.flatten(0, -2).float(), classes.flatten())


def estimate_hessian(
    name: OptimizerName,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    inputs: Any,
    classes: Int[Tensor, "*B"],
    *,
    processes: int = 1,
) -> None:
    """Update Sophia's Hessian estimate from a batch; no gradients remain. Other optimizers are unchanged.

    Args:
        inputs: `[B, ...]`, or `PackedTokens`.
        processes: number of processes with an equal share of the batch; the model averages their gradients.
    """
    if not isinstance(optimizer, Sophia):
        return
    if name == "sophia-g":
        sampled_loss(scores_of(model, inputs).float()).backward()
        optimizer.update_hessian(classes.numel() * processes)
        optimizer.zero_grad()
        return
    with _differentiable_twice(model):
        optimizer.update_hessian_by_hutchinson(cross_entropy(scores_of(model, inputs), classes))


@contextmanager
def _differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Use the reference engine for attention: fused engines cannot be differentiated twice."""
    layers = [layer for layer in model.modules() if isinstance(layer, MultiHeadAttention)]
    before = [(layer.backend, layer.kind) for layer in layers]
    for layer in layers:
        layer.backend, layer.kind = "reference", "softmax" if layer.kind == "flash" else layer.kind
    try:
        yield
    finally:
        for layer, (backend, kind) in zip(layers, before, strict=True):
            layer.backend, layer.kind = backend, kind
