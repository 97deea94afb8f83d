"""Built on the meta device, then given weights: where a mechanism is follows from these, else from the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import relpos
from relpos import Grid, Sequence, Site
from relpos.core import Coordinates
from relpos.position import Mechanism, find, presets
from relpos.position.base.states import terms_of
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens
from relpos.testing.calls import states_of

FAST_CASES = 6  # of each of its tests, in the fast part

HEADS, WIDTH = 2, 8
META = torch.device("meta")
SUMS = ("t5+rotary_1d", "sinusoidal_1d+alibi", "rotary_2d+relative_2d", "learned+rotary_1d")


def _site(name: str) -> Site:
    axes = find(name).token_axes
    tokens: Coordinates = Grid(2, 3) if 2 in axes and name != "t5+rotary_1d" else Sequence(6)
    return Site(HEADS, WIDTH, HEADS * WIDTH, tokens, init_std=0.5)


def _used(mechanism: Any, site: Site) -> Tensor:
    """What it makes of tokens: embedded, and attended to, by itself and in its terms alone."""
    torch.manual_seed(1)
    x, q = torch.randn(1, 6, HEADS * WIDTH), torch.randn(1, HEADS, 6, WIDTH)
    if acts_on_tokens(mechanism):
        x = mechanism.embed(x, site.queries)
    if not acts_in_attention(mechanism):
        return x
    states = states_of(mechanism, q, q)
    out = relpos.attention(q, q, q, position=mechanism, queries=site.queries, states=states)
    again = relpos.attention(q, q, q, position=terms_of(mechanism, site.queries, states=states))
    assert torch.equal(out, again), "terms made alone, afterwards, are where the tokens are"
    return x.sum() + out


class Composed(Mechanism):
    """A mechanism of a person's own, made of two of ours, neither with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.decay = relpos.RotaryEmbedding(WIDTH), relpos.ALiBi(HEADS)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> relpos.Terms:
        return self.rotary.terms(queries, keys) + self.decay.terms(queries, keys)


