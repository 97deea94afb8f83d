"""The Swin Transformer: windows, merging, positions, other sizes; its parity is in `test_published_weights.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from relpos import Grid, RelativePositionBias, SwinTransformer
from relpos.adapters.common.libraries import imported
from relpos.models.swin import PatchMerging
from relpos.patterns import windows
from relpos.position import presets

FAST_SHARE = 4  # of its tests, in the fast part

SMALL: dict[str, Any] = {
    "img_size": (20, 28), "patch_size": 2, "in_chans": 1, "num_classes": 5, "embed_dim": 8, "depths": (2, 2),
    "num_heads": (2, 4), "window_size": 3, "mlp_ratio": 2.0, "position_init_std": 0.5,
}  # fmt: skip
IMAGES = (2, 1, 20, 28)
ON_GRIDS = [preset.name for preset in presets().values() if 2 in preset.token_axes]


def small(**arguments: Any) -> SwinTransformer:
    return SwinTransformer(**{**SMALL, **arguments})


def awake(model: nn.Module) -> Any:
    """With version 2's norms away from 0, where its blocks say nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double().eval()


@pytest.mark.parametrize("version", [1, 2])
def test_windows_as_a_batch_are_windows_as_a_mask(version: Any) -> None:
    """The same blocks on all tokens of an image, under the mask that says windows; 3 divides neither 10 nor 14."""
    model = awake(small(version=version))
    x = torch.randn(2, 10, 14, 8, dtype=torch.float64)
    stage, terms = model.stages[0], model.positions[0]
    found = stage(x, terms.terms, Grid(3, 3))
    tokens, grid = x.flatten(1, 2), Grid(10, 14)
    for layer, block in enumerate(stage.blocks):
        (mechanism,) = (part for part in terms[layer].modules() if isinstance(part, relpos.OffsetBias))
        if version == 1:
            table = mechanism.relative_position_bias_table
            mechanism = RelativePositionBias(2, window_size=(3, 3), beyond="clip").double()
            mechanism.relative_position_bias_table = nn.Parameter(table.detach())
        tokens = block(tokens, position=mechanism.terms(grid), mask=windows(grid, 3, layer % 2))
    torch.testing.assert_close(found.flatten(1, 2), tokens)


def by_hand(x: Tensor, merging: PatchMerging) -> Tensor:
    """Swin's own order of a merged token: (0, 0), (1, 0), (0, 1), (1, 1) of row and column."""
    joined = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], dim=-1)
    if merging.post_norm:
        return merging.norm(joined @ merging.reduction.weight.T)  # type: ignore[no-any-return]
    return merging.norm(joined) @ merging.reduction.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize("post_norm", [False, True])
def test_merging(post_norm: bool) -> None:
    merging = PatchMerging(3, 5, post_norm)
    x = torch.randn(2, 4, 6, 3)
    torch.testing.assert_close(merging(x), by_hand(x, merging))
    odd = torch.cat([x[:, :3, :5], torch.zeros(2, 3, 1, 3)], dim=2)
    odd = torch.cat([odd, torch.zeros(2, 1, 6, 3)], dim=1)
    torch.testing.assert_close(merging(x[:, :3, :5]), by_hand(odd, merging))


@pytest.mark.parametrize(
    ("position", "shared"),
    [
        *((position, False) for position in [*ON_GRIDS, None]),
        *((position, True) for position in ("own", "learned+relative_2d", "rotary_2d")),
    ],
)
def test_every_position_of_grids(position: str | None, shared: bool) -> None:
    model = small(position=position, shared_position=shared, version=1 + shared)
    with torch.no_grad():
        for block in model.stages.modules():
            if isinstance(block, nn.LayerNorm):
                block.weight.fill_(1.0)
    scores = model(torch.randn(IMAGES))
    assert scores.shape == (2, 5)
    scores.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_own_is_the_published_position() -> None:
    assert all(isinstance(x, RelativePositionBias) for x in parts(small()))
    assert all(isinstance(x, relpos.LogContinuousBias) for x in parts(small(version=2)))
    assert len(parts(small())) == 4
    assert len(parts(small(shared_position=True))) == 2


