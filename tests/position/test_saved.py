"""Settings that no parameter tells travel with the weights: compared, refused by name, and read from whatever file."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
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
from relpos.position.saved import ENTRY, encoded, is_settings
from relpos.position.sinusoidal import SinusoidalPositionEmbedding

HEADS, WIDTH = 2, 8

# what is saved, and what differs

DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "ALiBi, distance": (
        lambda: relpos.ALiBi(2), lambda: relpos.ALiBi(2, distance="manhattan"), "distance='manhattan'",
    ),
    "ALiBi, learned": (
        lambda: relpos.ALiBi(2, learned=True), lambda: relpos.ALiBi(2, learned=True, distance="manhattan"), "distance=",
    ),
    "ALiBi, heads": (lambda: relpos.ALiBi(2), lambda: relpos.ALiBi(4), r"slopes=\(0\.25, 0\.0625, 0\.0"),
    "DeBERTa, buckets": (
        lambda: relpos.DisentangledPosition(2, 8, 16, span=8, max_distance=32),
        lambda: relpos.DisentangledPosition(2, 8, 16, span=8, max_distance=64), "max_distance=64",
    ),
    "DeBERTa, heads": (
        lambda: relpos.DisentangledPosition(2, 8, 16, span=8, max_distance=None),
        lambda: relpos.DisentangledPosition(4, 4, 16, span=8, max_distance=None), "num_heads=4",
    ),
    "FIRE": (lambda: relpos.FIREBias(2), lambda: relpos.FIREBias(2, threshold=64), "threshold=64"),
    "iRPE, method": (
        lambda: relpos.ImageRelativePosition(1, 8, method="rows"),
        lambda: relpos.ImageRelativePosition(1, 8, method="columns"), "method='columns'",
    ),
    "iRPE, ratio": (
        lambda: relpos.ImageRelativePosition(1, 8), lambda: relpos.ImageRelativePosition(1, 8, ratio=1.8), "ratio=1.8",
    ),
    "KERPLE": (lambda: relpos.Kerple(2), lambda: relpos.Kerple(2, "power"), "kernel='power'"),
    "log-spaced": (
        lambda: relpos.LogContinuousBias(2, (4, 4)), lambda: relpos.LogContinuousBias(2, (4, 8)),
        r"window_size=\(4, 8\)",
    ),
    "multimodal, sections": (
        lambda: relpos.MultimodalRotary(16, (2, 3, 3)), lambda: relpos.MultimodalRotary(16, (4, 2, 2)),
        r"sections=\(4, 2, 2\)",
    ),
    "multimodal, order, base, layout": (
        lambda: relpos.MultimodalRotary(16, (4, 2, 2)),
        lambda: relpos.MultimodalRotary(16, (4, 2, 2), order="interleaved", base=1e4, layout="interleaved"),
        "order='interleaved', base=10000, layout='interleaved'",
    ),
    "a window on its side": (
        lambda: relpos.RelativePositionBias(2, (2, 3)), lambda: relpos.RelativePositionBias(2, (3, 2)),
        r"window_size=\(3, 2\)",
    ),
    "a square window": (  # as many offsets
        lambda: relpos.RelativePositionBias(2, (8, 8)), lambda: relpos.RelativePositionBias(2, (5, 13)),
        r"window_size=\(5, 13\)",
    ),
    "rotation, base and layout": (
        lambda: RotaryEmbedding(8), lambda: RotaryEmbedding(8, base=5e5, layout="interleaved"),
        "base=500000, layout='interleaved'",
    ),
    "rotation, axes": (lambda: RotaryEmbedding(8), lambda: RotaryEmbedding(8, axes=2), "axes=2"),
    "rotation, width": (lambda: RotaryEmbedding(8), lambda: RotaryEmbedding(8, rotary_dim=4), "rotary_dim=4"),
    "rotation, length": (
        lambda: RotaryEmbedding(8, trained_length=16), lambda: RotaryEmbedding(8, trained_length=32),
        "trained_length=32",
    ),
    "rotation, its scaling's length": (
        lambda: RotaryEmbedding(8, scaling=relpos.DynamicNTK(1.0, 16)),
        lambda: RotaryEmbedding(8, scaling=relpos.DynamicNTK(1.0, 32)),
        r"scaling=DynamicNTK\(factor=1, trained_length=32\)",
    ),
    "rotation, lists": (
        lambda: RotaryEmbedding(4, scaling=relpos.LongRoPE((1.0, 1.0), (2.0, 4.0), 16, 2.0)),
        lambda: RotaryEmbedding(4, scaling=relpos.LongRoPE((1.0, 1.0), (2.0, 8.0), 16, 2.0)),
        r"long_factor=\(2, 8\)",
    ),
    "rotation, a function": (lambda: RotaryEmbedding(8), lambda: RotaryEmbedding(8, scaling=halved), "scaling=halved"),
    "mixed": (
        lambda: relpos.RotaryMixed(2, 8), lambda: relpos.RotaryMixed(2, 8, layout="half"), "layout='half'",
    ),
    "Sandwich": (lambda: relpos.Sandwich(2), lambda: relpos.Sandwich(2, width=64, base=100), "width=64, base=100"),
    "sinusoids": (
        lambda: SinusoidalPositionEmbedding(16),
        lambda: SinusoidalPositionEmbedding(16, axes=2, base=100, layout="half"), "axes=2, base=100, layout='half'",
    ),
    "T5": (
        lambda: relpos.T5Bias(2), lambda: relpos.T5Bias(2, max_distance=64, bidirectional=False, scaled=True),
        "max_distance=64, bidirectional=False, scaled=True",
    ),
    "Transformer-XL": (
        lambda: relpos.TransformerXLPosition(2, 8, 16),
        lambda: relpos.TransformerXLPosition(2, 8, 16, layout="interleaved", base=100), "layout='interleaved', base=1",
    ),
    "TUPE": (
        lambda: relpos.TUPEPosition(2, 8, 16, seq_len=4), lambda: relpos.TUPEPosition(4, 4, 16, seq_len=4),
        "num_heads=4",
    ),
    "xPos": (
        lambda: relpos.XPos(8), lambda: relpos.XPos(8, base=100, scale_base=64, gamma=0.5, centre=0),
        "base=100, scale_base=64, gamma=0.5, centre=0",
    ),
    "a kind of rotation": (lambda: relpos.XPos(8), lambda: RotaryEmbedding(8), "scale_base=None, gamma=None"),
}  # fmt: skip


def halved(base: float, pairs: int, length: int) -> tuple[tuple[float, ...], float]:
    """A scaling of a person's own."""
    return (0.5,) * pairs, 1.0


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_weights_saved_with_other_settings_are_refused(name: str, assign: bool) -> None:
    make, other, says = DIFFERENT[name]
    here, saved = make(), other()
    with pytest.raises(ValueError, match=rf"^expected weights of {type(here).__name__} saved with .*; got .*{says}"):
        here.load_state_dict(saved.state_dict(), strict=False, assign=assign)
    for alike, weights in ((here, make()), (saved, other())):
        alike.load_state_dict(weights.state_dict(), assign=assign)
    inside = nn.ModuleList([nn.Linear(1, 1), here])
    with pytest.raises(ValueError, match=rf"^expected weights of {type(here).__name__} 1 saved with"):
        inside.load_state_dict({f"1.{key}": x for key, x in saved.state_dict().items()}, strict=False)


