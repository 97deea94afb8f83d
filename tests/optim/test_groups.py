"""Parameter groups: which parameters decay, and that position has a rate of its own, in any module."""

from typing import Any

import pytest
import torch
from torch import nn

import relpos
from relpos.optim import parameter_groups


def vit(position: str = "relative_2d", **changes: Any) -> relpos.VisionTransformer:
    return relpos.VisionTransformer(8, 2, 1, 3, embed_dim=16, depth=2, num_heads=2, position=position, **changes)


@pytest.mark.parametrize(("position", "shared"), [("none", True), ("learned", True), ("learned+relative_2d", False)])
def test_each_parameter_is_in_one_group_and_position_has_its_own_rate_and_no_decay(position: str, shared: bool) -> None:
    model = vit(position, shared_position=shared, reg_tokens=2)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, learning_rate=0.5, weight_decay=0.3, position_learning_rate_multiplier=8.0)
    assert len(groups) == (2 if position == "none" else 3)
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(names)
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            own = "pos_embed" in name or "relative_position_bias_table" in name
            assert (group["lr"], group["multiplier"]) == ((4.0, 8.0) if own else (0.5, 1.0)), name
            decays = not own and parameter.dim() >= 2 and name != "prefix_tokens"
            assert group["weight_decay"] == (0.3 if decays else 0.0), name


def test_a_module_of_ones_own_that_holds_a_mechanism() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = relpos.T5Bias(num_heads=2)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.out = nn.Linear(4, 4)

    model = Mine()
    decayed, rest, position = parameter_groups(model, learning_rate=1.0, weight_decay=1.0)
    assert decayed["params"] == [model.out.weight]
    assert set(rest["params"]) == {model.cls_token, model.out.bias}
    assert position["params"] == list(model.bias.parameters())
    optimizer = torch.optim.AdamW([decayed, rest, position])
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0, 10.0]


def test_a_frozen_position_is_in_no_group() -> None:
    assert len(parameter_groups(vit(position_trainable=False), learning_rate=1.0, weight_decay=1.0)) == 2


def test_what_makes_positions_from_content_has_the_rate_of_the_layers() -> None:
    model = vit("fox+relative_1d")
    gates = {id(x) for name, x in model.named_parameters() if "fgate_proj" in name}
    _, rest, position = parameter_groups(model, learning_rate=1.0, weight_decay=1.0)
    assert gates <= {id(x) for x in rest["params"]}
    assert not gates & {id(x) for x in position["params"]}
    assert len(position["params"]) == 2  # a table a layer
    model.requires_grad_(False)
    assert not parameter_groups(model, learning_rate=1.0, weight_decay=1.0)[-1]["params"][0].requires_grad


def test_scales_of_heads_do_not_decay() -> None:
    """They have two axes more than heads, and are no matrix."""
    model = relpos.SwinTransformer(8, 2, embed_dim=8, depths=(1,), num_heads=(2,), window_size=2, version=2)
    (decayed,) = (group for group in relpos.parameter_groups(model, learning_rate=1.0, weight_decay=0.3)
                  if group["weight_decay"])  # fmt: skip
    (scale,) = (parameter for name, parameter in model.named_parameters() if name.endswith("logit_scale"))
    assert scale.dim() == 3
    assert all(parameter is not scale for parameter in decayed["params"])
    assert any(parameter is model.head.weight for parameter in decayed["params"])
