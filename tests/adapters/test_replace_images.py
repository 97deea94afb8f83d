"""`replace_position` in models of images: masks of callers, windows of other sizes, images of another grid."""

from typing import Any

import pytest
import torch
from by_hand import attention, heads, linear
from replaced_models import beit, hf_vit, swin, timm_vit

import relpos
from models import images
from relpos import Grid

PIXELS = images(2, (16, 24)).double()
OTHER_GRID = r"^expected images of \(2, 3\) patches; got {0}\. Call relpos\.resize_position\(model, {0}\)\.$"


def test_masks_of_timm() -> None:
    model = timm_vit()
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    attn, x, order = model.blocks[0].attn, torch.randn(2, 7, 32).double(), torch.arange(7)
    q, k, v = (heads(one, 4) for one in linear(x, attn.qkv).chunk(3, -1))
    allowed = order <= order[:, None]
    wanted = linear(attention(q, k, v, model.positions[0], Grid(2, 3, prefix=1), allowed=allowed), attn.proj)
    for mask in ({"is_causal": True}, {"attn_mask": allowed}, {"attn_mask": allowed.double().log()}):
        torch.testing.assert_close(attn(x, **mask), wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(attn(x), wanted)


def test_a_padding_mask_of_transformers() -> None:
    model = hf_vit()
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    layer, x = model.layers[0], model.embeddings(PIXELS)
    attn, y = layer.attention, layer.layernorm_before(x)
    q, k, v = (heads(linear(y, one), 4) for one in (attn.q_proj, attn.k_proj, attn.v_proj))
    wanted = attention(q, k, v, model.positions[0], Grid(2, 3, prefix=1), allowed=mask.bool()[:, None, None])
    seen = {}
    hook = attn.o_proj.register_forward_hook(lambda _, inputs, __: seen.update(x=inputs[0]))
    masked = model(PIXELS, attention_mask=mask)[0]
    hook.remove()
    torch.testing.assert_close(seen["x"], wanted, rtol=1e-9, atol=1e-9)
    whole = model(PIXELS)[0]
    assert torch.allclose(masked[0], whole[0])
    assert not torch.allclose(masked[1], whole[1])


def test_dynamic_masks_of_swin() -> None:
    model, other = swin(), swin(dynamic_img_size=True)
    for one in (model, other):
        relpos.replace_position(one, "relative_2d", init_std=0.5)
    other.load_state_dict(model.state_dict())
    pixels = images(2, (32, 24)).double()
    torch.testing.assert_close(other(pixels), model(pixels), rtol=1e-9, atol=1e-9)
    assert other.forward_features(images(1, (64, 48)).double()).shape == (1, 8, 6, 32)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")  # timm's
def test_swin_with_other_windows() -> None:
    model = swin()
    relpos.replace_position(model, "relative_2d")
    model.set_input_size((64, 48), window_size=(8, 6))
    with pytest.raises(ValueError, match=r"expected 12 tokens, for Grid\(4, 3\); got 48"):
        model(images(1, (64, 48)).double())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "call"),
    [(lambda: timm_vit(dynamic_img_size=True), {}), (hf_vit, {"interpolate_pos_encoding": True}), (beit, {})],
    ids=["timm ViT", "ViT", "BEiT"],
)
def test_images_of_another_size(build: Any, call: dict[str, bool]) -> None:
    model = build()
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    with pytest.raises(ValueError, match=OTHER_GRID.format(r"\(4, 4\)")):
        model(torch.randn(1, 3, 32, 32).double(), **call)
    if call:
        assert torch.equal(model(PIXELS, **call)[0], model(PIXELS)[0])
    elif build is not beit:
        assert model(PIXELS).shape == (2, 5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Using a non-tuple")
@pytest.mark.parametrize("position", ["relative_2d", "learned"])
def test_as_many_patches_of_another_grid(position: str) -> None:
    """Their number alone would let them pass."""
    line, turned = OTHER_GRID.format(r"\(3, 2\)"), PIXELS.transpose(2, 3)
    for dynamic in (False, True):
        model = timm_vit(dynamic_img_size=dynamic)
        model.patch_embed.strict_img_size = False
        relpos.replace_position(model, position)
        assert model(PIXELS).shape == (2, 5)
        for call in (model, model.forward_intermediates):
            with pytest.raises(ValueError, match=line):
                call(turned)
        relpos.restore(model)
        assert model(turned).shape == (2, 5)
    model = timm_vit()
    relpos.replace_position(model, position)
    model.set_input_size(img_size=(turned.shape[2], turned.shape[3]))
    with pytest.raises(ValueError, match=line):
        model(turned)
