"""Settings that no parameter tells travel with the weights: compared, refused by name, and read from whatever file."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

import relpos
from relpos import Grid, LanguageModel, RotaryEmbedding, Sequence, Site
from relpos.models import RotaryChoice
from relpos.position import find, presets
from relpos.position.base.saved_settings import ENTRY, encoded, is_settings

HEADS, WIDTH = 2, 8

# what is saved, and what differs

DIFFERENT = [  # what is built here, what was saved, and what of that is said
    ("ALiBi(2)", "ALiBi(2, distance='manhattan')", "distance='manhattan'"),
    ("ALiBi(2, learned=True)", "ALiBi(2, learned=True, distance='manhattan')", "distance="),
    ("ALiBi(2)", "ALiBi(4)", r"slopes=\(0\.25, 0\.0625, 0\.0"),
    (
        "DisentangledPosition(2, 8, 16, span=8, max_distance=32)",
        "DisentangledPosition(2, 8, 16, span=8, max_distance=64)", "max_distance=64",
    ),
    (
        "DisentangledPosition(2, 8, 16, span=8, max_distance=None)",
        "DisentangledPosition(4, 4, 16, span=8, max_distance=None)", "num_heads=4",
    ),
    ("FIREBias(2)", "FIREBias(2, threshold=64)", "threshold=64"),
    (
        "ImageRelativePosition(1, 8, method='rows')", "ImageRelativePosition(1, 8, method='columns', ratio=1.8)",
        "method='columns', ratio=1.8",
    ),
    ("Kerple(2)", "Kerple(2, 'power')", "kernel='power'"),
    ("LogContinuousBias(2, (4, 4))", "LogContinuousBias(2, (4, 8))", r"window_size=\(4, 8\)"),
    (
        "MultimodalRotary(16, (2, 3, 3))",
        "MultimodalRotary(16, (4, 2, 2), order='interleaved', base=1e4, layout='interleaved')",
        r"sections=\(4, 2, 2\), order='interleaved', base=10000, layout='interleaved'",
    ),
    ("RelativePositionBias(2, (8, 8))", "RelativePositionBias(2, (5, 13))", r"window_size=\(5, 13\)"),  # as many rows
    (
        "RotaryEmbedding(8)", "RotaryEmbedding(8, axes=2, base=5e5, layout='interleaved', rotary_dim=4)",
        "axes=2, base=500000, layout='interleaved', rotary_dim=4",
    ),
    ("RotaryEmbedding(8, trained_length=16)", "RotaryEmbedding(8, trained_length=32)", "trained_length=32"),
    (
        "RotaryEmbedding(8, scaling=DynamicNTK(1.0, 16))", "RotaryEmbedding(8, scaling=DynamicNTK(1.0, 32))",
        r"scaling=DynamicNTK\(factor=1, trained_length=32\)",
    ),
    (
        "RotaryEmbedding(4, scaling=LongRoPE((1.0, 1.0), (2.0, 4.0), 16, 2.0))",
        "RotaryEmbedding(4, scaling=LongRoPE((1.0, 1.0), (2.0, 8.0), 16, 2.0))", r"long_factor=\(2, 8\)",
    ),
    ("CARoPE(2, 8, 16)", "CARoPE(2, 8, 16, layout='interleaved')", "layout='interleaved'"),
    ("RotaryEmbedding(8)", "RotaryEmbedding(8, scaling=halved)", "scaling=halved"),
    (
        "RotaryDINOv3(8)", "RotaryDINOv3(8, base=50.0, periods=(1.0, 9.0), normalize='max', layout='interleaved')",
        r"base=50, periods=\(1, 9\), normalize='max', layout='interleaved'",
    ),
    (
        "RotaryEmbedding(8, scaling=ResonanceScaling(YaRN(4.0, 16)))",
        "RotaryEmbedding(8, scaling=ClippedScaling(16))", r"scaling=ClippedScaling\(trained_length=16",
    ),
    ("ReRoPE(RotaryEmbedding(8), 4)", "ReRoPE(RotaryEmbedding(8), 5)", "window=5"),
    ("SelfExtend(RotaryEmbedding(8), 4, 2)", "SelfExtend(RotaryEmbedding(8), 4, 3)", "group=3"),
    ("DualChunk(RotaryEmbedding(8), 6, 2)", "DualChunk(RotaryEmbedding(8), 6, 1)", "local=1"),
    ("RandomizedPositions(Kerple(2), 8)", "RandomizedPositions(Kerple(2), 9)", "longest=9"),
    ("PolarEmbedding(2, 8)", "PolarEmbedding(2, 8, base=100)", "base=100"),
    ("RotaryMixed(2, 8)", "RotaryMixed(2, 8, layout='half')", "layout='half'"),
    ("Sandwich(2)", "Sandwich(2, width=64, base=100)", "width=64, base=100"),
    (
        "SelectiveRoPE(2, 8, 16)", "SelectiveRoPE(4, 4, 16, base=100, layout='interleaved')",
        "num_heads=4, base=100, layout='interleaved'",
    ),
    (
        "SinusoidalPositionEmbedding(16)", "SinusoidalPositionEmbedding(16, axes=2, base=100, layout='half')",
        "axes=2, base=100, layout='half'",
    ),
    (
        "T5Bias(2)", "T5Bias(2, max_distance=64, bidirectional=False, scaled=True)",
        "max_distance=64, bidirectional=False, scaled=True",
    ),
    (
        "TransformerXLPosition(2, 8, 16)", "TransformerXLPosition(2, 8, 16, layout='interleaved', base=100)",
        "layout='interleaved', base=1",
    ),
    ("TUPEPosition(2, 8, 16, seq_len=4)", "TUPEPosition(4, 4, 16, seq_len=4)", "num_heads=4"),
    ("XPos(8)", "XPos(8, base=1, scale_base=64, gamma=0.5, centre=0)", "base=1, scale_base=64, gamma=0.5, centre=0"),
    ("XPos(8)", "RotaryEmbedding(8)", "scale_base=None, gamma=None"),
]  # fmt: skip


def halved(base: float, pairs: int, length: int) -> tuple[tuple[float, ...], float]:
    """A scaling of a person's own."""
    return (0.5,) * pairs, 1.0


