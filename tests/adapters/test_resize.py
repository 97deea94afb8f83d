"""`resize_position`: another size in place, of replaced models and of one's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_images import SMALL_BEIT
from replaced_models import beit, gpt2, hf_vit, swin, timm_vit
from torch import nn

import relpos
from models import hf, images
from relpos.adapters.resizing import for_images, rules_for_images

FAST_CASES = 4  # of each of its tests, in the fast part

LARGER: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[int, int], dict[str, bool]]] = {
    "timm ViT": (timm_vit, {"img_size": (32, 48)}, (4, 6), {}),
    "timm BEiT": (beit, {"img_size": (32, 48)}, (4, 6), {}),
    "timm Swin": (swin, {"img_size": (64, 48), "window_size": ((8, 6), (8, 6))}, (16, 12), {}),
    "transformers ViT": (hf_vit, {"image_size": (32, 48)}, (4, 6), {"interpolate_pos_encoding": True}),
}


@pytest.mark.parametrize("name", LARGER)
@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # of what its interpolation calls
def test_equals_a_model_built_for_the_other_size(name: str) -> None:
    build, larger, size, call = LARGER[name]
    model, other = build(), build(**larger)
    for one in (model, other):
        relpos.replace_position(one, "relative_2d+learned" if "Swin" not in name else "relative_2d", init_std=0.5)
    pixels = images(2, larger.get("img_size", (32, 48))).double()
    with pytest.raises((ValueError, AssertionError), match=r"resize_position|doesn't match"):
        model(pixels, **call)
    report = relpos.resize_position(model, size)
    assert set(report.rules.values()) == {"interpolated"}
    assert report.image_size == larger.get("img_size")
    saved = model.state_dict()
    if name == "transformers ViT":
        saved["embeddings.position_embeddings"] = other.embeddings._parameters["position_embeddings"]  # its own is off
    other.load_state_dict(saved)
    torch.testing.assert_close(_output(model(pixels, **call)), _output(other(pixels)), rtol=1e-9, atol=1e-9)
    loss = _output(model(pixels, **call)).sum()
    tables = [x for key, x in model.named_parameters() if "positions" in key and "relative" in key]
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(loss, tables))


def _output(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found[0]


DYNAMIC: dict[str, tuple[Callable[..., Any], dict[str, Any], str, dict[str, bool]]] = {
    "timm ViT": (timm_vit, {"dynamic_img_size": True}, "img_size", {}),
    "transformers ViT": (hf_vit, {}, "image_size", {"interpolate_pos_encoding": True}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", DYNAMIC)
def test_positions_that_are_defined_anywhere_take_images_of_any_size(name: str) -> None:
    """They equal a model that was built for each size, also of as many patches in another shape."""
    build, dynamic, size, call = DYNAMIC[name]
    model = build(**dynamic)
    relpos.replace_position(model, "rotary_2d+sinusoidal_2d")
    for pixels in ((32, 48), (16, 24), (48, 32), (24, 16), (16, 24)):
        other = build(**{size: pixels})
        relpos.replace_position(other, "rotary_2d+sinusoidal_2d")
        held = {key: x for key, x in model.state_dict().items() if "pos_embed" not in key and "position_emb" not in key}
        other.load_state_dict(held, strict=False)
        x = images(2, pixels).double()
        torch.testing.assert_close(_output(model(x, **call)), _output(other(x)), rtol=1e-9, atol=1e-9)


def test_a_checkpoint_must_know_the_shape_of_its_image() -> None:
    model = timm_vit(dynamic_img_size=True)
    relpos.replace_position(model, "rotary_2d")
    model.set_grad_checkpointing()
    first, second = images(1, (32, 48)).double(), images(1, (16, 24)).double()
    loss = model(first).square().sum() + model(second).square().sum()
    found = torch.autograd.grad(loss, model.cls_token)
    model.set_grad_checkpointing(False)
    wanted = torch.autograd.grad(model(first).square().sum() + model(second).square().sum(), model.cls_token)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    model.set_grad_checkpointing()
    with pytest.raises(ValueError, match=r"got \(6, 4\) after \(4, 6\)\. Train without them"):
        model(images(1, (48, 32)).double())


def test_a_table_takes_no_other_size() -> None:
    model = timm_vit(dynamic_img_size=True)
    relpos.replace_position(model, "rotary_2d+relative_2d")
    with pytest.raises(ValueError, match=r"images of \(2, 3\) patches; got \(4, 6\)\. Call relpos\.resize_position"):
        model(images(1, (32, 48)).double())


def test_longer_texts() -> None:
    model = gpt2()
    relpos.replace_position(model, "relative_1d", coordinates=relpos.Sequence(8), shared=True, init_std=0.5)
    tokens = torch.randint(90, (1, 12))
    with pytest.raises(
        ValueError, match=r"from -7 to 7 on axis 0; got .*library, relpos\.resize_position\(model, size\)\."
    ):
        model(tokens)
    relpos.resize_position(model, 12, "clipped")
    mechanism = model.get_submodule("transformer.positions" if hasattr(model, "transformer") else "positions")[0]
    assert mechanism.mechanisms[0].beyond == "clip"
    logits = _output(model(tokens))
    cached = model(tokens[:, :11], use_cache=True)
    last = model(tokens[:, 11:], past_key_values=cached.past_key_values)
    torch.testing.assert_close(_output(last)[:, -1], logits[:, -1], rtol=1e-9, atol=1e-9)


class Own(nn.Module):
    def __init__(self, *positions: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = positions[0], nn.ModuleList(positions)


def test_a_model_of_ones_own() -> None:
    """By the rule where a mechanism has it, else by its first; one that is shared stays shared."""
    rotary = relpos.RotaryEmbedding(head_dim=8, trained_length=16)
    model: Any = Own(rotary, relpos.RelativePositionBias(2, seq_len=16), rotary, relpos.CoPE(8))
    rules = relpos.resize_position(model, 64, "yarn").rules
    layers = dict(zip([f"layers.{i}" for i in range(4)], ["yarn", "interpolated", "yarn", "as is"], strict=True))
    assert rules == {"first": "yarn", **layers}
    assert model.first is model.layers[0] is model.layers[2] is not rotary
    assert model.first.scaling.factor == 4
    assert model.layers[1].sizes == (64,)


@torch.no_grad()
@pytest.mark.parametrize("name", ["timm ViT", "timm BEiT", "timm Swin"])
@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # of what its interpolation calls
def test_weights_of_a_position_for_any_size_load_at_another(name: str) -> None:
    """In the way would be the switched-off position alone, which has a size. A table has one, too, and says so."""
    build, larger, size, _ = LARGER[name]
    model, other = build(), build()
    for one in (model, other):
        relpos.replace_position(one, "rotary_2d")
    relpos.resize_position(other, size)
    own = {key: x.clone() for key, x in other.state_dict().items() if x.shape != model.state_dict()[key].shape}
    assert own
    with pytest.warns(
        UserWarning, match=r"^the model's own position, which is switched off, has another size in these"
    ):
        other.load_state_dict(model.state_dict())
    assert all(torch.equal(other.state_dict()[key], x) for key, x in own.items())
    pixels = images(2, larger["img_size"]).double()
    relpos.resize_position(model, size)
    assert torch.equal(model(pixels), other(pixels))
    tables = [build(), build()]
    for one in tables:
        relpos.replace_position(one, "relative_2d")
    relpos.resize_position(tables[1], size)
    with (
        pytest.warns(UserWarning, match="another size"),
        pytest.raises(ValueError, match=r"at, load, then resize\(size\); in a model, relpos\.resize_position"),
    ):
        tables[1].load_state_dict(tables[0].state_dict())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # of what its interpolation calls
def test_a_retrofitted_model_of_timm_stays_retrofitted(calls: list[Any]) -> None:
    model, published = beit(), beit()
    with torch.no_grad():
        for one in (model, published):
            for table in (x for key, x in one.named_parameters() if "table" in key):
                table.copy_(torch.linspace(-2, 2, table.numel()).view_as(table))
    relpos.retrofit(model, border=1, verify=False)
    assert str(relpos.resize_position(model, (4, 6))).endswith("32 x 48 pixels")
    published.set_input_size((32, 48))
    x = images(2, (32, 48)).double()
    torch.testing.assert_close(model(x), published(x), rtol=1e-9, atol=1e-9)
    assert calls == [(25, 25)] * len(model.blocks)


@pytest.mark.parametrize("position", ["own", "rotary_2d", "relative_2d", "none"])
def test_larger_images_of_a_comparison(position: str) -> None:
    """A copy for each rule; the model itself stays for its own size."""
    model = timm_vit()
    relpos.replace_position(model, position)
    rules = rules_for_images(model)
    assert set(rules) == {"own": {"interpolated"}, "relative_2d": {"interpolated", "clipped"}}.get(position, {"as is"})
    for rule in rules:
        assert for_images(model, (32, 48), rule)(images(1, (32, 48)).double()).shape == (1, 5)
    assert model(images(1, (16, 24)).double()).shape == (1, 5)


def _retrofitted() -> nn.Module:
    model: nn.Module = hf("beit", "Beit", **SMALL_BEIT, use_relative_position_bias=True)
    relpos.retrofit(model, border=1, verify=False)
    return model


def _replaced() -> nn.Module:
    model: nn.Module = timm_vit()
    relpos.replace_position(model, "relative_2d")
    return model


def _windows() -> nn.Module:
    model: nn.Module = swin()
    relpos.replace_position(model, "relative_2d")
    return model


WRONG: dict[str, tuple[Callable[[], Any], Any, str | None, str]] = {
    "ours": (
        lambda: relpos.LanguageModel(9, 4, 8, 1, 1),
        8,
        None,
        r"got LanguageModel\. Call model\.grow\(size, rule\)",
    ),
    "retrofitted": (_retrofitted, (8, 8), None, r"got BeitModel, which keeps its own position .*\. Other libraries'"),
    "nothing inside": (lambda: Own(nn.Identity()), 8, None, r"got Own, which has none\. Call relpos\.replace_position"),
    "pixels": (_replaced, (32, 48), None, r"of which it has \(2, 3\); got \(32, 48\), images of 256 x 384 pixels"),
    "pixels of a Swin": (_windows, (32, 24), None, r"has \(8, 6\); got \(32, 24\), images of 128 x 96 pixels\. Divide"),
    "a window": (_windows, (3, 2), None, r"of which it has \(8, 6\); got \(3, 2\), images of 12 x 8 pixels\. Divide"),
    "unknown rule": (lambda: Own(relpos.RotaryEmbedding(8, trained_length=4)), 8, "yam", r"yarn.*; got 'yam'"),
    "axes": (_replaced, 8, None, r"^expected a size in \(rows, columns\) of patches; got Sequence\("),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name: str) -> None:
    build, size, rule, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        relpos.resize_position(build(), size, rule)
