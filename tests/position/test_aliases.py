"""Names and aliases of mechanisms, what they make, and the constructor that a repr prints."""

import sys
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
from relpos.position import Sum, find, presets
from relpos.position.base import preset as presets_module
from relpos.testing.calls import terms_of_case

FAST_CASES = 80  # of each of its tests, in the fast part

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
    "relative_3d": ("relative_2d", "relative_2d"),
    "xl": ("transformer_xl", "transformer_xl"),
    "disentangled": ("deberta", "deberta"),
    "cpb": ("log_cpb", "log_cpb"),
    "nope": ("none", "none"),
    "polar": ("pope", "pope"),
    "clipped_rope": ("rotary_clipped", "rotary_clipped"),
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
    return [*leaves(terms_of_case(mechanism, tokens)), mechanism.embed(x, tokens)]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def built(text: str) -> Any:
    return eval(text, {**vars(relpos), "Sum": Sum})


@pytest.mark.parametrize(("name", "tokens"), CASES, ids=lambda one: str(one))
@pytest.mark.parametrize("more", [{"init_std": 0.02}, {"init_std": 0.5, "causal": True}], ids=str)
def test_by_name_by_constructor_and_in_a_model_it_is_the_same(name: str, tokens: Coordinates, more: Any) -> None:
    """The constructor is the one that its repr prints. In evaluation: training may draw."""
    torch.manual_seed(0)
    made = create_position(name, num_heads=2, head_dim=16, queries=tokens, **more).eval()
    text = repr(made)
    assert "\n" not in text
    for make in (lambda: built(text), lambda: find(name, tokens.axes).make(Site(2, 16, 32, tokens, **more))):
        torch.manual_seed(0)
        again = make().eval()
        assert type(again) is type(made)
        assert repr(again) == text
        assert same(said(again, tokens), said(made, tokens))


def test_models_take_and_keep_the_name() -> None:
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "num_heads": 2}
    vit = relpos.VisionTransformer(num_classes=3, position="rope+swin", **sizes)
    made = create_position("rope+swin", num_heads=2, head_dim=16, queries=vit.coordinates)
    assert repr(vit.positions[0]) == repr(made)
    assert vit.arguments["position"] == "rotary_2d+relative_2d"
    text = relpos.LanguageModel(vocab_size=8, context=8, embed_dim=16, depth=1, num_heads=2, position="rope+t5")
    assert text.arguments["position"] == "rotary_1d+t5"


def test_what_has_grown_prints_a_constructor_too() -> None:
    longer = RotaryEmbedding(16, trained_length=8).grow(Sequence(32), "yarn")
    assert repr(longer) == "RotaryEmbedding(head_dim=16, scaling=" + repr(relpos.YaRN(4.0, 8)) + ")"
    assert same(leaves(built(repr(longer)).terms(Sequence(32))), leaves(longer.terms(Sequence(32))))
    larger = relpos.RelativePositionBias(2, window_size=(3, 3)).resize((5, 4))
    assert repr(larger) == "RelativePositionBias(num_heads=2, window_size=(5, 4))"
    learned = relpos.LearnedPositionEmbedding(8, seq_len=4).extend(9)
    assert repr(learned) == "LearnedPositionEmbedding(embed_dim=8, seq_len=9)"


@pytest.mark.parametrize(
    "text",
    [
        "ALiBi(num_heads=4, distance='axes', learned=True, num_axes=3)",
        "FIREBias(num_heads=4, hidden_dim=8, c=0.5)",
        "RotaryEmbedding(head_dim=16, rotary_dim=8)",
        "ShawPosition(head_dim=16, values=False)",
        "RelativePositionBias(num_heads=4, seq_len=8, beyond='clip')",
        "DisentangledPosition(num_heads=2, head_dim=8, embed_dim=16, max_distance=None, p2c=False)",
        "XPos(head_dim=16, rotary_dim=8, centre=3)",
        "ImageRelativePosition(num_heads=4, head_dim=None, method='rows')",
        "Sum([NoPosition()])",
        "Sum([])",
    ],
)
def test_arguments_that_are_not_usual_are_printed(text: str) -> None:
    assert repr(built(text)) == text


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


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias: str) -> None:
    on_sequences, on_grids = ALIASES[alias]
    assert find(alias).name == find(alias.title(), 1).name == on_sequences
    assert find(alias, 2).name == on_grids
    assert find(f"{alias}+T5", 2).name == f"{on_grids}+t5"


def test_every_alias_is_tested() -> None:
    assert {alias for preset in presets().values() for alias in preset.aliases} == set(ALIASES)


def test_a_sum_of_aliases_is_the_preset_of_their_names() -> None:
    assert find("abs+swin") is presets()["learned+relative_2d"]
    assert find("rope+beit", 2) is presets()["rotary_2d+relative_2d"]


def test_what_is_near_is_named() -> None:
    with pytest.raises(ValueError, match=r"got 'sinkos'\. Did you mean 'sincos'\?"):
        find("sinkos")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "swin", "aliases": ()}, "'swin' is a preset and an alias of the preset 'relative_2d'"),
        ({"name": "mine", "aliases": ("rope",)}, "'rotary_1d' and 'mine' both have the alias 'rope'"),
    ],
)
def test_a_module_with_a_name_that_is_taken(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = presets_module._modules
    extra: Any = types.ModuleType("relpos.position.zz_mine")
    extra.PRESETS = [replace(presets()["none"], **changes)]
    monkeypatch.setitem(sys.modules, extra.__name__, extra)
    monkeypatch.setattr(presets_module, "_modules", lambda path: (*usual(path), "zz_mine"))
    with pytest.raises(ValueError, match=says):
        presets()


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("t5", {"causal": True}, "T5Bias(num_heads=2, bidirectional=False, scaled=True)"),
        ("abs", {"embed_dim": 24}, "LearnedPositionEmbedding(embed_dim=24, seq_len=4)"),
        ("relative_1d", {"keys": Sequence(9)}, "RelativePositionBias(num_heads=2, seq_len=9)"),
        ("rope", {}, "RotaryEmbedding(head_dim=8, trained_length=4)"),
        ("rotary_yarn", {}, "RotaryEmbedding(head_dim=8, trained_length=4, beyond='yarn')"),
        (
            "rope", {"queries": Grid(2, 2)},
            "RotaryEmbedding(head_dim=8, axes=2, base=100.0, layout='interleaved')",
        ),
        (
            "relative_3d", {"queries": Grid(4, 3, 2, prefix=1)},
            "RelativePositionBias(num_heads=2, window_size=(4, 3, 2), prefix=1)",
        ),
        ("rotary_dinov3", {"queries": Grid(2, 2)}, "RotaryDINOv3(head_dim=8)"),
        ("rotary_mixed", {"queries": Grid(2, 2)}, "RotaryMixed(num_heads=2, head_dim=8)"),
        ("xpos", {}, "XPos(head_dim=8)"),
    ],
)  # fmt: skip
def test_settings_of_a_site_are_taken(name: str, settings: dict[str, Any], text: str) -> None:
    made = create_position(name, **{"num_heads": 2, "head_dim": 8, "queries": Sequence(4), **settings})
    assert repr(made) == text


def test_a_mechanism_that_is_not_trained() -> None:
    assert not create_position("t5", num_heads=2, head_dim=8, queries=Sequence(4), trainable=False).trainable
