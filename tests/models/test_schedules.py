"""Schedules over layers: which layer has which position, what is shared, saved and grown, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import image, text

from relpos import LanguageModel, RelativePositionBias, RotaryEmbedding, Site, SwinTransformer, T5Bias
from relpos.models import RotaryChoice

TOKENS = torch.tensor([[0, 3, 1, 6, 2, 5]])


def kinds(model: Any) -> list[list[str]]:
    """The classes of each layer's mechanisms."""
    return [[type(part).__name__ for part in layer.parts()] for layer in model.attention_position]


def test_layers_take_the_entries_in_order() -> None:
    model = text(depth=5, position="rope~t5+rope~nope")
    assert model.arguments["position"] == "rotary_1d~t5+rotary_1d~none"
    rope, both = ["RotaryEmbedding"], ["T5Bias", "RotaryEmbedding"]
    assert kinds(model) == [rope, both, [], rope, both]
    assert kinds(text(depth=5, position="rope~t5+rope~nope", shared_position=True)) == [rope, both, []]
    assert text(depth=5, position=("rope", "t5+rope", None)).arguments == model.arguments
    assert image(depth=3, position="rope~swin").arguments["position"] == "rotary_2d~relative_2d"


@pytest.mark.parametrize("shared", [False, True])
def test_weights_steer_their_own_layers_only(shared: bool) -> None:
    """Each entry gets a gradient. A table that puts all on one key turns the maps of its layers, and no others."""
    model = text(depth=5, position="t5~none~fire", shared_position=shared)
    assert sum(len(list(one.parameters())) > 0 for one in model.positions) == (2 if shared else 3)  # layers 0, 3 and 2
    model(TOKENS).square().sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in model.position_parameters())
    for table in (one for one in model.modules() if isinstance(one, T5Bias)):
        with torch.no_grad():
            table.relative_attention_bias[0] = 1e4  # the bucket of the token itself
    maps = [one.detach() for one in model.attention_maps(TOKENS)]
    looks_at_itself = [torch.allclose(one, torch.eye(6).expand_as(one)) for one in maps]
    assert looks_at_itself == [True, False, False, True, False]


@pytest.mark.parametrize(
    "position", ["learned+rope~t5", "fox~fire+fox~none", (RotaryChoice(1e4), RotaryChoice(1e6), None)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_decoded_saved_and_grown(position: Any, shared: bool, tmp_path: Path) -> None:
    model = text(depth=4, position=position, shared_position=shared).eval()
    longer = model.generate(TOKENS, 3, temperature=0)
    torch.testing.assert_close(longer[:, -1], model(longer[:, :-1])[:, -1].argmax(dim=-1))
    grown = model.grow(18, model.growth()[0])
    assert grown(TOKENS.repeat(1, 3)).shape == (1, 18, 7)
    grown.save_pretrained(tmp_path / "saved")
    loaded = LanguageModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded(TOKENS), grown(TOKENS), rtol=0, atol=0)
    assert kinds(loaded) == kinds(model)


def test_each_layer_has_its_base() -> None:
    """Gemma 3: five layers of base 10,000, then one of 1,000,000; as a tuple, and as a function of the layer."""

    def position(site: Site) -> RotaryEmbedding:
        assert site.layer is not None
        return RotaryEmbedding(site.head_dim, base=1e6 if site.layer % 6 == 5 else 1e4)

    gemma = (*[RotaryChoice(1e4)] * 5, RotaryChoice(1e6))
    for choice in (gemma, position):
        bases = [layer.parts()[0].base for layer in text(depth=7, position=choice).attention_position]
        assert bases == [1e4] * 5 + [1e6, 1e4]


def test_all_entries_say_by_which_rules_they_grow() -> None:
    model = image(depth=3, position="rope~swin")
    assert model.growth() == ("interpolated", "clipped")
    tables = [one for one in model.grow((12, 16), "interpolated").modules() if isinstance(one, RelativePositionBias)]
    assert [one.sizes for one in tables] == [(6, 8)]
    with pytest.raises(ValueError, match=r"it has interpolated, clipped\); got 'yarn'"):
        model.grow((12, 16), "yarn")


@pytest.mark.parametrize(
    ("position", "line"),
    [
        ("rope~~none", "a position in each entry of a schedule; got 'rope~~none'. Write none for a layer without"),
        ("rope~nonne", "got 'nonne'. Did you mean 'none'?"),
        ("rope~t5~none", "1 to 2 entries in a schedule over 2 layers; got 3 in 'rotary_1d~t5~none'. Shorten it,"),
        ((), "1 to 2 entries in a schedule over 2 layers; got 0."),
        (("rope~t5", RotaryChoice()), "a position in each entry of a schedule; got 'rotary_1d~t5'. Write one schedule"),
        ("rope~learned", "a position on tokens in a schedule's first entry; got LearnedPositionEmbedding in entry 1"),
    ],
)
def test_wrong_schedules_are_one_line(position: Any, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        text(position=position)
    assert line in str(caught.value)


def test_swin_refuses_a_schedule() -> None:
    with pytest.raises(
        ValueError, match="one position for all layers of SwinTransformer; got the schedule 'alibi~none'"
    ):
        SwinTransformer(32, 2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, position="alibi~none")
