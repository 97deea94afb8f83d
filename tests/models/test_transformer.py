"""What the vision transformer and the language model have in common: positions of layers, dropout, dtypes, counts."""

import copy
from collections.abc import Callable

import pytest
import torch
from small import image, text
from torch import Tensor

from relpos import KeyValueCache, LanguageModel, RelativePositionBias, VisionTransformer, count_parameters

Model = VisionTransformer | LanguageModel


def some(model: Model, dtype: torch.dtype = torch.float32) -> Tensor:
    if isinstance(model, LanguageModel):
        return torch.randint(7, (2, 9))
    return torch.randn(2, 1, 6, 8, dtype=dtype)


both = pytest.mark.parametrize("build", [image, text])
Build = Callable[..., Model]
BIAS = {image: "relative_2d", text: "t5"}


@both
def test_a_shared_table_gets_the_gradient_of_every_layer(build: Build) -> None:
    position = BIAS[build]  # type: ignore[index]
    shared, apart = build(position=position, shared_position=True).double(), build(position=position).double()
    state = shared.state_dict()
    first = {name: x for name, x in state.items() if name.startswith("positions.0.")}
    apart.load_state_dict({**state, **{name.replace("0", "1", 1): x for name, x in first.items()}}, strict=True)
    given = some(shared, torch.float64)
    torch.testing.assert_close(shared(given), apart(given))
    for model in (shared, apart):
        model(given).square().sum().backward()
    (one,) = shared.position_parameters()
    first_own, second_own = apart.position_parameters()
    torch.testing.assert_close(one.grad, first_own.grad + second_own.grad)  # type: ignore[operator]


@both
def test_layers_that_are_not_to_share_do_not(build: Build) -> None:
    one = RelativePositionBias(3, (3, 4), prefix=1) if build is image else RelativePositionBias(4, seq_len=9)
    with pytest.raises(ValueError, match="shared_position=True"):
        build(position=lambda site: one)
    assert build(position=lambda site: one, shared_position=True).position_parameters() == [*one.parameters()]


@both
@pytest.mark.parametrize("argument", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate"])
def test_dropout_in_training_alone(build: Build, argument: str) -> None:
    model = build(**{argument: 0.5})
    given = some(model)
    assert not torch.equal(model(given), model(given))
    model.eval()
    assert torch.equal(model(given), model(given))


@both
def test_attention_maps(build: Build) -> None:
    """Of every layer, and of text lower triangles; each row adds up to 1."""
    model = build(position="shaw" if build is text else "relative_2d").eval()
    heads, tokens = (4, 9) if build is text else (3, 13)
    maps = list(model.attention_maps(some(model)))
    assert [weights.shape for weights in maps] == [(2, heads, tokens, tokens)] * 2
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, heads, tokens))
        assert build is image or not weights.triu(1).any()


@both
def test_state_dict_round_trip(build: Build) -> None:
    model, other = (build(position=f"learned+{BIAS[build]}").eval() for _ in range(2))  # type: ignore[index]
    other.load_state_dict(model.state_dict(), strict=True)
    given = some(model)
    assert torch.equal(model(given), other(given))
    assert len({x.data_ptr() for x in model.state_dict().values()}) == len(model.state_dict()), "safetensors saves it"


@both
@pytest.mark.parametrize("position", ["rotary_1d", "learned+t5"])
def test_bfloat16_and_autocast(build: Build, position: str) -> None:
    model = build(position=position).eval()
    given, close = some(model), {"rtol": 0.05, "atol": 0.1 if build is text else 0.05}
    exact = model(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(given)
        assert cast.dtype == torch.bfloat16
        torch.testing.assert_close(cast.float(), exact, **close)
        if isinstance(model, LanguageModel):
            cache = KeyValueCache(2)
            steps = torch.cat([model(part, cache=cache) for part in given.split([4, 1, 4], dim=1)], dim=1)
            torch.testing.assert_close(steps.float(), exact, **close)
    half = given.bfloat16() if build is image else given
    cast = copy.deepcopy(model).to(torch.bfloat16)(half)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), exact, **close)


GROWTH: list[tuple[Build, str | None, tuple[str, ...]]] = [
    (image, "none", ("as is",)),
    (image, None, ("as is",)),
    (image, "learned", ("interpolated",)),
    (image, "relative_1d", ("interpolated", "clipped")),
    (image, "learned+relative_2d", ("interpolated", "clipped")),
    (image, "rotary_2d+relative_2d", ("interpolated", "clipped")),
    (image, "rotary_2d+alibi+t5+sinusoidal_2d", ("as is",)),
    (text, "alibi", ("as is",)),
    (text, "relative_1d", ("interpolated", "clipped")),
    (text, "learned+alibi", ("interpolated", "repeated")),
    (text, "fox", ("as is",)),
    (text, "selective_rope+cable", ("as is",)),
    (text, "fox~relative_1d", ("interpolated", "clipped")),
]


@pytest.mark.parametrize(("build", "position", "rules"), GROWTH)
@pytest.mark.parametrize("shared", [False, True])
def test_growth(build: Build, position: str | None, rules: tuple[str, ...], shared: bool) -> None:
    model = build(position=position, shared_position=shared).eval()
    assert model.growth() == rules
    given, before = some(model), copy.deepcopy(model.state_dict())
    size, own, larger, scores = (
        (14, 9, torch.randint(7, (2, 14)), (2, 14, 7))
        if build is text
        else ((10, 12), (6, 8), torch.randn(2, 1, 10, 12), (2, 5))
    )
    if rules != ("as is",):
        remedy = rf"at most 9 tokens.*model\.grow\(length, rule\) with '{rules[0]}'" if build is text else "Resize"
        with pytest.raises(ValueError, match=remedy):
            model(larger)
    for rule in rules:
        grown = model.grow(size, rule)  # type: ignore[arg-type]
        assert grown(larger).shape == scores
        tokens = grown.context if isinstance(grown, LanguageModel) else grown.patch_embed.grid_size
        assert tokens == (14 if build is text else (5, 6))
        assert grown.coordinates.count == (14 if build is text else 30 + grown.prefix)  # type: ignore[union-attr]
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items()), "the model itself is left alone"
    torch.testing.assert_close(model.grow(own, rules[0])(given), model(given))  # type: ignore[arg-type]
    if position not in (None, "none"):
        with pytest.raises(ValueError, match="growth rule"):
            model.grow(size, "extended")  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("trainable", [True, False])
def test_frozen_positions(build: Build, trainable: bool) -> None:
    """Frozen, they have no gradient, are counted all the same, and stay frozen when they grow."""
    bias = "relative_2d" if build is image else "relative_1d"
    model = build(position=f"learned+{bias}", position_trainable=trainable)
    model(some(model)).sum().backward()
    own = model.position_parameters()
    assert len(own) == 3
    assert count_parameters(model)["position"].total == sum(p.numel() for p in own)
    assert all((p.grad is not None) == trainable for p in own)
    assert all(p.grad is not None for p in set(model.parameters()) - set(own))
    grown = model.grow(16, "interpolated")
    assert all(p.requires_grad == trainable for p in grown.position_parameters())
    assert grown.positions.trainable == trainable, "whatever a mechanism makes of it"
