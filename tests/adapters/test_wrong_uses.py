"""Wrong uses of a retrofit: each is one line, and changes nothing."""

import copy
import re
from collections.abc import Callable
from typing import Any

import models_toolkits
import pytest
import torch
from models_text import T5, writer
from torch import nn
from torch.nn.utils import prune

import relpos
from models import models, tokens
from relpos.adapters.common import interface, libraries
from relpos.adapters.common.kinds import kinds
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped
from relpos.adapters.common.verification import Verdict
from relpos.adapters.retrofitting import _require_agreement


def _refused(model: Any, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        relpos.retrofit(model, **options)
    assert "\n" not in str(caught.value)
    if isinstance(model, nn.Module):
        assert not any(map(is_swapped, model.modules()))


def _on_meta() -> Any:
    with torch.device("meta"):
        return writer()


def _with_a_forward() -> Any:
    model = writer()
    model.encoder.block[0].layer[0].SelfAttention.forward = lambda *args, **kwargs: None
    return model


def _with_flex_attention() -> Any:
    model = writer()
    model.encoder.config._attn_implementation_internal = "flex_attention"
    return model


def _of_local_attention() -> Any:
    transformers = imported("transformers")
    return transformers.LongT5EncoderModel(transformers.LongT5Config(**T5, local_radius=4))


CASES: list[tuple[Callable[[], Any], str, dict[str, Any]]] = [
    (lambda: "t5-small", "expected a model, an nn.Module; got str", {}),
    (lambda: nn.Linear(2, 2), r"got Linear, which has no known relative position\. Known: .*t5", {}),
    (writer, "border to be an integer of at least 0", {"border": -1}),
    *((writer, "verify to be True or False", {"verify": flag}) for flag in (1, None, "yes")),
    *((writer, "force to be True or False", {"force": flag}) for flag in (1, None, "yes")),
    (_with_flex_attention, 'Load the model with attn_implementation="sdpa"', {}),
    (_of_local_attention, "LongT5LocalAttention: it attends within blocks", {}),
    (_on_meta, r"shared\.weight on the meta device.*verify=False", {}),
    (_with_a_forward, "Retrofit before accelerate adds hooks", {}),
    (lambda: writer(relative_attention_num_buckets=31), "num_buckets to be a multiple of", {}),
    (
        lambda: models()["deberta_v2"].made(torch.float32).encoder.layer,
        r"expected a module that can be verified.*Pass the encoder or the model",
        {},
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("build", "line", "options"), CASES)
def test_what_cannot_be_is_one_line(build: Callable[[], Any], line: str, options: dict[str, Any]) -> None:
    _refused(build(), line, **options)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_model_to_restore() -> None:
    with pytest.raises(ValueError, match="expected a model"):
        relpos.restore(None)  # type: ignore[arg-type]


def test_inside_inference_mode() -> None:
    model = writer()
    with torch.inference_mode():
        _refused(model, r"a retrofit outside torch\.inference_mode")


def test_twice() -> None:
    model = writer()
    relpos.retrofit(model, verify=False)
    with pytest.raises(ValueError, match=r"Call relpos\.restore\(model\) first"):
        relpos.retrofit(model)
    relpos.restore(model)
    relpos.restore(model)
    relpos.retrofit(model, verify=False)


def test_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    model = writer()
    monkeypatch.setattr(libraries, "known", dict)
    _refused(model, r"T5Attention\.forward.* of transformers 5\.\d+\.\d+ differs from the source tested")
    report = relpos.retrofit(model, force=True, verify=False)
    assert report.verified, "force verifies all the same"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *(("t5", function) for function in interface.READS),
        ("t5", "transformers.models.t5.modeling_t5.eager_attention_forward"),
        ("beit", "transformers.masking_utils.create_bidirectional_mask"),
        ("speecht5", "transformers.masking_utils._preprocess_mask_arguments"),
        ("vits", "transformers.masking_utils._preprocess_mask_arguments"),
        ("nemotron_asr_streaming", "transformers.masking_utils.create_bidirectional_mask"),
        ("parakeet", "transformers.utils.output_capturing.capture_outputs"),
        ("parakeet", "transformers.utils.generic.merge_with_config_defaults"),
    ],
)
def test_another_source_of_what_models_share(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models()[name].made(torch.float32)
    file, _, own = function.rpartition(".")
    version = r"transformers 5\.\d+\.\d+"
    line = rf"{re.escape(function)} of {version} differs from the source tested \({version}\)"
    monkeypatch.setattr(imported(file), own, lambda *args, **kwargs: None)
    _refused(model, line)
    if "eager" not in own:  # which a file may lack, as it has no such function of its own
        monkeypatch.delattr(imported(file), own)
        _refused(model, line)


def test_another_source_that_a_model_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models()["swin"].made(torch.float32)
    monkeypatch.setattr(imported("transformers.masking_utils"), "sdpa_mask", lambda: None)
    assert relpos.retrofit(model, border=0, verify=False).replaced


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(libraries, "imported", broken)
    with pytest.raises(ValueError, match=r"transformers, importable; got RuntimeError.*relpos\[hf\].*torchvision"):
        libraries.require_importable("transformers")


@pytest.mark.parametrize(
    ("version", "ends"),
    [
        ("2.13.0+cpu", "torchvision==0.28.* --index-url https://download.pytorch.org/whl/cpu"),
        ("2.10.1+cu130", "torchvision==0.25.* --index-url https://download.pytorch.org/whl/cu130"),
        ("2.13.0", "torchvision==0.28.*"),
        ("2.14.0a0+git1234", "torchvision==0.29.*"),
    ],
)
def test_the_command_that_mends_torchvision(version: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert libraries.torchvision_command().endswith(f"--no-deps {ends}")
    monkeypatch.setattr(libraries, "_REGISTERED", [])
    assert libraries.note_on_torchvision() is None
    monkeypatch.setattr(libraries, "_REGISTERED", [object()])
    note = libraries.note_on_torchvision()
    assert note is not None
    assert note.endswith(f"To mend it: {libraries.torchvision_command()}")
    assert len(note.splitlines()) == 1


def test_every_model_of_the_tests_has_a_row_and_every_row_a_model() -> None:
    rows = {one.architecture for kind in kinds() for one in kind.replaced}
    toolkits = (model.name for model in models_toolkits.MODELS if model.name != "chronos bolt")  # T5's
    named = (name.split(",")[0].removesuffix(" encoder") for name in (*models(), *toolkits))
    shown = {name.removeprefix("timm ").removeprefix("torchvision ").removeprefix("monai ") for name in named}
    assert shown == rows


def test_a_configuration_that_a_retrofitted_model_shares() -> None:
    transformers = imported("transformers")
    config = transformers.T5Config(**T5)
    first, second = transformers.T5EncoderModel(config), transformers.T5EncoderModel(config)
    relpos.retrofit(first, border=0, verify=False)
    _refused(second, r"Build it with copy\.deepcopy\(config\)")
    relpos.restore(second)
    assert first(tokens(1, 20))[0].shape == (1, 20, 32)
    third = transformers.T5EncoderModel(copy.deepcopy(config))  # the remedy
    relpos.retrofit(third, border=0, verify=False)
    relpos.restore(third)
    assert third.config._attn_implementation == "sdpa"


def test_a_configuration_of_a_retrofitted_falcon() -> None:
    """Its layers are found by what the configuration selects."""
    transformers = imported("transformers")
    model = models()["falcon"].made(torch.float32)
    relpos.retrofit(model, verify=False)
    with pytest.raises(ValueError, match="expected a configuration not used by a retrofitted model"):
        transformers.FalconForCausalLM(model.config)
    other = transformers.FalconForCausalLM(copy.deepcopy(model.config))  # the remedy
    assert other.config._attn_implementation == "sdpa"
    relpos.restore(model)
    assert transformers.FalconForCausalLM(model.config) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in models().items() if "alike" not in model.tags])