def built(text: str) -> Any:
    return eval(text, {**vars(relpos), "halved": halved})


def refuses(module: nn.Module, weights: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        module.load_state_dict(weights, strict=False)


@pytest.mark.parametrize(("here", "saved", "says"), DIFFERENT)
def test_weights_saved_with_other_settings_are_refused(here: str, saved: str, says: str) -> None:
    own, weights, name = built(here), built(saved).state_dict(), here.partition("(")[0]
    refuses(own, weights, rf"^expected weights of {name} saved with .*; got .*{says}")
    for alike in (here, saved):
        built(alike).load_state_dict(built(alike).state_dict())
    inside = nn.ModuleList([nn.Linear(1, 1), own])
    refuses(inside, {f"1.{key}": x for key, x in weights.items()}, rf"^expected weights of {name} 1 saved with")


WITHOUT = [
    "cable",
    "clipped",
    "cope",
    "decomposed",
    "factored_2d",
    "fox",
    "graphormer",
    "inkling",
    "learned",
    "none",
    "relative_1d",
    "shaw",
]
"""What parameters and their shapes tell."""


@pytest.mark.parametrize("name", presets())
def test_no_more_is_saved_than_has_to_be(name: str) -> None:
    tokens = Grid(3, 3) if 2 in presets()[name].token_axes else Sequence(9)
    mechanism = presets()[name].make(Site(HEADS, WIDTH, HEADS * WIDTH, tokens))
    if "+" not in name:
        own = (key for key in mechanism.state_dict() if is_settings(key))
        saved = [
            key for key in own if not key.startswith(("mechanism.", "rotary."))
        ]  # what a wrapper holds saves its own
        assert saved == ([] if name in [*WITHOUT, "relative_2d"] else [ENTRY])
    for key, x in mechanism.state_dict().items():
        if is_settings(key):
            assert (x.dtype, x.dim(), x.device.type) == (torch.uint8, 1, "cpu")
            again = presets()[name].make(Site(HEADS, WIDTH, HEADS * WIDTH, tokens)).state_dict()[key]
            assert torch.equal(x, again), "the same bytes"


@pytest.mark.parametrize("base", [100, 100.0])
def test_equal_numbers_are_equal_bytes(base: float) -> None:
    entry = RotaryEmbedding(8, base=base).state_dict()[ENTRY]
    assert bytes(entry.tolist()).startswith(b'{"settings":{"axes":1,"base":100,"layout":"half"')


# what to call


def language(context: int = 16, **more: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(16, context, embed_dim=16, depth=2, num_heads=2, **more).eval()


def test_a_context_scaling_is_not_lost() -> None:
    model = language()
    for rule in ("linear", "ntk", "yarn", "llama3"):
        grown = model.grow(128, rule).state_dict()
        told = r"RotaryEmbedding positions\.0\.mechanisms\.0 saved with scaling=None; got scaling=\w+\(factor=8.*"
        refuses(model, grown, rf"{told}\. Call model\.grow\(128, '{rule}'\) before loading\.$")
        model.grow(128, rule).load_state_dict(grown)
    llama = language(position=RotaryChoice(scaling=relpos.YaRN(4.0, 16, beta_fast=16.0)))
    for built, saved, says in (
        (model.grow(128, "yarn"), model, r"got scaling=None\. Load them into the model as it was built, then grow it"),
        (model.grow(128, "ntk"), model.grow(64, "yarn"), r"was before it was grown\. Call model\.grow\(64, 'yarn'\)"),
        (language(64), model, r"Build the model for 16 tokens, load, then grow it from there\.$"),
        (model, llama, r"beta_fast=16.*\. Build it with the saved settings, then load\.$"),
    ):
        refuses(built, saved.state_dict(), says)


def test_a_trained_length_that_nobody_said_is_no_difference() -> None:
    said, unsaid = RotaryEmbedding(8, trained_length=16), RotaryEmbedding(8)
    said.load_state_dict(unsaid.state_dict())
    unsaid.load_state_dict(said.state_dict())


def test_settings_that_were_changed_are_saved_as_they_are() -> None:
    rotary = RotaryEmbedding(8)
    rotary.scaling = relpos.LinearScaling(4.0)
    refuses(RotaryEmbedding(8), rotary.state_dict(), "scaling=LinearScaling")
    alibi = relpos.ALiBi(2)
    alibi.slopes = (0.5, 0.5)
    refuses(relpos.ALiBi(2), alibi.state_dict(), r"got slopes=\(0\.5, 0\.5\)")


# files of before


def before(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, as they were saved when there were no settings."""
    return {name: x for name, x in model.state_dict().items() if not is_settings(name)}


def told_of(call: Callable[[], object]) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(("position", "assign"), [("rotary_1d", True), ("t5", False), ("t5+alibi", True)])
def test_a_file_of_before_loads_with_one_warning(position: str, assign: bool) -> None:
    own, other = (LanguageModel(16, 16, 16, 3, 2, position=position) for _ in range(2))
    for _ in range(2):  # each time
        (said,) = told_of(lambda: other.load_state_dict(before(own), assign=assign))
        assert "positions.0.mechanisms.0 do not record their settings" in said
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in before(own).items())
    assert not told_of(lambda: other.load_state_dict(own.state_dict(), assign=assign))


def test_a_part_of_the_weights_is_no_file_of_before() -> None:
    model = language(position="rotary_1d")
    some = {name: x for name, x in model.state_dict().items() if name.startswith("blocks.1.")}
    assert not told_of(lambda: model.load_state_dict(some, strict=False))
    biased = language(position="t5")
    assert not told_of(lambda: biased.load_state_dict(before(model), strict=False))


def test_what_is_missing_or_unexpected_is_still_said() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"relative_attention_bias\"\. $"):
        relpos.T5Bias(2).load_state_dict({ENTRY: relpos.T5Bias(2).state_dict()[ENTRY]})
    with pytest.raises(RuntimeError, match=rf"Unexpected key\(s\) in state_dict: \"{ENTRY}\""):
        relpos.NoPosition().load_state_dict(RotaryEmbedding(8).state_dict())
    assert relpos.NoPosition().load_state_dict(RotaryEmbedding(8).state_dict(), strict=False).unexpected_keys == [ENTRY]


def test_published_tables_are_no_files_of_before() -> None:
    bias = relpos.RelativePositionBias(2, (2, 3))
    index = bias.relative_position_index
    theirs = {"relative_position_bias_table": torch.randn(15, 2), "relative_position_index": index}
    assert not told_of(lambda: bias.load_state_dict(theirs))
    assert list(relpos.RelativePositionBias(2, (7, 7)).state_dict()) == ["relative_position_bias_table"]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (torch.tensor([1, 2, 3], dtype=torch.uint8), "The weights are damaged"),
        (torch.tensor([], dtype=torch.uint8), "The weights are damaged"),
        (encoded({"base": 1})[:-3], "The weights are damaged"),
        (torch.tensor(list(b'{"settings":{},"version":2}'), dtype=torch.uint8), "got version 2. Load the weights with"),
    ],
    ids=["bytes", "none", "cut", "newer"],
)
def test_settings_that_cannot_be_read(state: Tensor, says: str) -> None:
    refuses(RotaryEmbedding(8), {ENTRY: state}, f"^expected the settings of RotaryEmbedding.*{says}")
    with pytest.raises(ValueError, match="a tensor of bytes"):
        RotaryEmbedding(8).set_extra_state({"base": 1})


def test_terms_from_a_state_dict() -> None:
    own, other = relpos.T5Bias(2), relpos.T5Bias(2)
    found = other.terms_from(own.state_dict(), Sequence(4)).items[0].values  # type: ignore[attr-defined]
    assert torch.equal(found, own.terms(Sequence(4)).items[0].values)  # type: ignore[attr-defined]


# a person's own


class Own(relpos.OffsetBias):
    """With a number that decides what it says."""

    saved_settings = ("power",)

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power, self.slope = power, nn.Parameter(torch.ones(2))

    def bias(self, offsets: relpos.Offsets) -> Tensor:
        return -self.slope[:, None] * offsets.axes[:, 0].abs() ** self.power


class Derived(Own):
    """With one more."""

    saved_settings = ("more",)
    more = 3


class Plain(relpos.OffsetBias):
    """With nothing to save."""

    def bias(self, offsets: relpos.Offsets) -> Tensor:
        return offsets.axes[:, 0].float()[None]


class Its(Plain):
    """That has a state of its own already."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return {"kept": 3}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_a_persons_own_mechanism() -> None:
    refuses(Own(1.0), Own(0.5).state_dict(), r"^expected weights of Own saved with power=1; got power=0\.5\. Build it")
    Own(1.0).load_state_dict(Own(1.0).state_dict())
    refuses(Derived(1.0), Own(0.5).state_dict(), r"saved with power=1, more=3; got power=0\.5, more=None")
    Derived(1.0).load_state_dict(Derived(1.0).state_dict())
    its = Its()
    its.load_state_dict(Its().state_dict())
    assert its.kept == {"kept": 3}
    assert not Plain().state_dict()


# what weights pass through


def both() -> tuple[LanguageModel, LanguageModel]:
    """The same model twice, with a rotation and a bias; with other numbers."""
    return language(position="rotary_1d+t5"), LanguageModel(16, 16, 16, 2, 2, position="rotary_1d+t5").eval()


def _through_torch(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


THROUGH: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "safetensors": lambda state: load(save({name: x.contiguous() for name, x in state.items()})),
    "torch.save": _through_torch,
    "half": lambda state: {name: x.half() for name, x in state.items()},
    "bfloat16": lambda state: {name: x.bfloat16() for name, x in state.items()},
    "a mean of three": lambda state: {name: 3 * (x.float() / 3 * 0.9999999) for name, x in state.items()},
}


@pytest.mark.parametrize("how", THROUGH)
def test_weights_pass_through(how: str) -> None:
    model, other = both()
    other.load_state_dict(THROUGH[how](model.state_dict()))
    refuses(other, THROUGH[how](model.grow(32, "yarn").state_dict()), r"Call model\.grow\(32, 'yarn'\)")


def _averaged_by_timm(model: nn.Module) -> nn.Module:
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(model, decay=0.9)
    ema.update(model)
    return ema.module  # type: ignore[no-any-return]


def _averaged(model: nn.Module) -> nn.Module:
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    again = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    again.load_state_dict(averaged.state_dict())
    return again.module


def _compiled(model: nn.Module) -> nn.Module:
    one, other = (torch.compile(copy.deepcopy(model), backend="eager") for _ in range(2))
    other.load_state_dict(one.state_dict())
    return other._orig_mod  # type: ignore[no-any-return]


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("wrap", [_averaged_by_timm, _averaged, _compiled])
@torch.no_grad()
def test_copies_of_a_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, other = both()
    made = wrap(model)
    other.load_state_dict(made.state_dict())
    for name, x in model.state_dict().items():
        if is_settings(name):
            assert torch.equal(x, made.state_dict()[name])
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(other(tokens), made(tokens))


@pytest.mark.parametrize(("full", "grown"), [(False, False), (True, False), (True, True)])
def test_pytorchs_distributed_checkpoints(full: bool, grown: bool, tmp_path: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as of_models

    model, other = both()
    saved = model.grow(32, "yarn") if grown else model
    options = of_models.StateDictOptions(full_state_dict=full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        checkpoint.save({"model": of_models.get_model_state_dict(saved)}, checkpoint_id=tmp_path)
        state = {"model": of_models.get_model_state_dict(saved)}
        checkpoint.load(state, checkpoint_id=tmp_path)
    if grown:
        with pytest.raises(ValueError, match="Call model"):
            of_models.set_model_state_dict(other, state["model"], options=options)
        return
    of_models.set_model_state_dict(other, state["model"], options=options)
    assert torch.equal(other(torch.arange(12)[None]), model(torch.arange(12)[None]))
    wrapped = torch.compile(language(position="rotary_1d+t5"), backend="eager")
    of_models.set_model_state_dict(wrapped, of_models.get_model_state_dict(model))


@pytest.mark.slow
@pytest.mark.parametrize("hooks", [False, True])
@torch.no_grad()
def test_accelerate_compares(hooks: bool, tmp_path: Path) -> None:
    """That it loads what fits is among the tests of modules on meta."""
    accelerate = pytest.importorskip("accelerate")
    model, other = both()
    grown, changed = model.grow(32, "yarn"), copy.deepcopy(other)
    changed.positions[0].mechanisms[0].base = 20000.0  # as many bytes

    def load_and_call(saved: nn.Module) -> None:
        save_file(saved.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
        more = {"device_map": {"": "cpu"}, "force_hooks": hooks}
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path), **more)
        other(torch.arange(12)[None])

    load_and_call(model)
    assert not [name for name, _ in other.named_buffers() if is_settings(name)]
    with pytest.raises(ValueError, match=ENTRY):  # it compares shapes by itself
        load_and_call(grown)
    with pytest.raises(ValueError, match="saved with base=10000; got base=20000"):
        load_and_call(changed)


def test_a_sum_is_what_its_parts_are() -> None:
    one = find("rotary_1d+t5").make(Site(2, 8, 16, Sequence(9)))
    assert [name for name in one.state_dict() if is_settings(name)] == [f"mechanisms.{part}.{ENTRY}" for part in (0, 1)]
