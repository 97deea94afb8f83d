"""Wrong uses of `replace_position`: each is one line, and changes nothing in the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from replaced_models import ALL, FAMILIES, bert, encoder, gpt2, hf_vit, llama, own, swin, t5, timm_vit
from torch import nn

import relpos
from models import SMALL, tokens
from relpos import Grid, RelativePositionBias, RotaryEmbedding, Sequence, T5Bias
from relpos.adapters.common import libraries
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped
from relpos.adapters.replacements.finding import reads
from relpos.adapters.replacements.llama import NoRotation

WORDS = torch.arange(6)[None]
TOKENS = torch.randn(3, 7, 32, dtype=torch.float64)
pytestmark = pytest.mark.usefixtures("unchecked")


def refused(
    model: nn.Module, match: str, position: Any = "t5", error: type[Exception] = ValueError, **more: Any
) -> None:
    """One line is raised; the model is what it was."""
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


class _OwnLayer(nn.Linear):
    """A layer of a user's own."""


def _with(model: Any, change: Callable[[Any], None]) -> Any:
    change(model)
    return model


def _another_layer(model: Any) -> None:
    model.transformer.h[1].attn = bert().encoder.layer[0].attention.self


def _a_child_of_this_name(model: Any) -> None:
    model.transformer.positions = nn.Linear(1, 1)


def _a_forward(model: Any) -> None:
    model.blocks[1].attn.forward = lambda x: x


def _asks_for_weights(model: Any) -> None:
    model.config.output_attentions = True


def _roberta() -> nn.Module:
    transformers = imported("transformers")
    model: nn.Module = transformers.RobertaModel(transformers.RobertaConfig(vocab_size=90, **SMALL))
    return model


def case(build: Callable[[], nn.Module], line: str, position: Any = "t5", **options: Any) -> Any:
    """A model, the line that is raised, and what is asked for."""
    return pytest.param(build, line, position, options)


def _parallel(block: str) -> Callable[[], nn.Module]:
    return lambda: timm_vit(block_fn=getattr(imported("timm").models.vision_transformer, block))


