"""Mechanisms inside wrappers, as PEFT makes them of any module: what still says terms counts, anything else raises."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from relpos import (
    ALiBi,
    FlashAttention,
    Grid,
    LearnedPositionEmbedding,
    LinearAttention,
    LineBias,
    MultiHeadAttention,
    NoPosition,
    RelativePositionBias,
    RotaryEmbedding,
    Sequence,
    Terms,
    VisionTransformer,
    attention,
    count_parameters,
)
from relpos.core import Coordinates
from relpos.position import Mechanism, Sum

GRID = Grid(2, 3)
pytestmark = pytest.mark.usefixtures("unchecked")  # a wrapper is none of our types


class Forwarding(nn.Module):
    """Hands every name that it lacks on to what it holds, as PEFT's ModulesToSaveWrapper does."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)


class Adapter(Forwarding):
    """Adds a learned bias of its own to what it holds."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.delta = nn.Parameter(torch.tensor(0.5))

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        (bias,) = self.base_layer.terms(queries, keys)  # type: ignore[operator]
        return Terms(LineBias(bias.values * (1 + self.delta), bias.lines))


class Bare(nn.Module):
    """Says terms and nothing else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        found: Terms = self.inner.terms(queries, keys)  # type: ignore[operator]
        return found


def relative() -> RelativePositionBias:
    return RelativePositionBias(2, window_size=(2, 3), init_std=1.0)


def model() -> VisionTransformer:
    torch.manual_seed(3)
    return VisionTransformer(
        img_size=(4, 6), patch_size=2, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2,
        position="learned+relative_2d", position_init_std=1.0,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("wrap", [Forwarding, Bare])
def test_a_wrapped_part_counts(wrap: type[nn.Module]) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    total = relative() + ALiBi(2, distance="manhattan")
    wanted = attention(q, k, v, position=total, queries=GRID)
    total.mechanisms[0] = wrap(total.mechanisms[0])
    assert len(total.parts()) == 2
    for position in (total, Sum(total.mechanisms), total + NoPosition()):
        found = attention(q, k, v, position=position, queries=GRID)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    found.sum().backward()
    assert any(x.grad is not None and x.grad.any() for x in total.mechanisms[0].parameters())


def test_what_a_wrapper_adds_counts() -> None:
    """Also where the sum is made of wrappers, which would hand `parts` on to what they hold."""
    wrapper = Adapter(relative())
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    wanted = attention(q, k, v, position=wrapper.terms(GRID))
    for total in (Sum([wrapper]), ALiBi(2, distance="manhattan") + wrapper):  # type: ignore[list-item, operator]
        assert wrapper in total.parts()
    found = attention(q, k, v, position=Sum([wrapper]), queries=GRID)  # type: ignore[list-item]
    assert torch.equal(found, wanted)  # type: ignore[arg-type]
    found.square().sum().backward()
    assert wrapper.delta.grad.abs() > 0


def test_what_says_no_terms_raises_one_line() -> None:
    total = relative() + ALiBi(2, distance="manhattan")
    total.mechanisms[1] = nn.Linear(2, 2)
    for call in (total.parts, lambda: total.terms(GRID), lambda: total.acts_in_attention, lambda: total.growth):
        with pytest.raises(ValueError, match=r"^expected each part of a sum to have terms\(queries, keys\); got"):
            call()
    whole = model()
    whole.positions[1] = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^expected the position of each layer to have terms\(queries, keys\); got"):
        whole(torch.randn(1, 1, 4, 6))


@pytest.mark.parametrize("wrap", [Forwarding, Bare])
@pytest.mark.parametrize("where", ["a part", "a sum"])
def test_in_a_model(wrap: type[nn.Module], where: str) -> None:
    plain, images = model(), torch.randn(2, 1, 4, 6)
    wrapped = copy.deepcopy(plain)
    if where == "a sum":
        wrapped.positions[1] = wrap(wrapped.positions[1])
    else:
        wrapped.positions[0].mechanisms[1] = wrap(wrapped.positions[0].mechanisms[1])
    assert torch.equal(wrapped(images), plain(images))
    assert count_parameters(wrapped) == count_parameters(plain)
    for ours, theirs in zip(wrapped.attention_position, plain.attention_position, strict=True):
        (one,), (other,) = ours.terms(plain.coordinates), theirs.terms(plain.coordinates)
        assert torch.equal(one.values, other.values)  # type: ignore[attr-defined]
    wrapped(images).square().sum().backward()
    assert all(x.grad is not None for x in wrapped.positions.parameters())
    wrapped.positions[1] = Sum([Adapter(relative())])  # type: ignore[list-item]
    plain.positions[1] = relative()
    assert count_parameters(wrapped)["position"].total == count_parameters(plain)["position"].total + 1


def test_tokens_are_embedded_through_a_wrapper() -> None:
    total = LearnedPositionEmbedding(8, grid_size=(2, 3), init_std=1.0) + relative()
    x = torch.randn(1, 6, 8)
    wanted = total.embed(x, GRID)
    total.mechanisms[0] = Forwarding(total.mechanisms[0])
    assert total.acts_on_tokens
    assert torch.equal(total.embed(x, GRID), wanted)
    total.mechanisms[1] = Bare(total.mechanisms[1])
    assert torch.equal(total.embed(x, GRID), wanted)


@pytest.mark.parametrize("wrap", [Forwarding, Bare])
def test_layers_take_it(wrap: type[Any]) -> None:
    x = torch.randn(1, 6, 16)
    bias = RelativePositionBias(2, seq_len=6, init_std=1.0)
    turned = RotaryEmbedding(8)
    for kind, position in ((MultiHeadAttention, bias), (FlashAttention, bias), (LinearAttention, turned)):
        layer: Any = kind(16, 2, position=position)  # type: ignore[operator]
        wanted = layer(x)
        kept = layer.state_dict()
        layer.position = wrap(position)
        assert torch.equal(layer(x), wanted)
        other: Any = kind(16, 2, position=wrap(position))  # type: ignore[operator]
        other.load_state_dict({name: kept.get(name, x) for name, x in other.state_dict().items()})
        assert torch.equal(other(x), wanted)


def test_layers_refuse_what_says_no_terms() -> None:
    for kind in (MultiHeadAttention, FlashAttention, LinearAttention):
        with pytest.raises(ValueError, match="expected position to be a mechanism; got Linear"):
            kind(16, 2, position=nn.Linear(2, 2))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"expected a mechanism on both sides of \+; got Linear"):
        ALiBi(2) + nn.Linear(2, 2)  # type: ignore[operator]


def test_a_wrapper_is_not_grown_without_what_it_adds() -> None:
    """What it holds would be, and the adapter be lost."""
    total = Sum([Adapter(relative())])  # type: ignore[list-item]
    assert total.growth == relative().growth
    for call in (lambda: total.grow(Grid(3, 4), "interpolated"), lambda: total.extend(12)):
        with pytest.raises(ValueError, match=r"^expected a mechanism to grow; got Adapter.*Merge the adapter"):
            call()
    anywhere = Sum([Forwarding(RotaryEmbedding(8)), Forwarding(ALiBi(2))])  # type: ignore[list-item]
    assert anywhere.grow(Sequence(9), "as is").parts() == anywhere.parts()
    assert anywhere.extend(9).parts() == anywhere.parts()
    assert isinstance(anywhere, Mechanism)
