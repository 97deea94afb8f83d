"""`replace_position` in vision transformers: timm's ViT and DeiT, transformers' ViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replaced import by_hand, heads, linear, require_round_trips, require_same
from torch import Tensor, nn

import relpos
from models import images
from relpos import DenseBias, Grid, LineBias
from relpos.adapters.libraries import imported
from relpos.adapters.replacement.vit import PlacedVisionTransformer, PlacedViTEmbeddings
from relpos.core.densify import written_out

FAST_CASES = 2  # of each of its tests, in the fast part
pytestmark = pytest.mark.usefixtures("timm")
SIZE = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}


def timm_vit(**more: Any) -> Any:
    module = imported("timm").models.vision_transformer
    return _tamed(module.VisionTransformer(**{**SIZE, **more}))


def deit() -> Any:
    return _tamed(imported("timm").models.deit.VisionTransformerDistilled(**SIZE))


def registers() -> Any:
    return timm_vit(reg_tokens=2, no_embed_class=True, qk_norm=True, global_pool="avg", fc_norm=False)


def classless() -> Any:
    return timm_vit(class_token=False, global_pool="avg", fc_norm=False)


def transformers_vit(**more: Any) -> Any:
    transformers = imported("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=(16, 24),
        patch_size=8, **more,
    )  # fmt: skip
    return _tamed(transformers.ViTModel(config, add_pooling_layer=False))


def eager_vit() -> Any:
    return transformers_vit(attn_implementation="eager")


def _tamed(model: nn.Module) -> nn.Module:
    for name, x in model.named_parameters():
        if "token" in name or "pos" in name:
            nn.init.normal_(x, generator=torch.Generator().manual_seed(1))
    return model.eval().double()


PREFIX: dict[Callable[[], Any], int] = {
    timm_vit: 1, deit: 2, registers: 3, classless: 0, transformers_vit: 1, eager_vit: 1,
}  # fmt: skip
MODELS = list(PREFIX)
PIXELS = images(2, (16, 24)).double()


def tokens_of(model: Any, x: Tensor = PIXELS) -> Tensor:
    out = model.forward_features(x) if hasattr(model, "forward_features") else model(x)[0]
    assert isinstance(out, Tensor)
    return out


def expected(model: Any) -> Tensor:
    """The model by hand: what its mechanisms say, and nothing of its own."""
    if hasattr(model, "blocks"):
        x = model.patch_embed.proj(PIXELS).flatten(2).mT
        second = getattr(model, "dist_token", model.reg_token)
        prefix = [token.expand(2, -1, -1) for token in (model.cls_token, second) if token is not None]
    else:
        x = model.embeddings.patch_embeddings.projection(PIXELS).flatten(2).mT
        prefix = [model.embeddings.cls_token.expand(2, -1, -1)]
    x = torch.cat([*prefix, x], dim=1)
    grid = Grid(2, 3, prefix=x.shape[1] - 6)
    mechanisms = list(model.positions)
    x = mechanisms[0].embed(x, grid)
    layers = model.blocks if hasattr(model, "blocks") else model.layers
    for number, layer in enumerate(layers):
        position = mechanisms[number % len(mechanisms)]
        if hasattr(model, "blocks"):
            attn = layer.attn
            q, k, v = (heads(one, 4) for one in linear(layer.norm1(x), attn.qkv).chunk(3, -1))
            x = x + linear(by_hand(attn.q_norm(q), attn.k_norm(k), v, position, grid), attn.proj)
            x = x + layer.mlp(layer.norm2(x))
        else:
            attn, y = layer.attention, layer.layernorm_before(x)
            q, k, v = (heads(linear(y, one), 4) for one in (attn.q_proj, attn.k_proj, attn.v_proj))
            x = x + linear(by_hand(q, k, v, position, grid), attn.o_proj)
            x = x + layer.mlp(layer.layernorm_after(x))
    norm: Any = model.norm if hasattr(model, "blocks") else model.layernorm
    normed: Tensor = norm(x)
    return normed


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("position", ["relative_2d", "rotary_2d+learned"])
def test_every_model_is_the_one_by_hand(build: Callable[[], Any], position: str) -> None:
    model = build()
    own = tokens_of(model)
    relpos.replace_position(model, position, init_std=0.5)
    replaced = tokens_of(model)
    assert not torch.allclose(replaced, own)
    require_same(model, replaced, expected(model))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "position", ["sinusoidal_2d", "t5", "alibi", "rotary_mixed", "decomposed", "deberta", "tupe", "none"]
)
def test_every_kind_of_mechanism(position: str, shared: bool) -> None:
    for build in (timm_vit, transformers_vit):
        model = build()
        relpos.replace_position(model, position, init_std=0.5, shared=shared)
        assert len(model.positions) == (1 if shared else 2)
        require_same(model, tokens_of(model), expected(model))


@pytest.mark.parametrize("build", MODELS)
def test_without_position_patches_are_a_bag(build: Callable[[], Any]) -> None:
    """Patches in another order give the same tokens in that order; with a position they do not."""
    model, order = build(), torch.tensor([3, 0, 5, 1, 4, 2])
    prefix = PREFIX[build]
    patches = PIXELS.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[:, :, order].unflatten(2, (2, 3))
    shuffled = patches.transpose(3, 4).flatten(4, 5).flatten(2, 3)

    def moved() -> tuple[Tensor, Tensor]:
        x = tokens_of(model)
        return tokens_of(model, shuffled), torch.cat([x[:, :prefix], x[:, prefix:][:, order]], dim=1)

    assert not torch.allclose(*moved())
    relpos.replace_position(model, None)
    torch.testing.assert_close(*moved(), rtol=1e-9, atol=1e-9)
    relpos.restore(model)
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    assert not torch.allclose(*moved())


@pytest.mark.parametrize("build", MODELS)
def test_round_trips(build: Callable[[], Any]) -> None:
    require_round_trips(build, "relative_2d", tokens_of)
    require_round_trips(build, "learned+rotary_2d", tokens_of, shared=True)


@pytest.mark.parametrize("build", [timm_vit, deit, transformers_vit])
def test_its_own_embedding_as_a_mechanism_is_the_model_itself(build: Callable[[], Any]) -> None:
    model = build()
    own = tokens_of(model)
    relpos.replace_position(model, "learned")
    zeros = tokens_of(model)
    assert not torch.allclose(zeros, own)
    vectors = (
        model.pos_embed
        if hasattr(model, "pos_embed")
        else model._modules["embeddings"]._parameters["position_embeddings"]
    )
    model.positions[0].mechanisms[0].pos_embed.data.copy_(vectors)
    torch.testing.assert_close(tokens_of(model), own, rtol=1e-10, atol=1e-10)


def test_tables_that_start_as_nothing() -> None:
    """At init_std=0 a model computes what it would without position, and learns from there."""
    for name in ("relative_2d", "learned", "t5", "clipped", "factored_2d", "decomposed", "shaw"):
        model, bag = timm_vit(), timm_vit()
        bag.load_state_dict(model.state_dict())
        relpos.replace_position(bag, None)
        relpos.replace_position(model, name)
        out = tokens_of(model)
        torch.testing.assert_close(out, tokens_of(bag), rtol=1e-9, atol=1e-9)
        out.square().sum().backward()
        assert any(bool(x.grad.any()) for x in model.positions.parameters() if x.grad is not None), name


def test_the_report_names_what_is_off() -> None:
    model = timm_vit()
    report = relpos.replace_position(model, "relative_2d")
    assert [one.name for one in report.own] == ["pos_embed"]
    assert "off       pos_embed: absolute embedding of 7 positions" in str(report)
    assert "relative_2d, one a layer: 2 layers of the model itself, Grid(2, 3, prefix=1)" in str(report)
    assert relpos.replace_position(timm_vit(), "rope").position == "rotary_2d"
    classifier = imported("transformers").ViTForImageClassification(transformers_vit().config)
    report = relpos.replace_position(
        classifier, lambda site: relpos.RotaryEmbedding(site.head_dim, axes=2), shared=True
    )
    assert [one.name for one in report.own] == ["vit.embeddings.position_embeddings"]
    assert "a mechanism of your own, one for all: 2 layers of vit" in str(report)


def test_own_keeps_what_the_model_has() -> None:
    model = timm_vit()
    before = tokens_of(model)
    report = relpos.replace_position(model, "own")
    assert report.kept
    lines = str(report).splitlines()
    assert lines[1] == "  position  own: the model keeps what it knows of position itself, and nothing was changed"
    assert lines[2].startswith("  kept      pos_embed: ")
    assert len(lines) == 3
    assert torch.equal(tokens_of(model), before)
    assert not hasattr(model, "positions")


def test_masks_of_timm() -> None:
    model = timm_vit()
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    attn, x, order = model.blocks[0].attn, torch.randn(2, 7, 32).double(), torch.arange(7)
    q, k, v = (heads(one, 4) for one in linear(x, attn.qkv).chunk(3, -1))
    allowed = order <= order[:, None]
    wanted = linear(by_hand(q, k, v, model.positions[0], Grid(2, 3, prefix=1), allowed=allowed), attn.proj)
    for mask in ({"is_causal": True}, {"attn_mask": allowed}, {"attn_mask": allowed.double().log()}):
        torch.testing.assert_close(attn(x, **mask), wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(attn(x), wanted)


def test_a_padding_mask_of_transformers() -> None:
    model = transformers_vit()
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    masked = model(PIXELS, attention_mask=mask)[0]
    layer, x = model.layers[0], model.embeddings(PIXELS)
    attn, y = layer.attention, layer.layernorm_before(x)
    q, k, v = (heads(linear(y, one), 4) for one in (attn.q_proj, attn.k_proj, attn.v_proj))
    wanted = by_hand(q, k, v, model.positions[0], Grid(2, 3, prefix=1), allowed=mask.bool()[:, None, None])
    seen = {}
    hook = attn.o_proj.register_forward_hook(lambda _, inputs, __: seen.update(x=inputs[0]))
    model(PIXELS, attention_mask=mask)
    hook.remove()
    torch.testing.assert_close(seen["x"], wanted, rtol=1e-9, atol=1e-9)
    assert torch.allclose(masked[0], tokens_of(model)[0])
    assert not torch.allclose(masked[1], tokens_of(model)[1])


@pytest.mark.parametrize("build", [timm_vit, deit, registers, transformers_vit])
def test_planted_faults_are_seen(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Own position left on; the sign turned; the prefix taken for a patch."""
    model = build()
    relpos.replace_position(model, "relative_2d+learned", init_std=0.5)
    wanted = expected(model)

    def differs() -> bool:
        return not torch.allclose(tokens_of(model), wanted, rtol=1e-3, atol=1e-3)

    assert not differs()
    with monkeypatch.context() as patch:
        if build is not transformers_vit:
            patch.delattr(PlacedVisionTransformer, "_pos_embed")
        else:
            patch.delattr(PlacedViTEmbeddings, "position_embeddings")
        assert differs()
    attn = model.layers[0].attention if build is transformers_vit else model.blocks[0].attn
    prefix = PREFIX[build]
    with monkeypatch.context() as patch:
        line = attn.place.terms(6 + prefix, 6 + prefix).of(LineBias)[0]
        dense = written_out(line.values, line.lines)[None].detach()
        prefixless = dense.clone()
        prefixless[..., prefix - 1, :] = prefixless[..., prefix - 1] = 0
        for wrong in (dense.mT, prefixless):
            patch.setattr(type(attn.place), "terms", lambda self, n, m, wrong=wrong: relpos.Terms(DenseBias(wrong)))
            assert differs()
