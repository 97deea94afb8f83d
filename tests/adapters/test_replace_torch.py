"""`replace_position` in `nn.TransformerEncoder` and `nn.MultiheadAttention`, whose fused kernels must not bypass it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replaced import by_hand, heads, linear, require_round_trips, require_same
from torch import Tensor, nn

import relpos
from relpos import DenseBias, Grid, LineBias, Sequence
from relpos.adapters.replacement.placed import Placed
from relpos.adapters.replacement.torch_attention import PlacedEncoder, PlacedMultiheadAttention
from relpos.core import Coordinates
from relpos.core.densify import written_out

TOKENS = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0)).double()
PADDING = torch.arange(7) >= torch.tensor([7, 5, 3])[:, None]
"""True at padded tokens, as PyTorch has it."""
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)


def encoder(**more: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, **{"batch_first": True, "dropout": 0.0, **more})
    nested = more.get("batch_first", True) and not more.get("norm_first", False)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=nested)
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model.eval().double()


def norm_first() -> Any:
    return encoder(norm_first=True, activation="gelu")


class Own(nn.Module):
    """A model of a user's own, with PyTorch's attention in it."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, **{"batch_first": True, **more}) for _ in range(2))

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, **masks)[0]
        return x


def own(**more: Any) -> Any:
    torch.manual_seed(0)
    return Own(**more).eval().double()