WITHOUT = ["clipped", "cope", "decomposed", "factored_2d", "learned", "none", "relative_1d", "shaw"]
"""What parameters and their shapes tell."""


@pytest.mark.parametrize("name", presets())
def test_no_more_is_saved_than_has_to_be(name: str) -> None:
    tokens = Grid(3, 3) if 2 in presets()[name].token_axes else Sequence(9)
    mechanism = presets()[name].make(Site(HEADS, WIDTH, HEADS * WIDTH, tokens))
    if "+" not in name:
        saved = [key for key in mechanism.state_dict() if is_settings(key)]
        assert saved == ([] if name in [*WITHOUT, "relative_2d"] else [ENTRY])
    for key, x in mechanism.state_dict().items():
        if is_settings(key):
            assert (x.dtype, x.dim(), x.device.type) == (torch.uint8, 1, "cpu")
            again = presets()[name].make(Site(HEADS, WIDTH, HEADS * WIDTH, tokens)).state_dict()[key]
            assert torch.equal(x, again), "the same bytes"


def test_equal_numbers_are_equal_bytes() -> None:
    one, other = RotaryEmbedding(8, base=100), RotaryEmbedding(8, base=100.0)
    assert torch.equal(one.state_dict()[ENTRY], other.state_dict()[ENTRY])
    assert bytes(one.state_dict()[ENTRY].tolist()).startswith(b'{"settings":{"axes":1,"base":100,"layout":"half"')


