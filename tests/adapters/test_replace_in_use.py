"""Models whose position was replaced, in use: saved, sent, compiled, in half precision, in two processes, trained."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from replaced import gradients
from replaced_models import FAMILIES, Family
from safetensors.torch import load_file
from test_replace_windows import beit_of_all
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import relpos
from loaded import Loaded
from relpos.adapters.replacement.placed import ReplacedPositions

FAST_CASES = 2  # of each of its tests, in the fast part
pytestmark = pytest.mark.usefixtures("timm")
OF_TRANSFORMERS = ["ViT", "BERT", "GPT-2", "Llama", "T5"]
KNOWING = [name for name, family in FAMILIES.items() if family.own is not None]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_a_mechanism_that_says_what_the_model_knew_changes_nothing(family: Family) -> None:
    """What the comparisons below stand on; rotations of transformers are float32."""
    out, wanted = family.called(family.same()), family.called(family.published())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(family.called(family.replaced()), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_no_further_off_than_published(family: Family, dtype: torch.dtype) -> None:
    exact = family.called(family.published())
    theirs, ours = (family.called(model.to(dtype)) for model in (family.published(), family.same()))
    assert ours.dtype == theirs.dtype == dtype
    assert torch.isfinite(ours).all()
    assert float((ours - exact).norm()) <= 1.2 * float((theirs - exact).norm())
    assert not torch.equal(family.called(family.replaced().to(dtype)), ours)


def test_autocast_is_no_further_off_than_published(family: Family) -> None:
    exact = family.called(family.published())
    found = []
    for model in (family.published(), family.same()):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(family.called(model.float()))
    theirs, ours = found
    assert ours.dtype == theirs.dtype
    assert float((ours - exact).detach().norm()) <= 1.2 * float((theirs - exact).detach().norm())
    model = family.replaced().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = family.called(model)
    slopes = gradients(out.float(), model)
    learned = [x for name, x in slopes.items() if "positions." in name]
    assert learned
    assert all(x.dtype == torch.float32 and bool(torch.isfinite(x).all()) for x in learned)


def _checkpointed(model: Any, *, reentrant: bool) -> None:
    """The model's own checkpoints; PyTorch's encoder has none, and gets one a layer."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and model.main_input_name == "input_ids":
            model.enable_input_require_grads()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        for layer in model.layers:
            layer.forward = partial(_layer, layer.forward, reentrant)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _layer(forward: Any, reentrant: bool, x: Tensor, **named: Any) -> Any:
    return checkpoint(partial(forward, **named), x, use_reentrant=reentrant)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family: Family, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = family.replaced(), family.replaced()
    wanted = gradients(family.called(model), model)
    calls: list[str] = []
    terms = ReplacedPositions.sums
    monkeypatch.setattr(ReplacedPositions, "sums", lambda self: calls.append("sums") or terms(self))
    _checkpointed(other, reentrant=reentrant)
    out = family.called(other.train())
    before = len(calls)
    slopes = gradients_backward(out, other)
    assert len(calls) > before, "layers are computed again"
    assert slopes.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, gradient in slopes.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-7, atol=1e-9 * largest, msg=name)


