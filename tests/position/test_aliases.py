"""Names and aliases of mechanisms, what they make, and the constructor that a repr prints."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import relpos
from relpos import Grid, Mechanism, RotaryEmbedding, Sequence, Site, create_position
from relpos.core import Coordinates
from relpos.position import Preset, Sum, find, presets
from relpos.position import preset as presets_module

TOKENS: dict[int, tuple[Coordinates, ...]] = {
    1: (Sequence(9), Sequence(9, start=3, prefix=1)),
    2: (Grid(3, 4), Grid(3, 4, prefix=2)),
}
SUMS = ["t5+rotary_1d", "learned+relative_2d+alibi", "tupe+t5", "fire+cope", "xl+abs"]
ALIASES = {
    "rope": ("rotary_1d", "rotary_2d"),
    "absolute": ("learned", "learned"),
    "abs": ("learned", "learned"),
    "sincos": ("sinusoidal_1d", "sinusoidal_2d"),
    "swin": ("relative_2d", "relative_2d"),
    "beit": ("relative_2d", "relative_2d"),
    "xl": ("transformer_xl", "transformer_xl"),
    "disentangled": ("deberta", "deberta"),
    "cpb": ("log_cpb", "log_cpb"),
    "nope": ("none", "none"),
}
CASES = [
    (name, tokens)
    for name in [*presets(), *SUMS]
    for axes in TOKENS
    for tokens in TOKENS[axes]
    if axes in find(name, axes).token_axes
]


def said(mechanism: Mechanism, tokens: Coordinates) -> list[Any]:
    """All numbers that a mechanism says, in attention and on tokens of width 32."""
    x = torch.zeros(1, tokens.count, 32)
    return [*leaves(mechanism.terms(tokens)), mechanism.embed(x, tokens)]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("name", "tokens"), CASES, ids=lambda one: str(one))
@pytest.mark.parametrize("init_std", [0.02, 0.5])
def test_the_repr_is_the_constructor(name: str, tokens: Coordinates, init_std: float) -> None:
    torch.manual_seed(0)
    made = create_position(name, num_heads=2, head_dim=16, queries=tokens, init_std=init_std)
    text = repr(made)
    assert "\n" not in text
    torch.manual_seed(0)
    again = eval(text, dict(vars(relpos)))
    assert type(again) is type(made)
    assert repr(again) == text
    assert same(said(again, tokens), said(made, tokens))


@pytest.mark.parametrize(("name", "tokens"), CASES, ids=lambda one: str(one))
def test_it_is_what_a_model_of_that_name_has(name: str, tokens: Coordinates) -> None:
    torch.manual_seed(0)
    made = create_position(name, num_heads=2, head_dim=16, queries=tokens, causal=True, init_std=0.5)
    torch.manual_seed(0)
    usual = find(name, tokens.axes).make(Site(2, 16, 32, tokens, causal=True, init_std=0.5))
    assert repr(usual) == repr(made)
    assert same(said(usual, tokens), said(made, tokens))


def test_a_model_and_create_position_make_the_same() -> None:
    model = relpos.VisionTransformer(
        img_size=8, patch_size=2, embed_dim=32, depth=1, num_heads=2, num_classes=3, position="rope+swin"
    )
    made = create_position("rope+swin", num_heads=2, head_dim=16, queries=model.coordinates)
    assert repr(model.positions[0]) == repr(made)


def test_what_has_grown_prints_a_constructor_too() -> None:
    longer = RotaryEmbedding(16, trained_length=8).grow(Sequence(32), "yarn")
    assert repr(longer) == "RotaryEmbedding(head_dim=16, scaling=" + repr(relpos.YaRN(4.0, 8)) + ")"
    assert same(leaves(eval(repr(longer), dict(vars(relpos))).terms(Sequence(32))), leaves(longer.terms(Sequence(32))))
    larger = relpos.RelativePositionBias(2, window_size=(3, 3)).resize((5, 4))
    assert repr(larger) == "RelativePositionBias(num_heads=2, window_size=(5, 4))"
    learned = relpos.LearnedPositionEmbedding(8, seq_len=4).extend(9)
    assert repr(learned) == "LearnedPositionEmbedding(embed_dim=8, seq_len=9)"


def test_arguments_that_are_not_usual_are_printed() -> None:
    for text in (
        "ALiBi(num_heads=4, distance='axes', learned=True, num_axes=3)",
        "FIREBias(num_heads=4, hidden_dim=8, c=0.5)",
        "RotaryEmbedding(head_dim=16, rotary_dim=8)",
        "ShawPosition(head_dim=16, values=False)",
        "RelativePositionBias(num_heads=4, seq_len=8, beyond='clip')",
        "DisentangledPosition(num_heads=2, head_dim=8, embed_dim=16, max_distance=None, p2c=False)",
        "XPos(head_dim=16, rotary_dim=8, centre=3)",
        "ImageRelativePosition(num_heads=4, head_dim=None, method='rows')",
    ):
        assert repr(eval(text, dict(vars(relpos)))) == text


def test_what_a_trained_fire_prints_is_what_it_started_from() -> None:
    fire = relpos.FIREBias(2)
    with torch.no_grad():
        fire.c.fill_(9.0)
    assert repr(fire) == "FIREBias(num_heads=2)"


def test_an_argument_that_is_not_kept_shows() -> None:
    class Forgetful(Mechanism):
        def __init__(self, num_heads: int, rate: float = 1.0) -> None:
            super().__init__()

    assert repr(Forgetful(3)) == "Forgetful(num_heads=..., rate=...)"


def test_sums_of_one_print_that_they_are_sums() -> None:
    assert repr(Sum([relpos.NoPosition()])) == "Sum([NoPosition()])"
    assert repr(Sum([])) == "Sum([])"


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias: str) -> None:
    on_sequences, on_grids = ALIASES[alias]
    assert find(alias).name == on_sequences
    assert find(alias, 1).name == on_sequences
    assert find(alias, 2).name == on_grids
    assert find(f"{alias}+t5", 2).name == f"{on_grids}+t5"


def test_every_alias_is_tested() -> None:
    assert {alias for preset in presets().values() for alias in preset.aliases} == set(ALIASES)


def test_a_sum_of_aliases_is_the_preset_of_their_names() -> None:
    assert find("abs+swin") is presets()["learned+relative_2d"]
    assert find("rope+beit", 2) is presets()["rotary_2d+relative_2d"]


def test_models_keep_the_name() -> None:
    vit = relpos.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3, position="sincos"
    )
    assert vit.arguments["position"] == "sinusoidal_2d"
    text = relpos.LanguageModel(vocab_size=8, context=8, embed_dim=16, depth=1, num_heads=2, position="rope+t5")
    assert text.arguments["position"] == "rotary_1d+t5"


def test_what_is_near_is_named_with_the_difference() -> None:
    with pytest.raises(ValueError, match=r"got 'music'\. The nearest is 'shaw': the vectors of Music Transformer"):
        find("music")
    with pytest.raises(ValueError, match=r"got 'sinkos'\. Did you mean 'sincos'\?"):
        find("sinkos")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that adds a module with a preset to those of relpos."""
    usual = presets_module.pkgutil.iter_modules

    def add(module: str, preset: Preset) -> None:
        extra = types.ModuleType(f"relpos.position.{module}")
        extra.PRESETS = [preset]  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, f"relpos.position.{module}", extra)
        info = types.SimpleNamespace(name=module)
        monkeypatch.setattr(presets_module.pkgutil, "iter_modules", lambda path: [*usual(path), info])

    return add


