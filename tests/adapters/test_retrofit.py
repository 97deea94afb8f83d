"""Retrofitted models of other libraries: the published outputs and gradients, and nothing else changed."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from models import Model, assert_same, models, step, without_dropout
from relpos.adapters.common import retrofitted
from relpos.adapters.common.grids import cached_lines
from relpos.adapters.common.kinds import path_of, verified_classes
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, published_class, route, swap
from relpos.core import AxisVectors, DenseBias, Grid, IndexedBias, LineBias, LineVectors, Sinks, Terms

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 4  # of each of its tests, in the fast part
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`:FutureWarning",
    "ignore:None of the inputs have requires_grad",  # nested checkpoints: the inner one first runs without
)
DISTINCT = [name for name, model in models().items() if "alike" not in model.tags]


@pytest.fixture(params=DISTINCT)
def model(request: pytest.FixtureRequest) -> Model:
    """A model whose mixin no model before it has in the same way."""
    return models()[request.param]


@pytest.mark.parametrize("name", models())
def test_outputs_and_gradients_are_the_published_ones_and_restore_undoes_all(name: str) -> None:
    model = models()[name]
    module = model.made()
    before = {key: x.clone() for key, x in module.state_dict().items()}
    classes = [type(one) for one in module.modules()]
    published = step(model, module)
    state = torch.get_rng_state()
    report = relpos.retrofit(module, border=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.replaced
    assert report.verified
    assert all(verdict.fault is None for verdict in report.verified)
    _require_verified(module)
    assert_same(step(model, module), published, model.exact)
    assert [type(one).__name__ for one in module.modules()] == [one.__name__ for one in classes]
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], x) for key, x in before.items())
    relpos.restore(module)
    assert [type(one) for one in module.modules()] == classes
    again = model.called(module)
    assert all(torch.equal(x, y) for x, y in zip(again, published[0], strict=True))


def _require_verified(model: nn.Module) -> None:
    """Whatever is replaced is within a module that is verified."""
    verified = {
        id(part)
        for one in model.modules()
        if path_of(published_class(one)) in verified_classes()
        for part in one.modules()
    }
    replaced = {path: one for path, one in model.named_modules() if is_swapped(one)}
    assert replaced
    assert [path for path, one in replaced.items() if id(one) not in verified] == []


def test_copies_and_short_calls(model: Model) -> None:
    """A copy and a pickled one are retrofitted; calls of few tokens run as published."""
    module = model.made(torch.float32)
    published = model.called(module)
    relpos.retrofit(module, border=0, verify=False)
    wanted = model.called(module)
    others = [copy.deepcopy(module)]
    if "no pickle" not in model.tags:  # PyTorch refuses parametrized modules
        file = io.BytesIO()
        pickle.dump(module, file)
        others.append(pickle.loads(file.getvalue()))
    for other in others:
        assert sum(map(is_swapped, other.modules())) == sum(map(is_swapped, module.modules()))
        assert all(torch.equal(x, y) for x, y in zip(model.called(other), wanted, strict=True))
    for one in filter(is_swapped, module.modules()):
        route(one).border = 10_000  # asked for at once, it would leave small windows alone
    assert all(torch.equal(x, y) for x, y in zip(model.called(module), published, strict=True))
    relpos.restore(module)
    if "windows" in model.tags:
        with pytest.raises(ValueError, match=r"windows of .* tokens run as fast as published"):
            relpos.retrofit(module, border=10_000, verify=False)


CHECKPOINTED = [
    "t5", "umt5", "switch_transformers", "pix2struct", "mpnet", "udop", "deberta_v2", "deberta", "sew_d", "bloom",
    "mpt", "falcon", "layoutlmv3", "parakeet", "nemotron_asr_streaming", "wav2vec2_conformer", "seamless_m4t_v2",
    "speecht5", "vits", "wavlm", "beit, one table for all layers", "data2vec-vision", "timm beit, both tables", "sam",
    "swin",
]  # fmt: skip
"""Those whose layers are handed masks or positions by an encoder, and two others: a verification checkpoints each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing(name: str) -> None:
    model = models()[name]
    module = model.made()
    without_dropout(module)
    published = step(model, module)
    relpos.retrofit(module, border=0, verify=False)
    module.train()
    for one in module.modules():
        if isinstance(one, nn.BatchNorm1d):
            one.eval()  # it has other statistics in training
    for enable in _checkpoints(model, module):
        enable()
        if getattr(module, "main_input_name", None) == "input_ids":  # of images it would need a tensor
            module.enable_input_require_grads()
        assert_same(step(model, module), published, model.exact)