@torch.no_grad()
def test_built_on_meta_and_given_weights_after_the_retrofit(name: str) -> None:
    model = models()[name]
    own = model.made()
    wanted = model.called(own)
    made = model.made().to("meta")
    relpos.retrofit(made, border=0, verify=False)
    made.load_state_dict(own.state_dict(), assign=True)
    for one, other in zip(made.modules(), own.modules(), strict=True):  # what its library does not save
        one._buffers.update({key: other._buffers[key] for key in one._non_persistent_buffers_set})
    for out, theirs in zip(model.called(made), wanted, strict=True):
        torch.testing.assert_close(out, theirs, rtol=0, atol=max(model.exact, 1e-6) * float(theirs.abs().max()))


def test_what_cannot_be_run_is_no_difference() -> None:
    model = writer()
    prune.l1_unstructured(model.encoder.block[0].layer[0].SelfAttention.q, "weight", amount=0.2)
    with pytest.raises(RuntimeError, match=r"it could not run, RuntimeError.*restored\. verify=False retrofits it"):
        relpos.retrofit(model)
    relpos.retrofit(model, verify=False)


def test_a_difference_is_not_to_be_passed_over() -> None:
    """Where one module could not be run, and another came out wrong, `verify=False` is no remedy."""
    found = [Verdict("first", "T5", fault="it could not be run", ran=False), Verdict("second", "T5", fault="it is off")]
    with pytest.raises(RuntimeError, match=r"it could not be run; .*it is off") as caught:
        _require_agreement(found)
    assert "verify=False" not in str(caught.value)
    with pytest.raises(RuntimeError, match="verify=False retrofits it unverified"):
        _require_agreement(found[:1])


def test_a_forward_that_came_after_the_retrofit() -> None:
    """accelerate's mixed precision sets one, which would outlive the class that it belongs to."""
    model = models()["parakeet"].made(torch.float32)
    relpos.retrofit(model, verify=False)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"got the model, whose forward is\. Take accelerate's off first"):
        relpos.restore(model)
    assert is_swapped(model)
    del model.forward
    relpos.restore(model)
    assert not is_swapped(model)
