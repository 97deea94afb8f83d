"""torchvision's models with another position: with mechanisms that say what their own said, they compute the same."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from models import images, models
from relpos.adapters.common.libraries import imported


def _vit() -> nn.Module:
    library = imported("torchvision.models.vision_transformer")
    torch.manual_seed(0)
    made: nn.Module = library.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5
    )
    nn.init.normal_(made.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return made.double().eval()


def _made(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        return _vit(), images(2, 16).double()
    model = models()[f"torchvision {name}"]
    inputs = model.inputs()
    assert isinstance(inputs, Tensor)
    return model.made(), inputs.double()


def _own(name: str, model: nn.Module) -> list[Tensor]:
    """What its own position says, layer by layer."""
    if name == "vit":
        return [model.encoder.pos_embedding]  # type: ignore[union-attr, list-item]
    layers: list[Any] = [one for one in model.modules() if hasattr(one, "relative_position_index")]
    if name == "swin_v2":
        return [16 * one.cpb_mlp(one.relative_coords_table).flatten(0, -2).sigmoid() for one in layers]
    return [one.relative_position_bias_table for one in layers]


POSITIONS = {"vit": "learned", "swin": "relative_2d", "swin_v2": "relative_2d", "swin3d": "relative_3d",
             "maxvit": "relative_2d"}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
def test_with_its_own_position_by_relpos_it_is_the_published_model(name: str) -> None:
    published, x = _made(name)
    model: Any = copy.deepcopy(published)
    report = relpos.replace_position(model, POSITIONS[name], shared=name == "vit")
    assert not published(x).equal(model(x)), "its position is off"
    tables = [one for key, one in model.named_parameters() if "positions." in key]
    own = _own(name, published)
    assert len(tables) == len(own)
    with torch.no_grad():
        for table, said in zip(tables, own, strict=True):
            table.copy_(said.view_as(table))
    weights = [key for key, one in model.named_parameters() if one.requires_grad and "positions." not in key]
    assert len([key for one in report.own for key in one.parameters]) + len(weights) == len(
        list(published.parameters())
    )
    out, wanted = model(x), published(x)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    chosen = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * chosen).sum(), [*tables, *map(model.get_parameter, weights)])
    theirs = torch.autograd.grad(
        (wanted * chosen).sum(), [*own, *map(published.get_parameter, weights)], allow_unused=name == "swin_v2"
    )
    for one, other in zip(found, theirs, strict=True):
        if other is None:  # what a network says is made in each call
            continue
        torch.testing.assert_close(one, other.view_as(one), rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_a_stage_of_swin_does_not_call_its_mechanisms_and_keeps_them() -> None:
    published, x = _made("swin")
    model: Any = copy.deepcopy(published)
    before = list(model.features[1])
    relpos.replace_position(model, "rotary_2d+relative_2d", init_std=0.5)
    assert list(model.features[1]) == before
    assert len(model.features[1]) == len(before)
    wanted = model(x)
    other: Any = copy.deepcopy(published)
    relpos.replace_position(other, "rotary_2d+relative_2d")
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    pickle.dump(model, file)
    for one in (other, copy.deepcopy(model), pickle.loads(file.getvalue())):
        torch.testing.assert_close(one(x), wanted, rtol=1e-12, atol=1e-12)
    assert model(images(1, (40, 52)).double()).shape == (1, 5)
    with pytest.raises(ValueError, match=r"windows stay Grid\(4, 3\)\. Swin takes other images as it is"):
        relpos.resize_position(model, (10, 13))
    relpos.restore(model)
    assert torch.equal(model(x), published(x))
    assert list(model.state_dict()) == list(published.state_dict())


@torch.no_grad()
def test_vit_at_another_size() -> None:
    """Of images that are not square, which the published model refuses."""
    model: Any = _vit()
    relpos.replace_position(model, "relative_2d+learned", init_std=0.5)
    x = images(2, (12, 20)).double()
    with pytest.raises(ValueError, match=r"expected images of \(4, 4\) patches; got \(3, 5\)\. Call relpos\.resize_po"):
        model(x)
    relpos.resize_position(model, (3, 5))
    assert model(x).shape == (2, 5)
    with pytest.raises(ValueError, match=r"whole patches, of 4 x 4 pixels; got images of 12 x 18 pixels"):
        model(images(2, (12, 18)).double())


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("vit", "vision_transformer.Encoder", "forward"),
        ("swin", "swin_transformer", "shifted_window_attention"),
        ("maxvit", "maxvit.RelativePositionalMultiHeadAttention", "forward"),
    ],
)
def test_another_source(name: str, owner: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _made(name)
    file, _, kind = owner.partition(".")
    library = imported(f"torchvision.models.{file}")
    monkeypatch.setattr(getattr(library, kind) if kind else library, function, lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=rf"a tested version of the library; got torchvision\.models.*{function}"):
        relpos.replace_position(model, "rotary_2d")