def expected(model: Any, coordinates: Coordinates, allowed: Tensor | None = None, x: Tensor = TOKENS) -> Tensor:
    """The model by hand."""
    mechanisms = list(model.positions)
    x = mechanisms[0].embed(x, coordinates)

    def attended(layer: Any, y: Tensor, position: Any) -> Tensor:
        q, k, v = (
            heads(one, 4) for one in nn.functional.linear(y, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        )
        return linear(by_hand(q, k, v, position, coordinates, allowed=allowed), layer.out_proj)

    for number, layer in enumerate(model.layers):
        position = mechanisms[number % len(mechanisms)]
        if isinstance(layer, nn.MultiheadAttention):
            x = x + attended(layer, x, position)
        elif layer.norm_first:
            x = x + attended(layer.self_attn, layer.norm1(x), position)
            x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
        else:
            x = layer.norm1(x + attended(layer.self_attn, x, position))
            x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    out: Tensor = model.norm(x) if hasattr(model, "norm") else x
    return out


@pytest.mark.parametrize("build", [encoder, norm_first, own])
@pytest.mark.parametrize("position", ["relative_1d", "rotary_1d", "t5", "none"])
def test_it_is_the_model_by_hand(build: Callable[[], Any], position: str) -> None:
    model = build()
    before = model(TOKENS)
    relpos.replace_position(model, position, coordinates=Sequence(12), init_std=0.5)
    assert torch.allclose(model(TOKENS), before) == (position == "none")
    require_same(model, model(TOKENS), expected(model, Sequence(7)))


@pytest.mark.parametrize("build", [encoder, norm_first])
@pytest.mark.parametrize("training", [False, True])
def test_grids_and_absolute_positions(build: Callable[[], Any], training: bool) -> None:
    model = build().train(training)
    grid = Grid(2, 3, prefix=1)
    relpos.replace_position(model, "learned+relative_2d", coordinates=grid, init_std=0.5, shared=True)
    require_same(model, model(TOKENS), expected(model, grid))


@pytest.mark.parametrize("build", [encoder, norm_first, own])
@torch.no_grad()
def test_fused_kernels_do_not_bypass_it(build: Callable[[], Any]) -> None:
    """In eval mode without gradients, with and without padding, and whatever else asks for them."""
    assert torch.backends.mha.get_fastpath_enabled()
    model = build()
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    torch.testing.assert_close(model(TOKENS), expected(model, Sequence(7)), rtol=1e-9, atol=1e-9)
    allowed, real = ~PADDING[:, None, None], ~PADDING
    name = "key_padding_mask" if build is own else "src_key_padding_mask"
    torch.testing.assert_close(
        model(TOKENS, **{name: PADDING})[real], expected(model, Sequence(7), allowed)[real], rtol=1e-9, atol=1e-9
    )
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), expected(model, Sequence(7)), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_this_test_sees_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    bag = model(TOKENS)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    monkeypatch.delattr(PlacedMultiheadAttention, "_qkv_same_embed_dim")
    torch.testing.assert_close(model(TOKENS), bag, rtol=1e-9, atol=1e-9)
    monkeypatch.undo()
    monkeypatch.delattr(PlacedEncoder, "use_nested_tensor")
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        model(TOKENS, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("build", [encoder, own])
def test_masks(build: Callable[[], Any]) -> None:
    model = build()
    relpos.replace_position(model, "relative_1d+alibi", coordinates=Sequence(7), causal=True, init_std=0.5)
    past = torch.arange(7) <= torch.arange(7)[:, None]
    names = ("attn_mask", "key_padding_mask") if build is own else ("mask", "src_key_padding_mask")
    wanted = expected(model, Sequence(7), past)
    for mask in (CAUSAL, CAUSAL < 0):
        torch.testing.assert_close(model(TOKENS, **{names[0]: mask}), wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(TOKENS, **{names[0]: mask}, is_causal=True), wanted, rtol=1e-9, atol=1e-9)
    both, real = past & ~PADDING[:, None, None], ~PADDING
    for mask, padding in ((CAUSAL < 0, PADDING), (CAUSAL, torch.zeros(3, 7).double().masked_fill(PADDING, -torch.inf))):
        for hint in ({}, {"is_causal": True}):
            out = model(TOKENS, **{names[0]: mask, names[1]: padding}, **hint)
            torch.testing.assert_close(out[real], expected(model, Sequence(7), both)[real], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(TOKENS), wanted), "the mask is an argument"
    assert not relpos.replace_position(own(), "alibi", coordinates=Sequence(7)).own


@pytest.mark.parametrize("build", [encoder, norm_first, own])
def test_planted_faults_are_seen(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism left out; the sign turned; the prefix taken for a patch; the causal mask dropped."""
    model, grid = build(), Grid(2, 3, prefix=1)
    relpos.replace_position(model, "relative_2d", coordinates=grid, init_std=0.5)
    past = torch.arange(7) <= torch.arange(7)[:, None]
    name = "attn_mask" if build is own else "mask"
    wanted = expected(model, grid, past)

    def differs(**more: Any) -> bool:
        return not torch.allclose(model(TOKENS, **{name: CAUSAL, **more}), wanted, rtol=1e-3, atol=1e-3)

    assert not differs()
    assert not differs(is_causal=True)
    assert differs(**{name: torch.zeros_like(CAUSAL)})
    place = next(x for x in model.modules() if isinstance(x, PlacedMultiheadAttention)).place
    line = place.terms(7, 7).of(LineBias)[0]
    dense = written_out(line.values, line.lines)[None].detach()
    prefixless = dense.clone()
    prefixless[..., 0, :] = prefixless[..., 0] = 0
    for wrong in (relpos.Terms(), *(relpos.Terms(DenseBias(x)) for x in (dense.mT, prefixless))):
        with monkeypatch.context() as patch:
            patch.setattr(type(place), "terms", lambda self, n, m, wrong=wrong: wrong)
            assert differs()
    with monkeypatch.context() as patch:
        patch.setattr(PlacedMultiheadAttention, "attend_placed", _forgetful)
        assert differs()
    if build is not own:
        relpos.restore(model)
        relpos.replace_position(model, "learned", coordinates=grid, init_std=0.5)
        wanted = expected(model, grid, past)
        assert not differs()
        with monkeypatch.context() as patch:
            patch.setattr(type(place), "embed", lambda self, x, ids=None: x)
            assert differs()


def _forgetful(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **more: Any) -> Tensor:
    """Attention that drops its mask."""
    return Placed.attend_placed(module, q, k, v, None, **{**more, "causal": False})


def test_layouts_and_weights() -> None:
    """Batch first or not, no batch at all, weights by head and their mean; a mask a head."""
    model = own(bias=False)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    layer, x = model.layers[0], TOKENS
    out, mean = layer(x, x, x)
    _, each = layer(x, x, x, average_attn_weights=False)
    values = nn.functional.linear(x, layer.in_proj_weight).chunk(3, -1)[2]
    torch.testing.assert_close(linear((each @ heads(values, 4)).transpose(1, 2).flatten(2), layer.out_proj), out)
    torch.testing.assert_close(mean, each.mean(1))
    alone, weights = layer(x[0], x[0], x[0])
    torch.testing.assert_close(alone, out[0])
    torch.testing.assert_close(weights, mean[0])
    layer.batch_first = False
    turned = x.transpose(0, 1)
    torch.testing.assert_close(layer(turned, turned, turned, need_weights=False)[0].transpose(0, 1), out)
    mask = torch.randn(12, 7, 7).double()
    q, k, v = (heads(one, 4) for one in nn.functional.linear(x, layer.in_proj_weight).chunk(3, -1))
    dense = model.positions[0].mechanisms[0]().double() + mask.unflatten(0, (3, 4))
    wanted = ((8**-0.5 * q @ k.mT + dense).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(
        layer(turned, turned, turned, attn_mask=mask)[0].transpose(0, 1), linear(wanted, layer.out_proj)
    )
    second = encoder(batch_first=False)
    relpos.replace_position(second, "sinusoidal_1d", coordinates=Sequence(7))
    torch.testing.assert_close(second(turned).transpose(0, 1), expected(second, Sequence(7)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(second(x[0]), expected(second, Sequence(7))[0], rtol=1e-9, atol=1e-9)


def test_without_position_tokens_are_a_bag() -> None:
    model, order = encoder(), torch.randperm(7)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    assert not torch.allclose(model(TOKENS[:, order]), model(TOKENS)[:, order])
    relpos.restore(model)
    relpos.replace_position(model, None, coordinates=Sequence(7))
    torch.testing.assert_close(model(TOKENS[:, order]), model(TOKENS)[:, order], rtol=1e-9, atol=1e-9)


def test_dropout_in_training() -> None:
    model = own(dropout=0.5)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.train()
    assert not torch.allclose(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("build", [encoder, own])
def test_round_trips(build: Callable[[], Any]) -> None:
    require_round_trips(build, "relative_1d", lambda model: model(TOKENS), coordinates=Sequence(7))
    if build is encoder:
        options = {"coordinates": Grid(1, 7), "shared": True}
        require_round_trips(build, "learned+rotary_2d", lambda model: model(TOKENS), **options)


def test_own_of_a_model_that_knows_nothing() -> None:
    report = relpos.replace_position(encoder(), "own", coordinates=Sequence(7))
    assert str(report).splitlines() == [
        "TransformerEncoder",
        "  position  own: the model keeps what it knows of position itself, and nothing was changed",
        "  kept      nothing: it knows nothing of position itself",
    ]


@pytest.mark.usefixtures("unchecked")
def test_wrong_uses() -> None:
    def refused(model: nn.Module, match: str, position: Any = "relative_1d", **options: Any) -> None:
        keys = list(model.state_dict())
        with pytest.raises(ValueError, match=match) as caught:
            relpos.replace_position(model, position, **{"coordinates": Sequence(7), **options})
        assert "\n" not in str(caught.value)
        assert list(model.state_dict()) == keys
        assert not any(isinstance(x, PlacedMultiheadAttention) for x in model.modules())

    refused(encoder(), "coordinates, which PyTorch's modules do not hold; got None", coordinates=None)
    refused(encoder(), "coordinates to be coordinates", coordinates=7)
    refused(own(), "a position that acts in attention, all there is in Own; got learned", "learned")
    refused(own(), "axes of the tokens of Own, which have 1; got 'relative_2d', which is for 2", "relative_2d")
    refused(own(kdim=16), "nn.MultiheadAttention among the same tokens; got one with kdim")
    refused(own(add_bias_kv=True), "add_bias_kv")
    refused(
        nn.ModuleList([own(), nn.MultiheadAttention(16, 2)]), "one size; got 2 heads of width 8, 4 heads of width 8"
    )
    refused(
        nn.Transformer(32, 4, 1, 1, batch_first=True), r"an encoder; got TransformerDecoderLayer \(decoder.layers.0\)"
    )
    model = own()
    relpos.replace_position(model, "relative_2d", coordinates=Grid(2, 3))
    with pytest.raises(ValueError, match=r"expected 6 tokens, of Grid\(2, 3\); got 7"):
        model(TOKENS)
    with pytest.raises(ValueError, match="the same tokens as queries, keys and values"):
        model.layers[0](TOKENS, TOKENS[:, :5], TOKENS[:, :5])
