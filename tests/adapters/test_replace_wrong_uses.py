"""Wrong uses of `replace_position`: each is one line, and changes nothing in the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_replace_t5 import t5
from test_replace_text import bert, eager_gpt2, gpt2, llama, states
from test_replace_torch import encoder
from test_replace_vit import PIXELS, timm_vit, transformers_vit
from test_replace_windows import beit, swin
from torch import nn

import relpos
from relpos import Grid, RelativePositionBias, RotaryEmbedding, Sequence, T5Bias
from relpos.adapters import libraries
from relpos.adapters.libraries import imported
from relpos.adapters.replacement.finding import reads
from relpos.adapters.replacement.llama import NoRotation
from relpos.adapters.retrofitted import is_swapped

WORDS = torch.arange(6)[None]
pytestmark = [pytest.mark.usefixtures("timm", "unchecked"), pytest.mark.filterwarnings("ignore:Using a non-tuple")]


def refused(
    model: nn.Module, match: str, position: Any = "t5", error: type[Exception] = ValueError, **more: Any
) -> str:
    """The one line that is raised; the model is what it was."""
    state = {name: x.clone() for name, x in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    learning = [x.requires_grad for x in model.parameters()]
    config = getattr(model, "config", None)
    settings = None if config is None else (config.to_dict(), config._attn_implementation)
    with pytest.raises(error, match=match) as caught:
        relpos.replace_position(model, position, **more)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == classes
    assert [x.requires_grad for x in model.parameters()] == learning
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert config is None or settings == (config.to_dict(), config._attn_implementation)
    return str(caught.value)


@pytest.mark.parametrize("build", [bert, gpt2, llama, t5])
@pytest.mark.parametrize("position", ["relative_2d", "rotary_2d", "relative_1d+relative_2d"])
def test_a_mechanism_of_grids_on_a_text(build: Callable[[], Any], position: str) -> None:
    line = rf"position with the axes of the tokens of \w+, which have 1; got '{re.escape(position)}'.* list positions"
    refused(build(), line, position)


def test_a_mechanism_that_does_not_fit_the_heads() -> None:
    refused(gpt2(), "LineBias values for 4 query heads", lambda site: T5Bias(3))
    refused(llama(), "expected heads 16 wide for this Rotation; got 8", lambda site: RotaryEmbedding(16))
    refused(
        timm_vit(),
        "LineBias values for 4 query heads",
        lambda site: RelativePositionBias(3, window_size=(2, 3), prefix=1),
    )
    refused(gpt2(), "coordinates with 2 axes", lambda site: RelativePositionBias(4, window_size=(2, 3)))


def test_what_is_no_position() -> None:
    one = T5Bias(4)
    refused(gpt2(), "expected a position among .*relative_1d.*", "relativ_1d")
    refused(gpt2(), r"got one object twice\. Pass shared=True to share it", lambda site: one)
    refused(gpt2(), r"Wrap a finished mechanism as lambda site: mechanism \(with shared=True\)", one)
    refused(gpt2(), "position to return a mechanism for a Site; got None", lambda site: None)
    refused(gpt2(), "init_std to be a number of at least 0; got float -1", "relative_1d", init_std=-1.0)
    assert relpos.replace_position(gpt2(), lambda site: one, shared=True).shared


def test_a_model_whose_attention_cannot_be_found() -> None:
    transformers = imported("transformers")
    small = {"vocab_size": 90, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    known = r"Known are timm\.Beit, .*torch\.TransformerEncoder, .*transformers\.T5Stack, .*nn\.MultiheadAttention\.$"
    for model in (
        nn.Linear(2, 2),
        transformers.RobertaModel(transformers.RobertaConfig(intermediate_size=64, **small)),
    ):
        for position in ("t5", "own"):
            line = refused(model, rf"whose attention can be found; got {type(model).__name__}\. {known}", position)
            assert "Decoder" not in line
    with pytest.raises(ValueError, match=r"expected a model, an nn\.Module; got the class Linear"):
        relpos.replace_position(nn.Linear, "t5")  # type: ignore[arg-type]
    refused(nn.TransformerDecoderLayer(32, 4), r"an encoder; got TransformerDecoderLayer", coordinates=Sequence(5))


def test_another_class_of_layers() -> None:
    model = gpt2()
    model.transformer.h[1].attn = bert().encoder.layer[0].attention.self
    refused(model, r"layers of transformers.*GPT2Attention; got transformers.*BertSelfAttention.* not served")


@pytest.mark.parametrize("block", ["ParallelThingsBlock", "ParallelScalingBlock", "DiffParallelScalingBlock"])
@pytest.mark.parametrize("position", ["alibi", "own"])
def test_blocks_without_an_attention_of_their_own(block: str, position: str) -> None:
    model = timm_vit(block_fn=getattr(imported("timm").models.vision_transformer, block))
    refused(model, rf"expected layers of timm\.layers\.attention\.Attention; got timm\S*\.{block}\.", position)


def test_an_encoder_of_layers_of_the_users_own() -> None:
    class OwnLayer(nn.Linear):
        pass

    model = nn.TransformerEncoder(OwnLayer(8, 8), 2, enable_nested_tensor=False)
    refused(model, r"layers of torch\S+MultiheadAttention; got \S+OwnLayer\. Other kinds", coordinates=Sequence(5))


@pytest.mark.parametrize("build", [gpt2, t5, timm_vit, swin, encoder])
def test_a_model_that_relpos_has_changed(build: Callable[[], Any]) -> None:
    options: dict[str, Any] = {"coordinates": Sequence(7)} if build is encoder else {}
    model = build()
    relpos.replace_position(model, "alibi", **options)
    for position in ("t5", "own", None):
        refused(
            model, r"a model as its library has it; got one that relpos has changed\. Call relpos\.restore", position
        )
    with pytest.raises(ValueError, match=r"(is relpos's already, by replace_position|which has none that is known)"):
        relpos.retrofit(model)
    assert any(map(is_swapped, model.modules())), "the first mechanism stays"


def test_a_retrofitted_model_stays_so_after_a_mistake() -> None:
    model = t5()
    relpos.retrofit(model, verify=False, border=0)
    swapped = [type(module) for module in model.modules() if is_swapped(module)]
    wanted = model(input_ids=WORDS, decoder_input_ids=WORDS).logits
    refused(model, "LineBias values for 4 query heads", lambda site: T5Bias(3))
    refused(model, "expected a position with the axes", "relative_2d")
    assert [type(module) for module in model.modules() if is_swapped(module)] == swapped
    assert torch.equal(model(input_ids=WORDS, decoder_input_ids=WORDS).logits, wanted)


@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention"])
def test_another_implementation_of_attention(own: str) -> None:
    for model in (gpt2(), transformers_vit()):
        model.config._attn_implementation_internal = own
        refused(model, rf'sdpa or eager; got {own}\. Load the model with attn_implementation="sdpa"', "alibi")


def test_weights_that_the_configuration_asks_for() -> None:
    model = eager_gpt2()
    model.config.output_attentions = True
    refused(model, r"returns no attention weights; got config\.output_attentions=True")


def test_a_configuration_that_another_model_has_too() -> None:
    transformers = imported("transformers")
    first = gpt2()
    second = transformers.GPT2LMHeadModel(first.config)
    relpos.replace_position(first, "relative_1d", init_std=0.5)
    replaced = states(first)
    refused(second, r"shares its configuration.*Build it with copy\.deepcopy\(config\)")
    assert torch.equal(states(first), replaced)
    relpos.restore(first)
    relpos.replace_position(second, "t5")


def test_what_models_say_themselves() -> None:
    refused(timm_vit(patch_drop_rate=0.5), r"keeps all patches; got patch_drop_rate=0\.5\. Build it with 0", "alibi")
    refused(timm_vit(), r"no coordinates, or the model's own Grid\(2, 3, prefix=1\)", "alibi", coordinates=Grid(3, 2))
    refused(gpt2(), r"coordinates of a text, Sequence\(length\); got Grid\(3, 2\)", coordinates=Grid(3, 2))
    refused(gpt2(), "causal=False for GPT2Model, which has True. Leave causal out", causal=False)
    refused(bert(), "causal=True for BertModel, which has False. Leave causal out", causal=True)


def test_what_is_in_the_way() -> None:
    model = gpt2()
    model.transformer.positions = nn.Linear(1, 1)
    refused(model, "without a child named 'positions'; got GPT2Model, which has one. Rename it")
    model = timm_vit()
    model.blocks[1].attn.forward = lambda x: x
    refused(model, "without a forward of their own; got Attention with one. Replace before accelerate's hooks", "alibi")
    with torch.inference_mode():
        refused(gpt2(), r"outside torch\.inference_mode\(\)", "relative_1d")


def test_a_failure_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last module of Llama to be changed fails; those before it are what they were."""

    def broken(self: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(NoRotation, "mechanism", broken)
    refused(llama(), "planted", "relative_1d", error=RuntimeError)


@pytest.mark.parametrize("build", [timm_vit, transformers_vit, beit])
def test_images_of_another_size(build: Callable[..., Any]) -> None:
    model = build(**({"dynamic_img_size": True} if build is timm_vit else {}))
    relpos.replace_position(model, "relative_2d", init_std=0.5)
    larger = torch.randn(1, 3, 32, 32).double()
    line = r"^expected images of \(2, 3\) patches; got \(4, 4\)\. Build the model for the other size, then replace\.$"
    if build is not transformers_vit:
        with pytest.raises(ValueError, match=line):
            model(larger)
        assert build is beit or model(PIXELS).shape == (2, 5)
    else:
        with pytest.raises(ValueError, match=line):
            model(larger, interpolate_pos_encoding=True)
        assert torch.equal(model(PIXELS, interpolate_pos_encoding=True)[0], model(PIXELS)[0])


@pytest.mark.parametrize("position", ["relative_2d", "learned", "rotary_2d"])
def test_as_many_patches_of_another_grid(position: str) -> None:
    """Their number alone would let them pass."""
    line = r"^expected images of \(2, 3\) patches; got \(3, 2\)\. Build the model for the other size, then replace\.$"
    turned = PIXELS.transpose(2, 3)
    for dynamic in (False, True):
        model = timm_vit(dynamic_img_size=dynamic)
        model.patch_embed.strict_img_size = False
        relpos.replace_position(model, position)
        assert model(PIXELS).shape == (2, 5)
        for call in (model, model.forward_intermediates):
            with pytest.raises(ValueError, match=line):
                call(turned)
        relpos.restore(model)
        assert model(turned).shape == (2, 5)
    model = timm_vit()
    relpos.replace_position(model, position)
    model.set_input_size(img_size=(turned.shape[2], turned.shape[3]))
    with pytest.raises(ValueError, match=line):
        model(turned)


BUILDS: dict[str, Callable[[], Any]] = {
    "VisionTransformer._pos_embed": timm_vit,
    "VisionTransformer.forward_features": timm_vit,
    "Attention.forward": timm_vit,
    "ViTEmbeddings.forward": transformers_vit,
    "ViTAttention.forward": transformers_vit,
    "Beit.forward_features": beit,
    "WindowAttention.forward": swin,
    "BertEmbeddings.forward": bert,
    "BertSelfAttention.forward": bert,
    "GPT2Model.forward": gpt2,
    "GPT2Attention.forward": gpt2,
    "LlamaModel.forward": llama,
    "LlamaAttention.forward": llama,
    "LlamaRotaryEmbedding.forward": llama,
    "T5Stack.forward": t5,
    "T5Attention.forward": t5,
}


@pytest.mark.parametrize("method", BUILDS)
def test_another_source(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BUILDS[method]()
    name, _, own = method.partition(".")
    owner = next(kind for module in model.modules() for kind in type(module).__mro__ if kind.__name__ == name)
    right = getattr(owner, own)
    monkeypatch.setattr(owner, own, lambda self, *args, **kwargs: right(self, *args, **kwargs))
    library = r"(?:timm|transformers) \d+\.\d+\.\d+"
    line = rf"a library whose source was run; got .*{method} of {library} differs .*\({library}\).* pass force=True"
    refused(model, line, "alibi")
    assert relpos.replace_position(model, "alibi", force=True).layers


@pytest.mark.parametrize("function", ["create_causal_mask", "sdpa_mask"])
def test_another_source_of_what_models_share(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported("transformers.masking_utils"), function, lambda *args, **kwargs: None)
    refused(gpt2(), rf"masking_utils\.{function} of transformers .* differs")
    relpos.replace_position(timm_vit(), "alibi")  # which does not use it


def test_every_source_has_a_fingerprint() -> None:
    for path, names in reads().items():
        for name in names:
            assert f"{path}.{name}" in libraries.known()
    assert {path.rpartition(".")[2] for path in reads()} - {"VisionTransformerDistilled"} == {
        name.partition(".")[0] for name in BUILDS
    }