# what to call


def language(context: int = 16, **more: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(16, context, embed_dim=16, depth=2, num_heads=2, **more).eval()


def test_a_context_scaling_is_not_lost() -> None:
    model, rule = language(), ("linear", "ntk", "yarn", "llama3")
    for one in rule:
        grown = model.grow(128, one).state_dict()
        told = r"RotaryEmbedding positions\.0\.mechanisms\.0 saved with scaling=None; got scaling=\w+\(factor=8.*"
        with pytest.raises(ValueError, match=rf"{told}\. Call model\.grow\(128, '{one}'\) before loading\.$"):
            model.load_state_dict(grown)
        model.grow(128, one).load_state_dict(grown)
    with pytest.raises(ValueError, match=r"got scaling=None\. Load them into the model as it was built, then grow it"):
        model.grow(128, "yarn").load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"was before it was grown\. Call model\.grow\(64, 'yarn'\) before loading\.$"):
        model.grow(128, "ntk").load_state_dict(model.grow(64, "yarn").state_dict())
    with pytest.raises(ValueError, match=r"Build the model for 16 tokens, load, then grow it from there\.$"):
        language(64).load_state_dict(model.state_dict())
    llama = language(position=RotaryChoice(scaling=relpos.YaRN(4.0, 16, beta_fast=16.0)))
    with pytest.raises(ValueError, match=r"beta_fast=16.*\. Build it with the saved settings, then load\.$"):
        model.load_state_dict(llama.state_dict())
    assert not torch.equal(model.grow(128, "yarn")(torch.arange(12)[None]), model(torch.arange(12)[None]))


def test_a_trained_length_that_nobody_said_is_no_difference() -> None:
    said, unsaid = RotaryEmbedding(8, trained_length=16), RotaryEmbedding(8)
    said.load_state_dict(unsaid.state_dict())
    unsaid.load_state_dict(said.state_dict())


def test_settings_that_were_changed_are_saved_as_they_are() -> None:
    rotary = RotaryEmbedding(8)
    rotary.scaling = relpos.LinearScaling(4.0)
    with pytest.raises(ValueError, match="scaling=LinearScaling"):
        RotaryEmbedding(8).load_state_dict(rotary.state_dict())
    alibi = relpos.ALiBi(2)
    alibi.slopes = (0.5, 0.5)
    with pytest.raises(ValueError, match=r"got slopes=\(0\.5, 0\.5\)"):
        relpos.ALiBi(2).load_state_dict(alibi.state_dict())


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


