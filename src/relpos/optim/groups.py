"""Parameter groups for an optimizer: position at its own learning rate, weight decay only on matrices.

A table of biases affects every pair of tokens, but starts near 0, and with Adam moves by the learning rate per step. At
the rate of the layers it is still small when training ends; the recipes of `relpos compare` use ten times that rate.
Weights that make positions from hidden states (`FromStates`) are projections as those of the layers, and train at their
rate: on the validation text, ten times that rate cost the five of them 0.13 to 0.92 bits a byte.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from relpos.core.checks import fail, require_number, shape_of
from relpos.position.base.from_states import FromStates
from relpos.position.base.wrapped import position_parameters

_NOT_DECAYED = ("prefix_tokens", "cls_token", "reg_token", "dist_token", "logit_scale")


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    position_learning_rate_multiplier: float = 10.0,
) -> list[dict[str, Any]]:
    """The parameters of a model in at most three groups, for `torch.optim.AdamW` and its like.

        groups = relpos.optim.parameter_groups(model, learning_rate=6e-3, weight_decay=0.05)
        optimizer = torch.optim.AdamW(groups)

    Matrices: with weight decay. Biases, norms, prefix tokens (`prefix_tokens`, `cls_token`, `reg_token`, `dist_token`)
    and Swin V2's scales of heads (`logit_scale`): without.
    Position parameters (all parameters of relpos's mechanisms in the model): without, at their own rate; those of a
    mechanism that is made from hidden states (`FromStates`): without, at the rate of the layers. Each group has
    `params`, `lr`, `weight_decay`, and the `multiplier` on the learning rate, for schedules that set `lr` themselves.
    Frozen position parameters, and groups that would be empty, are left out.

    Args:
        model: any module, with or without mechanisms of relpos.
        learning_rate: of all but the position parameters.
        weight_decay: of matrices.
        position_learning_rate_multiplier: the factor on the learning rate for position parameters.

    Raises:
        ValueError: `model` is not a module, or a number is negative.

    Source: no decay on biases, norms and tables as in Swin's and BEiT's training (Liu et al. 2021; Bao et al. 2022);
    the multiplier was chosen on validation data (`recipes/digits_search.py`).

    Examples:
        >>> model = relpos.VisionTransformer(32, 8, embed_dim=32, depth=1, num_heads=2, position="relative_2d")
        >>> groups = relpos.parameter_groups(model, learning_rate=1e-3, weight_decay=0.05)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]  # matrices, the rest, position
        [(0.001, 0.05), (0.001, 0.0), (0.01, 0.0)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    if not isinstance(model, nn.Module):
        fail("a module", shape_of(model), "Build the model first.")
    require_number(learning_rate, "learning_rate", "of at least 0", "Pass a learning rate.")
    require_number(weight_decay, "weight_decay", "of at least 0", "0 is none.")
    multiplier = position_learning_rate_multiplier
    require_number(multiplier, "position_learning_rate_multiplier", "of at least 0", "1 is the rate of the rest.")
    own = position_parameters(model)
    of_content = {x for module in model.modules() if isinstance(module, FromStates) for x in module.parameters()}
    position: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter in own:
            group = rest if parameter in of_content else position
            group += [parameter] if parameter.requires_grad else []
        elif parameter.dim() >= 2 and name.rpartition(".")[2] not in _NOT_DECAYED:
            decayed.append(parameter)
        else:
            rest.append(parameter)
    groups = ((decayed, weight_decay, 1.0), (rest, 0.0, 1.0), (position, 0.0, multiplier))
    return [
        {"params": params, "lr": learning_rate * factor, "weight_decay": decay, "multiplier": factor}
        for params, decay, factor in groups
        if params
    ]