def parts(model: SwinTransformer) -> list[relpos.OffsetBias]:
    return [module for module in model.modules() if isinstance(module, relpos.OffsetBias)]


def test_a_larger_image_has_more_windows_of_the_same_size() -> None:
    model = awake(small(img_size=24))  # 12 x 12 tokens are 4 x 4 windows
    images = torch.randn(1, 1, 48, 24, dtype=torch.float64)
    assert model(images).shape == (1, 5)
    x = torch.randn(1, 24, 12, 8, dtype=torch.float64)
    unshifted, terms = model.stages[0], model.positions[0].terms

    def first(x: Tensor) -> Tensor:
        tokens, _ = relpos.patterns.partition(x, 3)
        block = unshifted.blocks[0](tokens, position=terms(Grid(3, 3))[0])
        return relpos.patterns.join(block, Grid(*x.shape[1:3]), 3)

    torch.testing.assert_close(first(x)[:, :12], first(x[:, :12]))


@pytest.mark.parametrize("rule", ["interpolated", "clipped"])
def test_grow_to_other_windows(rule: str) -> None:
    model = small(img_size=24, window_size=4).eval()
    grown = model.grow(32, rule, window_size=6)
    assert [grid.sizes for grid in grown.windows] == [(6, 6), (6, 6)]
    for before, after in zip(parts(model), parts(grown), strict=True):
        wanted = before.grow(Grid(6, 6), rule)
        found, expected = (one.terms(Grid(6, 6)).one(relpos.LineBias) for one in (after, wanted))
        assert found is not None
        assert expected is not None
        assert torch.equal(found.values, expected.values)
    images = torch.randn(2, 1, 32, 32)
    assert grown(images).shape == (2, 5)
    assert model.windows[0].sizes == (4, 4)
    with pytest.raises(
        ValueError, match="expected a growth rule of its mechanisms \\(interpolated, clipped\\); got 'longer'"
    ):
        model.grow(32, "longer")


def test_version_2_grows_as_timm_does() -> None:
    """timm's weights of windows of 4, in windows of 8: `pretrained_window_sizes`."""
    settings = {**SMALL, "img_size": 32, "window_size": 4}
    settings.pop("position_init_std")
    imported("timm")
    module = imported("timm.models.swin_transformer_v2")
    before = awake(module.SwinTransformerV2(**settings))
    theirs = module.SwinTransformerV2(**{**settings, "window_size": 8}, pretrained_window_sizes=(4, 4)).double().eval()
    theirs.load_state_dict(before.state_dict())
    model = SwinTransformer(**settings, version=2).double().eval()
    relpos.load_weights(model, before.state_dict())
    images = torch.randn(2, 1, 32, 32, dtype=torch.float64)
    grown = model.grow(32, "as is", window_size=8)
    torch.testing.assert_close(grown(images), theirs(images), rtol=1e-6, atol=1e-6)  # theirs rounds its coordinates
    assert not torch.allclose(model(images), theirs(images), atol=1e-3)


def test_a_side_no_longer_than_the_window_is_one_window() -> None:
    model = small(img_size=(8, 40), window_size=6)
    assert [grid.sizes for grid in model.windows] == [(4, 6), (2, 6)]
    assert model.growth() == ("interpolated", "clipped")


def test_position_parameters_learn_apart() -> None:
    model = small(position="learned+relative_2d")
    assert {id(x) for x in model.position_parameters()} == {
        id(x) for name, x in model.named_parameters() if "position" in name
    }
    frozen = small(position="learned+relative_2d", position_trainable=False)
    assert not any(x.requires_grad for x in frozen.position_parameters())