@pytest.mark.parametrize("position", ["rotary_1d", "t5", "t5+alibi", "xpos"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_file_of_before_loads_with_one_warning(position: str, assign: bool) -> None:
    own, other = (LanguageModel(16, 16, 16, 3, 2, position=position) for _ in range(2))
    for _ in range(2):  # each time
        (said,) = told_of(lambda: other.load_state_dict(before(own), assign=assign))
        assert "positions.0.mechanisms.0 do not say with which settings they were saved" in said
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
    theirs = {
        "relative_position_bias_table": torch.randn(15, 2),
        "relative_position_index": bias.relative_position_index,
    }
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
    with pytest.raises(ValueError, match=f"^expected the settings of RotaryEmbedding.*{says}"):
        RotaryEmbedding(8).load_state_dict({ENTRY: state})
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


class Its(relpos.OffsetBias):
    """That has a state of its own already."""

    kept: Any = None

    def bias(self, offsets: relpos.Offsets) -> Tensor:
        return offsets.axes[:, 0].float()[None]

    def get_extra_state(self) -> Any:
        return {"kept": 3}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_a_persons_own_mechanism() -> None:
    with pytest.raises(ValueError, match=r"^expected weights of Own saved with power=1; got power=0\.5\. Build it"):
        Own(1.0).load_state_dict(Own(0.5).state_dict())
    Own(1.0).load_state_dict(Own(1.0).state_dict())
    with pytest.raises(ValueError, match=r"saved with power=1, more=3; got power=0\.5, more=None"):
        Derived(1.0).load_state_dict(Own(0.5).state_dict())
    Derived(1.0).load_state_dict(Derived(1.0).state_dict())
    its = Its()
    its.load_state_dict(Its().state_dict())
    assert its.kept == {"kept": 3}

    class Plain(relpos.OffsetBias):
        def bias(self, offsets: relpos.Offsets) -> Tensor:
            return offsets.axes[:, 0].float()[None]

    assert not Plain().state_dict()


# what weights pass through


def both() -> tuple[LanguageModel, LanguageModel]:
    """The same model twice, with a rotation and a bias; with other numbers."""
    return language(position="rotary_1d+t5"), LanguageModel(16, 16, 16, 2, 2, position="rotary_1d+t5").eval()


def _through_safetensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return load(save({name: x.contiguous() for name, x in state.items()}))


def _through_torch(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


THROUGH: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "safetensors": _through_safetensors,
    "torch.save": _through_torch,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "half": lambda state: {name: x.half() for name, x in state.items()},
    "bfloat16": lambda state: {name: x.bfloat16() for name, x in state.items()},
    "clones": lambda state: {name: x.detach().cpu().clone().contiguous() for name, x in state.items()},
    "floats": lambda state: {name: x.double() for name, x in state.items()},
    "a mean of three": lambda state: {name: 3 * (x.float() / 3 * 0.9999999) for name, x in state.items()},
}


@pytest.mark.parametrize("how", THROUGH)
def test_weights_pass_through(how: str) -> None:
    model, other = both()
    other.load_state_dict(THROUGH[how](model.state_dict()))
    with pytest.raises(ValueError, match=r"Call model\.grow\(32, 'yarn'\)"):
        other.load_state_dict(THROUGH[how](model.grow(32, "yarn").state_dict()))


def _timm_v2(model: nn.Module) -> nn.Module:
    from timm.utils import ModelEmaV2

    ema = ModelEmaV2(model, decay=0.9)
    ema.update(model)
    return ema.module  # type: ignore[no-any-return]


def _timm_v3(model: nn.Module) -> nn.Module:
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
@pytest.mark.parametrize("wrap", [_timm_v2, _timm_v3, _averaged, _compiled, copy.deepcopy])
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


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("full", [False, True])
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
@pytest.mark.parametrize("on_meta", [False, True])
@torch.no_grad()
def test_accelerate_compares(hooks: bool, on_meta: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, other = both()
    as_it_was = copy.deepcopy(other)
    with torch.device("meta" if on_meta else "cpu"):
        third = LanguageModel(16, 16, 16, 2, 2, position="rotary_1d+t5").eval()
    for name, one in (("as it was", model), ("grown", model.grow(32, "yarn")), ("changed", as_it_was)):
        (tmp_path / name).mkdir()
        if name == "changed":  # as many bytes
            one.positions[0].mechanisms[0].base = 20000.0
        save_file(one.state_dict(), tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    more = {"device_map": {"": "cpu"}, "force_hooks": hooks}
    accelerate.load_checkpoint_and_dispatch(third, str(tmp_path / "as it was"), **more)
    torch.testing.assert_close(third(torch.arange(12)[None]), model(torch.arange(12)[None]))
    assert not [name for name, _ in third.named_buffers() if is_settings(name)]
    with pytest.raises(ValueError, match=ENTRY):  # it compares shapes by itself
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path / "grown"), **more)

    def changed() -> None:
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path / "changed"), **more)
        other(torch.arange(12)[None])

    with pytest.raises(ValueError, match="saved with base=10000; got base=20000"):
        changed()


def test_a_sum_is_what_its_parts_are() -> None:
    one = find("rotary_1d+t5").make(Site(2, 8, 16, Sequence(9)))
    assert [name for name in one.state_dict() if is_settings(name)] == [f"mechanisms.{part}.{ENTRY}" for part in (0, 1)]
