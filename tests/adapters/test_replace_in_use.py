"""Models whose position was replaced, in use: saved, sent, in half precision, trained."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import gradients
from models_text import text
from replaced_models import ALL, FAMILIES, Family
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import relpos
from loaded import Loaded
from models import models, without_dropout
from relpos.adapters.replacements.repositioned import ReplacedPositions

FAST_CASES = 2  # of each of its tests, in the fast part


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@torch.no_grad()
def test_half_precision_is_no_further_off_than_published(family: Family) -> None:
    exact = family.called(family.published())
    for dtype in (torch.bfloat16, torch.float16):
        theirs, ours = (family.called(model.to(dtype)) for model in (family.published(), family.same()))
        assert ours.dtype == theirs.dtype == dtype
        assert torch.isfinite(ours).all()
        assert float((ours - exact).norm()) <= 1.2 * float((theirs - exact).norm())
        assert not torch.equal(family.called(family.replaced().to(dtype)), ours)


def test_autocast_is_no_further_off_than_published(family: Family) -> None:
    exact = family.called(family.published())
    found = []
    for model in (family.published(), family.same(), family.replaced()):
        with torch.autocast("cpu", torch.bfloat16):  # each its own: while it lasts it keeps weights by where they lie
            found.append(family.called(model.float()))
    theirs, ours, out = found
    assert ours.dtype == theirs.dtype
    assert float((ours - exact).detach().norm()) <= 1.2 * float((theirs - exact).detach().norm())
    learned = [x for name, x in gradients(out.float(), model).items() if "positions." in name]
    assert learned
    assert all(x.dtype == torch.float32 and bool(torch.isfinite(x).all()) for x in learned)


def _checkpointed(model: Any, *, reentrant: bool) -> None:
    """The model's own checkpoints; PyTorch's encoder has none, and gets one per layer."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and model.main_input_name == "input_ids":
            model.enable_input_require_grads()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        for layer in model.layers:
            layer.forward = partial(_layer, layer.forward, reentrant)
    without_dropout(model)


def _layer(forward: Any, reentrant: bool, x: Tensor, **named: Any) -> Any:
    return checkpoint(partial(forward, **named), x, use_reentrant=reentrant)


def _gradients_by_backward(out: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Reentrant checkpoints know no other way."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_gradient_checkpointing(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.replaced()
    wanted = gradients(family.called(model), model)
    largest = max(float(x.abs().max()) for x in wanted.values())
    calls: list[str] = []
    sums = ReplacedPositions.sums
    monkeypatch.setattr(ReplacedPositions, "sums", lambda self: calls.append("sums") or sums(self))
    for reentrant in (False, True):
        other = family.replaced()
        if reentrant and hasattr(other, "set_grad_checkpointing"):
            continue  # timm's are not reentrant
        _checkpointed(other, reentrant=reentrant)
        out = family.called(other.train())
        before = len(calls)
        slopes = _gradients_by_backward(out, other)
        assert len(calls) > before, "layers are computed again"
        assert slopes.keys() == wanted.keys()
        for name, gradient in slopes.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-7, atol=1e-9 * largest, msg=name)


@pytest.mark.parametrize("name", ["ViT", "BERT", "GPT-2", "Llama", "T5"])
@torch.no_grad()
def test_weights_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.published().save_pretrained(tmp_path / "published")
    model = family.replaced()
    wanted = family.called(model)
    model.save_pretrained(tmp_path / "own")
    assert (tmp_path / "own/config.json").read_bytes() == (tmp_path / "published/config.json").read_bytes()
    saved = load_file(tmp_path / "own/model.safetensors")
    fresh = type(family.published()).from_pretrained(tmp_path / "own").double().eval()
    relpos.replace_position(fresh, family.position, **family.options)
    assert not torch.allclose(family.called(fresh), wanted)
    positions = {key: x for key, x in saved.items() if "positions." in key}
    assert not fresh.load_state_dict(positions, strict=False).unexpected_keys
    assert positions.keys() == {key for key in fresh.state_dict() if "positions." in key}
    assert torch.equal(family.called(fresh), wanted)


UNPICKLED = """
import pickle, sys
from relpos.adapters.common.libraries import imported
imported("timm"), imported("transformers")
import torch
sys.path.append(sys.argv[2])
for model, inputs, wanted in pickle.load(open(sys.argv[1], "rb")):
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
print("the same")
"""


@pytest.mark.slow
@torch.no_grad()
def test_pickled_models_run_in_a_process_that_has_not_heard_of_them(tmp_path: Path, loaded: Loaded) -> None:
    """Replaced ones, and one that is retrofitted."""
    sent = []
    for family in FAMILIES.values():
        model = family.replaced()
        sent.append((model, family.inputs(), family.called(model)))
    model = models()["t5 encoder, eager"].made()
    relpos.retrofit(model, border=0, verify=False)
    sent.append((model, text(), model(**text())[0]))
    file = tmp_path / "models.pickle"
    file.write_bytes(pickle.dumps(sent))
    done = loaded.run("-c", UNPICKLED, file, Path(__file__).parent, needs=["models"])
    assert done.stdout.strip() == "the same", done.stderr[-2000:]


def _given_weights(model: nn.Module, like: nn.Module) -> None:
    """A model that was built on meta, with the weights of another: assigned, and what its library does not save."""
    model.load_state_dict(like.state_dict(), assign=True)
    for one, other in zip(model.modules(), like.modules(), strict=True):
        for name in one._non_persistent_buffers_set - {"_device_marker"}:
            one._buffers[name] = other._buffers[name]


@pytest.mark.parametrize(
    ("name", "position"),
    [*((name, None) for name in (*FAMILIES, "BEiT, embedded")), ("ViT", "alibi"), ("Llama", "alibi")],
)
@torch.no_grad()
def test_built_on_meta_before(name: str, position: str | None) -> None:
    """With weights of position, and with a mechanism that has none."""
    family = ALL[name]
    own = family.published()
    with torch.device("meta"):
        made = family.published()
    for model in (own, made):
        relpos.replace_position(model, position or family.position, init_std=0.5, **family.options)
    _given_weights(made, own)
    assert torch.equal(family.called(made), family.called(own))
    made.to("cpu")
    relpos.restore(made)
    assert torch.equal(family.called(made), family.called(family.published()))
