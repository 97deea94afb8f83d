"""`replace_position` in timm's BEiT and Swin: tables with a class token, and windows that a shift has cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replaced import by_hand, heads, linear, require_round_trips, require_same
from torch import Tensor, nn

import relpos
from models import images
from relpos import DenseBias, Grid
from relpos.adapters.libraries import imported
from relpos.adapters.replacement.beit import PlacedBeit
from relpos.adapters.replacement.swin import PlacedWindowAttention
from relpos.core.densify import written_out

pytestmark = pytest.mark.usefixtures("timm")
PIXELS = images(2, (16, 24)).double()


def beit(own: bool = True, shared: bool = False, absolute: bool = False) -> Any:
    torch.manual_seed(0)
    model = imported("timm").models.beit.Beit(
        img_size=(16, 24), patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5, use_rel_pos_bias=own,
        use_shared_rel_pos_bias=shared, use_abs_pos_emb=absolute, init_values=0.5, use_fc_norm=False,
        global_pool="token",
    )  # fmt: skip
    return _tamed(model)


def beit_of_all() -> Any:
    return beit(own=True, shared=True, absolute=True)


def plain_beit() -> Any:
    return beit(own=False)


def swin(**more: Any) -> Any:
    """Stages of 8 x 6 and 4 x 3 tokens, in windows of 4 x 3; the second layer of the first stage is shifted."""
    torch.manual_seed(0)
    model = imported("timm").models.swin_transformer.SwinTransformer(
        img_size=(32, 24), patch_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 4), window_size=((4, 3), (4, 3)),
        num_classes=5, drop_path_rate=0.0, **more,
    )  # fmt: skip
    return _tamed(model)


def _tamed(model: nn.Module) -> nn.Module:
    for name, x in model.named_parameters():
        if "token" in name or "pos" in name:
            nn.init.normal_(x, generator=torch.Generator().manual_seed(1))
    return model.eval().double()


def states(model: Any, x: Tensor = PIXELS) -> Tensor:
    if not hasattr(model, "cls_token"):
        x = F.interpolate(x.mT, size=(32, 24))
    out: Tensor = model.forward_features(x)
    return out


def expected_beit(model: Any) -> Tensor:
    """BEiT by hand: what its mechanisms say, and nothing of its own."""
    x = model.patch_embed.proj(PIXELS).flatten(2).mT
    x = torch.cat([model.cls_token.expand(2, -1, -1), x], dim=1)
    grid, mechanisms = Grid(2, 3, prefix=1), list(model.positions)
    x = mechanisms[0].embed(x, grid)
    for number, block in enumerate(model.blocks):
        attn, y = block.attn, block.norm1(x)
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        q, k, v = (heads(one, 4) for one in F.linear(y, attn.qkv.weight, bias).chunk(3, -1))
        position = mechanisms[number % len(mechanisms)]
        x = x + block.gamma_1 * linear(by_hand(q, k, v, position, grid), attn.proj)
        x = x + block.gamma_2 * block.mlp(block.norm2(x))
    normed: Tensor = model.norm(x)
    return normed


def expected_swin(model: Any) -> Tensor:
    """Swin by hand, window by window, with its second layer shifted by (2, 1)."""
    x = model.patch_embed(F.interpolate(PIXELS.mT, size=(32, 24)))
    for stage, count in zip(model.layers, (2, 4), strict=True):
        x = stage.downsample(x)
        rows, columns = x.shape[1:3]
        for number, block in enumerate(stage.blocks):
            down, right = block.shift_size
            assert (down, right) == ((2, 1) if number else (0, 0))
            position = list(stage.positions)[number % len(stage.positions)]
            y, out = block.norm1(x), torch.zeros_like(x)
            for top in range(0, rows, 4):
                for left in range(0, columns, 3):
                    at_rows = (torch.arange(top, top + 4) + down) % rows
                    at_columns = (torch.arange(left, left + 3) + right) % columns
                    tokens = y[:, at_rows][:, :, at_columns].flatten(1, 2)
                    q, k, v = (heads(one, count) for one in linear(tokens, block.attn.qkv).chunk(3, -1))
                    wraps = (at_rows < down)[:, None] * 2 + (at_columns < right)
                    together = wraps.flatten() == wraps.flatten()[:, None]
                    made = by_hand(q, k, v, position, Grid(4, 3), allowed=together)
                    out[:, at_rows[:, None], at_columns] = linear(made, block.attn.proj).unflatten(1, (4, 3))
            x = x + out
            x = x + block.mlp(block.norm2(x))
    normed: Tensor = model.norm(x)
    return normed


@pytest.mark.parametrize("build", [beit, beit_of_all, plain_beit])
@pytest.mark.parametrize("position", ["relative_2d", "rotary_2d", "learned+t5", "none"])
def test_beit_is_the_model_by_hand(build: Callable[[], Any], position: str) -> None:
    model = build()
    before = states(model)
    relpos.replace_position(model, position, init_std=0.5)
    assert torch.allclose(states(model), before) == (build is plain_beit and position == "none")
    require_same(model, states(model), expected_beit(model))


@pytest.mark.parametrize("position", ["relative_2d", "rotary_2d", "log_cpb", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_swin_is_the_model_by_hand(position: str, shared: bool) -> None:
    model = swin()
    before = states(model)
    relpos.replace_position(model, position, init_std=0.5, shared=shared)
    assert [len(stage.positions) for stage in model.layers] == ([1, 1] if shared else [2, 1])
    assert not torch.allclose(states(model), before)
    require_same(model, states(model), expected_swin(model))


def test_dynamic_masks_of_swin() -> None:
    model, other = swin(), swin(dynamic_img_size=True)
    for one in (model, other):
        relpos.replace_position(one, "relative_2d", init_std=0.5)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(states(other), states(model), rtol=1e-9, atol=1e-9)
    larger = images(1, (64, 48)).double()
    assert other.forward_features(larger).shape == (1, 8, 6, 32)


def test_its_own_tables_as_mechanisms_are_the_model_itself() -> None:
    for model, stacks in (
        (beit(), lambda one: [(one, one.blocks)]),
        (swin(), lambda one: [(x, x.blocks) for x in one.layers]),
    ):
        own = states(model)
        relpos.replace_position(model, "relative_2d")
        assert not torch.allclose(states(model), own)
        for holder, blocks in stacks(model):
            for block, position in zip(blocks, holder.positions, strict=True):
                position.mechanisms[0].relative_position_bias_table.data.copy_(block.attn.relative_position_bias_table)
        torch.testing.assert_close(states(model), own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [beit_of_all, swin])
def test_without_position_tokens_are_a_bag(build: Callable[[], Any]) -> None:
    """Of one layer of attention: tokens in another order give the same in that order."""
    model = build()
    layer = model.blocks[0].attn if build is beit_of_all else model.layers[0].blocks[0].attn
    x = torch.randn(2, 7 if build is beit_of_all else 12, 32 if build is beit_of_all else 16).double()
    order = torch.randperm(x.shape[1])
    assert not torch.allclose(layer(x[:, order]), layer(x)[:, order])
    relpos.replace_position(model, None)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=1e-9, atol=1e-9)
    relpos.restore(model)
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    assert not torch.allclose(layer(x[:, order]), layer(x)[:, order])


@pytest.mark.parametrize("build", [beit, beit_of_all, swin])
def test_round_trips(build: Callable[[], Any]) -> None:
    require_round_trips(build, "relative_2d", states)
    require_round_trips(build, "rotary_2d+relative_2d", states, shared=True)


def test_the_report_names_what_is_off() -> None:
    report = relpos.replace_position(beit_of_all(), "relative_2d")
    assert [one.name for one in report.own] == [
        "pos_embed", "rel_pos_bias.relative_position_bias_table", "blocks.*.attn.relative_position_bias_table",
    ]  # fmt: skip
    report = relpos.replace_position(swin(), "relative_2d")
    assert "layers.0.blocks.*.attn.relative_position_bias_table: tables of 35 offsets, 2 layers" in str(report)
    assert "2 layers of layers.0, Grid(4, 3)" in str(report)
    assert not relpos.replace_position(plain_beit(), "relative_2d").own


def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own tables left on; the sign turned; the prefix taken for a patch; the mask of the shift dropped."""
    model, windows = beit_of_all(), swin()
    for one in (model, windows):
        relpos.replace_position(one, "relative_2d", init_std=0.5)
    wanted = {model: expected_beit(model), windows: expected_swin(windows)}

    def differs(one: Any) -> bool:
        return not torch.allclose(states(one), wanted[one], rtol=1e-3, atol=1e-3)

    assert not differs(model)
    assert not differs(windows)
    for one, owner, name in ((model, PlacedBeit, "pos_embed"), (windows, PlacedWindowAttention, "forward")):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            assert differs(one)
    place = model.blocks[0].attn.place
    line = place.terms(7, 7).of(relpos.LineBias)[0]
    dense = written_out(line.values, line.lines)[None].detach()
    prefixless = dense.clone()
    prefixless[..., 0, :] = prefixless[..., 0] = 0
    for wrong in (dense.mT, prefixless):
        with monkeypatch.context() as patch:
            patch.setattr(type(place), "terms", lambda self, n, m, wrong=wrong: relpos.Terms(DenseBias(wrong)))
            assert differs(model)
    right = type(place).terms

    def turned(self: Any, queries: int, keys: int) -> relpos.Terms:
        line = right(self, queries, keys).of(relpos.LineBias)[0]
        return relpos.Terms(DenseBias(written_out(line.values, line.lines)[None].mT))

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "terms", turned)
        assert differs(windows)
    windows.layers[0].blocks[1].attn_mask = None
    assert differs(windows)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")  # timm's
def test_what_windows_cannot_have() -> None:
    model = swin()
    before, keys = states(model), list(model.state_dict())
    for position, match in (
        ("learned", "acts in attention, all there is in SwinTransformerStage; got learned, which is added to tokens"),
        ("learned+relative_2d", "which is added to tokens"),
        ("fire", "axes of the tokens of SwinTransformerStage, which have 2; got 'fire', which is for 1"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            relpos.replace_position(model, position)
        assert "\n" not in str(caught.value)
        assert list(model.state_dict()) == keys
        assert torch.equal(states(model), before)
    relpos.replace_position(model, "relative_2d")
    model.set_input_size((64, 48), window_size=(8, 6))
    with pytest.raises(ValueError, match=r"expected 12 tokens, of Grid\(4, 3\); got 48"):
        model(images(1, (64, 48)).double())