def test_a_preset_with_the_name_of_an_alias(others: Any) -> None:
    others("zz_mine", replace(presets()["none"], name="swin", aliases=()))
    with pytest.raises(ValueError, match="'swin' is a preset and an alias of the preset 'relative_2d'"):
        presets()


def test_two_modules_with_one_alias(others: Any) -> None:
    others("zz_mine", replace(presets()["none"], name="mine", aliases=("rope",)))
    with pytest.raises(ValueError, match="'rotary_1d' and 'mine' both have the alias 'rope'"):
        presets()


def test_what_makes_no_sense_there_is_refused() -> None:
    with pytest.raises(ValueError, match="expected tokens with 2 axes for relative_2d; got Sequence"):
        create_position("swin", num_heads=2, head_dim=8, queries=Sequence(4))
    with pytest.raises(ValueError, match="expected tokens with 1 axis for fire"):
        create_position("fire", num_heads=2, head_dim=8, queries=Grid(4, 4))


def test_settings_of_a_site_are_taken() -> None:
    made = create_position("t5", num_heads=2, head_dim=8, queries=Sequence(4), causal=True, trainable=False)
    assert repr(made) == "T5Bias(num_heads=2, bidirectional=False, scaled=True)"
    assert not made.trainable
    wide = create_position("abs", num_heads=2, head_dim=8, queries=Sequence(4), embed_dim=24)
    assert repr(wide) == "LearnedPositionEmbedding(embed_dim=24, seq_len=4)"
    cross = create_position("relative_1d", num_heads=2, head_dim=8, queries=Sequence(4), keys=Sequence(9))
    assert repr(cross) == "RelativePositionBias(num_heads=2, seq_len=9)"


def test_capitals_are_no_other_name() -> None:
    assert relpos.position.find("RoPE").name == "rotary_1d"
    assert relpos.position.find("T5+RoPE").name == "t5+rotary_1d"