def _checkpoints(model: Model, module: Any) -> list[Callable[[], Any]]:
    """The kinds of checkpoints that a published model has: timm's are not reentrant, and a part of a model has none."""
    if getattr(module, "supports_gradient_checkpointing", False):
        # published, some fail under reentrant ones, or never end: they hand a bias on by keyword
        kinds = [False] if "not reentrant" in model.tags else [True, False]
        return [lambda kind=kind: module.activation_checkpointing_enable({"use_reentrant": kind}) for kind in kinds]
    return [module.set_grad_checkpointing] if hasattr(module, "set_grad_checkpointing") else []


def _damaged(position: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Terms whose learned tensors are changed along heads (first axis) or offsets (last, or rows of vectors)."""
    if not isinstance(position, Terms):
        return position
    if position.of(DenseBias) and len(position) == 1:
        bias = position.of(DenseBias)[0].bias
        return Terms(DenseBias(torch.where(_is_hidden(bias), bias, torch.stack([change(one) for one in bias]))))
    turned = lambda x: change(x.mT).mT  # noqa: E731
    changed: list[Any] = []
    for term in position:
        if isinstance(term, LineBias | IndexedBias):
            term = replace(term, values=change(term.values))
        elif isinstance(term, AxisVectors):
            term = replace(term, vectors=tuple(map(turned, term.vectors)))
        elif isinstance(term, LineVectors):
            term = replace(term, vectors=turned(term.vectors))
        elif isinstance(term, Sinks):
            term = replace(term, logits=change(term.logits))
        changed.append(term)
    return Terms(*changed)


def _change(call: dict[str, Any], change: Callable[[Tensor], Tensor]) -> None:
    """Change the position of a call, or the last components of its keys, where they hold a bias of each key."""
    if "position" in call:
        call["position"] = _damaged(call["position"], change)
    else:
        content, bias = call["k"].split((call["k"].shape[-1] - 8, 8), dim=-1)
        call["k"] = torch.cat((content, torch.stack([change(one) for one in bias.mT]).mT), -1)


def _is_hidden(bias: Tensor) -> Tensor:
    """Where a dense bias holds padding."""
    return bias < -1e30


def _without_padding(call: dict[str, Any]) -> None:
    call["mask"] = None
    dense = call["position"].of(DenseBias) if isinstance(call.get("position"), Terms) else ()
    if dense and len(call["position"]) == 1:
        call["position"] = Terms(DenseBias(dense[0].bias.masked_fill(_is_hidden(dense[0].bias), 0)))


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "off by one": lambda call: _change(call, lambda x: x.roll(1, -1)),
    "sign": lambda call: _change(call, lambda x: -x),
    "head order": lambda call: _change(call, lambda x: x.flip(0)),
    "padding": _without_padding,
}


@pytest.mark.slow  # a verification each
def test_verification_catches_planted_faults(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the position, and one of the mask where there is one; some models have all of them planted."""
    module = model.made(torch.float32)
    faults = [fault for fault in FAULTS if f"no {fault}" not in model.tags]
    if model.name not in ("t5", "deberta_v2", "swin"):
        faults = [faults[0], *(["padding"] if "padding" in faults else [])]
    right = retrofitted.attention
    for fault in faults:

        def wrong(q: Tensor, k: Tensor, v: Tensor, fault: str = fault, **call: Any) -> Any:
            call["k"] = k
            FAULTS[fault](call)
            return right(q, v=v, **call)

        monkeypatch.setattr(retrofitted, "attention", wrong)
        with pytest.raises(RuntimeError, match="The model is restored"):
            relpos.retrofit(module, border=0)
        assert not any(is_swapped(one) for one in module.modules()), fault


@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_gradients_that_are_zero_is_no_difference(seed: int) -> None:
    """That of a key's own bias is: a softmax does not see it. With large weights its rounding is much, either way."""
    model = models()["layoutlmv3"].made(torch.float32)
    torch.manual_seed(seed)
    for x in model.parameters():
        x.data += 0.2 * torch.randn_like(x)
    relpos.retrofit(model, border=0)


@pytest.mark.parametrize("name", ["seggpt", "parakeet, eager", "deberta", "sam"])
def test_a_small_difference_shows_beside_a_softmax_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own rounding there would hide it."""
    right = retrofitted.attention
    monkeypatch.setattr(retrofitted, "attention", lambda *args, **call: right(*args, **call) * (1 + 1e-8))
    with pytest.raises(RuntimeError, match=r"differs by .*e-\d+ in float64"):
        relpos.retrofit(models()[name].made(torch.float32), border=0)


@pytest.mark.parametrize(("side", "stays"), [(8, True), (100, False)])
def test_lines_of_very_many_cells_are_not_kept(side: int, stays: bool) -> None:
    module: Any = nn.Linear(1, 1)
    swap(module, Retrofitted)
    first, again = (cached_lines(module, Grid(side, side), torch.device("cpu")) for _ in range(2))
    assert (first is again) is stays