AXES = r"position with the axes of the tokens of \w+, which have 1; got '{}'.* list positions"
KNOWN = (
    r"^(?!.*Decoder).*whose attention can be found; got {}\. Known are timm\.Beit, .*torch\.TransformerEncoder, "
    r".*transformers\.T5Stack, .*nn\.MultiheadAttention\.$"
)
SEVEN = Sequence(7)
CASES = [
    # positions that do not fit the tokens, or the heads
    *(case(build, AXES.format("relative_2d"), "relative_2d") for build in (bert, gpt2, llama, t5)),
    case(gpt2, AXES.format(r"relative_1d\+relative_2d"), "relative_1d+relative_2d"),
    case(llama, AXES.format("rotary_2d"), "rotary_2d"),
    case(gpt2, "LineBias values for 4 query heads", lambda site: T5Bias(3)),
    case(llama, "expected heads 16 wide for this Rotation; got 8", lambda site: RotaryEmbedding(16)),
    case(timm_vit, "LineBias values for 4", lambda site: RelativePositionBias(3, window_size=(2, 3), prefix=1)),
    case(gpt2, "coordinates with 2 axes", lambda site: RelativePositionBias(4, window_size=(2, 3))),
    case(swin, "acts in attention for SwinTransformerStage; got learned, which is added", "learned"),
    case(swin, "which is added to tokens", "learned+relative_2d"),
    case(swin, "axes of the tokens of SwinTransformerStage, which have 2; got 'fire', which is for 1", "fire"),
    case(own, "a position that acts in attention for Own; got learned", "learned", coordinates=SEVEN),
    case(own, AXES.format("relative_2d"), "relative_2d", coordinates=SEVEN),
    # what is no position
    case(gpt2, "expected the name of a position; .*relative_1d.*", "relativ_1d"),
    case(gpt2, r"Wrap a finished mechanism as lambda site: mechanism \(with shared=True\)", T5Bias(4)),
    case(gpt2, "position to return a mechanism for a Site; got None", lambda site: None),
    case(gpt2, "init_std to be a number of at least 0; got float -1", "relative_1d", init_std=-1.0),
    # attention that cannot be found, or is of another kind
    *(case(lambda: nn.Linear(2, 2), KNOWN.format("Linear"), position) for position in ("t5", "own")),
    *(case(_roberta, KNOWN.format("RobertaModel"), position) for position in ("t5", "own")),
    case(lambda: nn.TransformerDecoderLayer(32, 4), "an encoder; got TransformerDecoderLayer", coordinates=SEVEN),
    case(
        lambda: nn.Transformer(32, 4, 1, 1, batch_first=True),
        r"an encoder; got TransformerDecoderLayer \(decoder.layers.0\)",
        coordinates=SEVEN,
    ),
    case(
        lambda: _with(gpt2(), _another_layer),
        r"layers of transformers.*GPT2Attention; got transformers.*BertSelfAttention.* not supported",
    ),
    *(
        case(_parallel(block), rf"layers of timm\.layers\.attention\.Attention; got timm\S*\.{block}\.", position)
        for block in ("ParallelThingsBlock", "ParallelScalingBlock", "DiffParallelScalingBlock")
        for position in ("alibi", "own")
    ),
    case(
        lambda: nn.TransformerEncoder(_OwnLayer(8, 8), 2, enable_nested_tensor=False),
        r"layers of torch\S+MultiheadAttention; got \S+OwnLayer\. Other kinds",
        coordinates=SEVEN,
    ),
    case(partial(own, kdim=16), "nn.MultiheadAttention for plain self-attention; got one with kdim", coordinates=SEVEN),
    case(partial(own, add_bias_kv=True), "add_bias_kv", coordinates=SEVEN),
    case(
        lambda: nn.ModuleList([own(), nn.MultiheadAttention(16, 2)]),
        "one size; got 2 heads of width 8, 4 heads of width 8",
        coordinates=SEVEN,
    ),
    # what models say themselves, or do not
    case(encoder, "coordinates, which PyTorch's modules do not hold; got None"),
    case(encoder, "coordinates to be coordinates", coordinates=7),
    case(lambda: timm_vit(patch_drop_rate=0.5), r"keeps all patches; got patch_drop_rate=0\.5\. Build it with 0"),
    case(timm_vit, r"no coordinates, or the model's own Grid\(2, 3, prefix=1\)", coordinates=Grid(3, 2)),
    case(gpt2, r"coordinates of a text, Sequence\(length\); got Grid\(3, 2\)", coordinates=Grid(3, 2)),
    case(gpt2, "causal=False for GPT2Model, which has True. Leave causal out", causal=False),
    case(bert, "causal=True for BertModel, which has False. Leave causal out", causal=True),
    # what is in the way
    case(lambda: _with(gpt2(), _a_child_of_this_name), "without a child named 'positions'; got GPT2Model.*Rename it"),
    case(
        lambda: _with(timm_vit(), _a_forward),
        "whose forward is not overridden; got Attention with its own. Replace before accelerate adds hooks",
    ),
    case(
        lambda: _with(gpt2(attn_implementation="eager"), _asks_for_weights),
        r"returns no attention weights; got config\.output_attentions=True",
    ),
]


@pytest.mark.filterwarnings("ignore:Using a non-tuple")
@pytest.mark.parametrize(("build", "line", "position", "options"), CASES)
def test_what_cannot_be_is_one_line(
    build: Callable[[], nn.Module], line: str, position: Any, options: dict[str, Any]
) -> None:
    refused(build(), line, position, **options)


def test_what_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"expected a model, an nn\.Module; got the class Linear"):
        relpos.replace_position(nn.Linear, "t5")  # type: ignore[arg-type]


def test_one_mechanism_for_all_layers_is_shared_by_name() -> None:
    one = T5Bias(4)
    refused(gpt2(), r"got one object twice\. Pass shared=True to share it", lambda site: one)
    assert relpos.replace_position(gpt2(), lambda site: one, shared=True).shared
    gate = relpos.ForgetGate(4, 32)
    refused(gpt2(), r"got one object twice\. Build a new one in each call: no", lambda site: gate, shared=True)