def gradients_backward(out: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """As `gradients`, by `backward`: reentrant checkpoints know no other way."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
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


@torch.no_grad()
def test_copies_have_mechanisms_of_their_own(family: Family) -> None:
    model = family.replaced()
    wanted = family.called(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(family.called(other), wanted)
        for name, x in other.named_parameters():
            if "positions." in name:
                x.add_(torch.randn_like(x))
        assert not torch.allclose(family.called(other), wanted)
        assert torch.equal(family.called(model), wanted)


RUN = """
import pickle, sys
sys.path[:0] = {path!r}
from relpos.adapters.libraries import imported
imported("timm"), imported("transformers")
import torch
{body}
"""

UNPICKLED = """
for model, inputs, wanted in pickle.load(open({file!r}, "rb")):
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
print("the same")
"""


def _in_a_process_of_its_own(body: str, loaded: Loaded) -> str:
    done = loaded.run("-c", RUN.format(path=[str(Path(__file__).parent)], body=body), needs=["compiler", "models"])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
@torch.no_grad()
def test_pickled_models_run_in_a_process_that_has_not_heard_of_them(tmp_path: Path, loaded: Loaded) -> None:
    sent = []
    for family in FAMILIES.values():
        model = family.replaced()
        sent.append((model, family.inputs(), family.called(model)))
    file = tmp_path / "models.pickle"
    file.write_bytes(pickle.dumps(sent))
    assert _in_a_process_of_its_own(UNPICKLED.format(file=str(file)), loaded) == "the same"


COMPILED = """
import warnings
from dataclasses import replace
from functools import partial
import relpos
from relpos.adapters.libraries import imported
from replaced_models import FAMILIES

LORA = {"Llama": "q_proj", "PyTorch": "linear1"}
TO_THE_END = ("timm ViT", "T5", "PyTorch")  # others are traced alone: most of the time is the compiler's
ONE_LAYER = {
    "timm ViT": {"depth": 1}, "BERT": {"num_hidden_layers": 1}, "GPT-2": {"n_layer": 1},
    "Llama": {"num_hidden_layers": 1},
}

def slopes(model, out):
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

def compare(name, family):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = family.replaced().float()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # torch below 2.13 does not trace how transformers makes one
    eager = family.called(model)
    backend = "aot_eager" if name in TO_THE_END else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    own = family.called(compiled)
    assert float((own - eager).detach().abs().max()) <= 1e-4 * float(eager.detach().abs().max())
    wanted, came = slopes(model, eager), slopes(model, own)
    assert wanted.keys() <= came.keys() and any("positions." in name for name in wanted)
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in came.items():  # the compiler gives zeros to what the call leaves out
        assert float((x - wanted.get(name, 0)).abs().max()) <= 1e-4 * largest, name
    assert sum(torch._dynamo.utils.counters["stats"].values()) > 0

def beside_lora(family, target):
    # wrapped by PEFT it compiles; frozen at its start it warns while it is compiled, once
    peft, compiled = imported("peft"), partial(torch.compile, fullgraph=True, backend="eager")
    wrapped = peft.LoraConfig(target_modules=[target], modules_to_save=["positions"])
    model = peft.get_peft_model(family.replaced(), wrapped).float().eval()
    torch.testing.assert_close(family.called(compiled(model)), family.called(model), rtol=1e-4, atol=1e-4)
    model = family.published()
    relpos.replace_position(model, family.position, **family.options)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target])).float().train()
    step = compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            family.called(step)
    assert sum("frozen at its start" in str(one.message) for one in caught) == 1, [str(one.message) for one in caught]

for name, family in FAMILIES.items():
    family = replace(family, build=partial(family.build, **ONE_LAYER.get(name, {})))
    try:
        compare(name, family)
        if name in LORA:
            beside_lora(family, LORA[name])
        print("ok", name)
    except Exception as error:
        print("FAILED", name, repr(error)[-800:])
"""


@pytest.mark.traced
@pytest.mark.slow
def test_models_compile_as_one_graph(loaded: Loaded) -> None:
    """Outputs and gradients are those without the compiler; `fullgraph` raises where a graph breaks. All in one
    process, which loads their libraries once."""
    assert _in_a_process_of_its_own(COMPILED, loaded).splitlines() == [f"ok {name}" for name in FAMILIES]


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path, loaded: Loaded) -> None:
    script = Path(__file__).with_name("replaced_ranks.py")
    done = loaded.run(script, tmp_path, processes=2, needs=["models"])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("world") == 2
        assert found.keys() == FAMILIES.keys()
        for name, (apart, learned) in found.items():
            assert apart < 1e-9, name
            assert learned, name


def _given_weights(model: nn.Module, like: nn.Module) -> None:
    """A model that was built on meta, with the weights of another: assigned, and what its library does not save."""
    model.load_state_dict(like.state_dict(), assign=True)
    for one, other in zip(model.modules(), like.modules(), strict=True):
        for name in one._non_persistent_buffers_set - {"_here"}:
            one._buffers[name] = other._buffers[name]


@pytest.mark.parametrize("position", [None, "alibi"], ids=["weights", "no weights"])
@pytest.mark.parametrize("name", [*FAMILIES, "BEiT, embedded"])
@torch.no_grad()
def test_built_on_meta_before(name: str, position: str | None) -> None:
    family = FAMILIES[name] if name in FAMILIES else dataclasses.replace(FAMILIES["BEiT"], build=beit_of_all)
    options = {"init_std": 0.5, **family.options}
    own = family.published()
    with torch.device("meta"):
        made = family.published()
    for model in (own, made):
        relpos.replace_position(model, position or family.position, **options)
    _given_weights(made, own)
    assert torch.equal(family.called(made), family.called(own))
    made.to("cpu")
    relpos.restore(made)
    assert torch.equal(family.called(made), family.called(family.published()))