class Constants(relpos.OffsetBias):
    """Numbers in a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def bias(self, offsets: relpos.Offsets) -> Tensor:
        return -self.slopes[:, None] * offsets.axes[:, 0].abs()


def _assigned(made: nn.Module, weights: dict[str, Tensor]) -> None:
    made.load_state_dict(weights, assign=True)


def _emptied(made: nn.Module, weights: dict[str, Tensor]) -> None:
    made.to_empty(device="cpu").load_state_dict(weights)


def _moved(made: nn.Module, weights: dict[str, Tensor]) -> None:
    made.load_state_dict(weights, assign=True)
    made.to("cpu").double().float()


given = pytest.mark.parametrize("give", [_assigned, _emptied, _moved])


@given
@pytest.mark.parametrize("name", [*presets(), *SUMS, Composed, Constants])
def test_a_mechanism_that_is_given_weights(name: Any, give: Callable[..., None]) -> None:
    site = _site(name if isinstance(name, str) else "alibi")
    make: Callable[[], Mechanism] = (lambda: find(name).make(site)) if isinstance(name, str) else name
    own = make().eval()  # in training, some draw where tokens are
    with META:
        made = make().eval()
    assert made.device == META
    give(made, own.state_dict())
    assert torch.equal(_used(made, site), _used(own, site))
    assert made.device == (META if name == "none" and give is _assigned else torch.device("cpu"))


def test_a_sum_that_is_made_of_parts_on_meta() -> None:
    with META:
        rotary = relpos.RotaryEmbedding(WIDTH)
    site = _site("rotary_1d")
    assert torch.equal(_used(rotary + relpos.ALiBi(HEADS), site), _used(Composed(), site))


def test_terms_from_tensors_of_a_sum_on_meta() -> None:
    own = relpos.T5Bias(HEADS, init_std=1.0) + relpos.RotaryEmbedding(WIDTH)
    with META:
        made = relpos.T5Bias(HEADS) + relpos.RotaryEmbedding(WIDTH)
    q = torch.randn(1, HEADS, 6, WIDTH)
    terms = made.terms_from(dict(own.named_parameters()), Sequence(6))
    wanted = relpos.attention(q, q, q, position=own, queries=Sequence(6))
    assert torch.equal(relpos.attention(q, q, q, position=terms), wanted)
    assert made.device == META


def test_without_weights_a_mechanism_stays_on_meta_and_says_what_to_do() -> None:
    q = torch.randn(1, HEADS, 6, WIDTH)
    with META:
        bias, learned = relpos.T5Bias(HEADS), relpos.LearnedPositionEmbedding(WIDTH, seq_len=6)
    told = r"^expected .*; got .*\. .*on meta have no numbers.*load_state_dict\(weights, assign=True\)\.$"
    with pytest.raises(ValueError, match=told):
        relpos.attention(q, q, q, position=bias, queries=Sequence(6))
    with pytest.raises(ValueError, match=told):
        learned.embed(torch.randn(1, 6, WIDTH), Sequence(6))
    bias.load_state_dict(relpos.T5Bias(HEADS).state_dict(), assign=True)  # what it says helps
    relpos.attention(q, q, q, position=bias, queries=Sequence(6))


def test_terms_on_meta_of_a_mechanism_without_weights_say_what_to_do() -> None:
    with META:
        rotary = relpos.RotaryEmbedding(WIDTH)
    q = torch.randn(1, HEADS, 6, WIDTH)
    with pytest.raises(ValueError, match=r"got meta\. Move the mechanism or mask to the device of q"):
        relpos.attention(q, q, q, position=rotary.terms(Sequence(6)))
    relpos.attention(q, q, q, position=rotary.to("cpu").terms(Sequence(6)))
    x = torch.empty(1, HEADS, 6, WIDTH, device=META)
    assert rotary.to("meta").terms(Sequence(6)).items[0].query.device == META
    assert relpos.rotate(x, rotary.angles(Sequence(6)), layout="half").device == META


VIT: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3, "embed_dim": 16, "depth": 2}
SWIN: dict[str, Any] = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "window_size": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: relpos.VisionTransformer(**VIT, num_heads=2, position="learned+rotary_2d"),
    "ViT, sinusoids": lambda: relpos.VisionTransformer(**VIT, num_heads=2, position="sinusoidal_2d"),
    "Swin": lambda: relpos.SwinTransformer(8, 2, 1, 3, **SWIN, position="sinusoidal_2d+alibi"),
    "language": lambda: relpos.LanguageModel(16, 16, embed_dim=16, depth=2, num_heads=2, position="t5+alibi"),
    "a layer": lambda: relpos.MultiHeadAttention(16, 2, position=relpos.RotaryEmbedding(8)),
    "linear attention": lambda: relpos.LinearAttention(16, 2, position=relpos.RotaryEmbedding(8)),
    "the documents' rotation": lambda: relpos.RotaryPositionalEmbedding(16),
    "the documents' slopes": lambda: relpos.ALiBiPositionalEmbedding(2),
}


def _called(model: nn.Module) -> Tensor:
    if isinstance(model, relpos.LanguageModel):
        return model.generate(torch.arange(12).view(2, 6), 2, temperature=0) + model(torch.arange(12).view(2, 6)).sum()
    if isinstance(model, relpos.VisionTransformer | relpos.SwinTransformer):
        return model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8))
    if isinstance(model, relpos.ALiBiPositionalEmbedding):
        return model(torch.zeros(1, 2, 4, 4))
    return model(torch.linspace(-1, 1, 96).view(1, 6, 16))


@given
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_that_is_given_weights(name: str, give: Callable[..., None]) -> None:
    own = MODELS[name]().eval()
    with META:
        made = MODELS[name]().eval()
    give(made, own.state_dict())
    assert torch.equal(_called(made), _called(own))


@pytest.mark.slow
def test_compiled_before_it_was_ever_called() -> None:
    with META:
        layer = relpos.MultiHeadAttention(16, 2, position=relpos.RotaryEmbedding(8))
    own = relpos.MultiHeadAttention(16, 2, position=relpos.RotaryEmbedding(8))
    layer.load_state_dict(own.state_dict(), assign=True)
    x = torch.linspace(-1, 1, 96).view(1, 6, 16)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), own(x))
    torch.testing.assert_close(layer(x), own(x))


ON_CPU: dict[str, Any] = {"device_map": {"": "cpu"}}


@pytest.mark.parametrize(
    ("name", "buffers", "how"),
    [
        ("ViT", False, ON_CPU),
        ("language", True, {"device_map": "auto"}),
        ("Swin", True, {**ON_CPU, "force_hooks": True}),
    ],
    ids=str,
)
@torch.no_grad()
def test_accelerate_loads_and_dispatches(name: str, buffers: bool, how: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    own = MODELS[name]().eval()
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights(include_buffers=buffers):
        made = MODELS[name]().eval()
    accelerate.load_checkpoint_and_dispatch(made, str(tmp_path), **how)
    assert torch.equal(_called(made), _called(own))