def test_inside_inference_mode() -> None:
    model = gpt2()
    with torch.inference_mode():
        refused(model, r"outside torch\.inference_mode\(\)", "relative_1d")


def test_tokens_that_a_module_was_not_built_for() -> None:
    model = own()
    relpos.replace_position(model, "relative_2d", coordinates=Grid(2, 3))
    with pytest.raises(ValueError, match=r"expected 6 tokens, for Grid\(2, 3\); got 7"):
        model(TOKENS)
    with pytest.raises(ValueError, match="the same tokens as queries, keys and values"):
        model.layers[0](TOKENS, TOKENS[:, :5], TOKENS[:, :5])


@pytest.mark.parametrize("name", ["GPT-2", "T5", "timm ViT", "Swin", "PyTorch"])
def test_a_model_that_relpos_has_changed(name: str) -> None:
    model = FAMILIES[name].published()
    relpos.replace_position(model, "alibi", **FAMILIES[name].options)
    for position in ("t5", "own", None):
        refused(model, r"an unchanged model; got one that relpos has already changed\. Call relpos\.restore", position)
    with pytest.raises(
        ValueError, match=r"(already relpos's, by replace_position|which has no known relative position)"
    ):
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


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_another_implementation_of_attention(implementation: str) -> None:
    line = rf'sdpa or eager; got {implementation}\. Load the model with attn_implementation="sdpa"'
    for model in (gpt2(), hf_vit()):
        model.config._attn_implementation_internal = implementation
        refused(model, line, "alibi")


def test_a_configuration_that_another_model_has_too() -> None:
    first = gpt2()
    second = type(first)(first.config)
    relpos.replace_position(first, "relative_1d", init_std=0.5)
    wanted = first(tokens(3, 12)).logits
    refused(second, r"shares its configuration.*Build it with copy\.deepcopy\(config\)")
    assert torch.equal(first(tokens(3, 12)).logits, wanted)
    relpos.restore(first)
    relpos.replace_position(second, "t5")


def test_a_failure_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last module of Llama to be changed fails; those before it are what they were."""

    def broken(self: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(NoRotation, "make_mechanism", broken)
    refused(llama(), "planted", "relative_1d", error=RuntimeError)


METHODS = {
    "VisionTransformer._pos_embed": "timm ViT",
    "VisionTransformer.forward_features": "timm ViT",
    "Attention.forward": "timm ViT",
    "ViTEmbeddings.forward": "ViT",
    "ViTAttention.forward": "ViT",
    "Beit.forward_features": "BEiT",
    "WindowAttention.forward": "Swin",
    "BertEmbeddings.forward": "BERT",
    "BertSelfAttention.forward": "BERT",
    "GPT2Model.forward": "GPT-2",
    "GPT2Attention.forward": "GPT-2",
    "LlamaModel.forward": "Llama",
    "LlamaAttention.forward": "Llama",
    "LlamaRotaryEmbedding.forward": "Llama",
    "T5Stack.forward": "T5",
    "T5Attention.forward": "T5",
}


@pytest.mark.parametrize("method", METHODS)
def test_another_source(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ALL[METHODS[method]].published()
    name, _, function = method.partition(".")
    owner = next(kind for module in model.modules() for kind in type(module).__mro__ if kind.__name__ == name)
    right = getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda self, *args, **kwargs: right(self, *args, **kwargs))
    library = r"(?:timm|transformers) \d+\.\d+\.\d+"
    line = rf"a tested version of the library; got .*{method} of {library} differs .*\({library}\).* pass force=True"
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
            assert any(f"{owner}.{name}" in libraries.known() for owner in (path, path.rpartition(".")[0]))
    own = {path for path in reads() if not path.startswith("torchvision.")}  # see test_replace_torchvision.py
    assert {path.rpartition(".")[2] for path in own} - {"VisionTransformerDistilled"} == {
        name.partition(".")[0] for name in METHODS
    }
