"""Weights into a model: all of them or none, one line that says why, and a report."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_published_weights import llama, our_llama, our_swin, our_vit, perturbed, timm_swin, timm_vit
from torch import Tensor, nn

import relpos
from position.widened import in_float64
from relpos.adapters.common.libraries import imported
from relpos.models import RotaryChoice
from relpos.position.base.saved_settings import is_settings, with_settings

FAST_CASES = 6  # of each of its tests, in the fast part

SWIN = {"img_size": 16, "patch_size": 2, "in_chans": 2, "num_classes": 5, "embed_dim": 8, "depths": (1, 1),
        "num_heads": (1, 2), "window_size": 4}  # fmt: skip
Weights = dict[str, Tensor]


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: x for key, x in weights.items() if key != name}


def with_one(name: str, tensor: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: tensor}


def refused(model: nn.Module, source: Any, says: str) -> None:
    """One line, and nothing changed."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=says) as caught:
        relpos.load_weights(model, source)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("theirs", "ours", "change", "says"),
    [
        (timm_vit, our_vit, without("norm.bias"), r"which lacks norm\.bias\. Build"),
        (timm_vit, our_vit, without("pos_embed"), r"lacks positions\.0.*pos_embed"),
        (timm_vit, our_vit, without("cls_token"), r"lacks prefix_tokens"),
        (timm_vit, our_vit, with_one("more", torch.ones(1)), r"which has more\. Build"),
        (timm_vit, lambda: our_vit(depth=1), dict, r"has blocks\.1\.\S+, .* and 9 more"),
        (timm_vit, lambda: our_vit(num_classes=6), dict, r"has head\.\w+ of shape \[5\S*.*, not \[6"),
        (timm_vit, lambda: our_vit(fc_norm=True), dict, r"lacks fc_norm\.weight"),
        (timm_vit, lambda: our_vit(position="rotary_2d"), dict, r"which has pos_embed\. Build"),
        (timm_vit, lambda: our_vit(init_values=1.0), dict, r"lacks blocks\.0\.ls1\.gamma"),
        (timm_vit, our_vit, with_one("norm.bias", torch.ones(24, dtype=torch.long)), r"has norm\.bias in int64"),
        (lambda: timm_swin(1, **SWIN), lambda: our_swin(2, **SWIN), dict, r"lacks stages\.0\.blocks\.0\.attn\.q_bias"),
        (lambda: timm_swin(1, **SWIN), lambda: our_swin(1, **{**SWIN, "window_size": 2}), dict, r"of shape \[49, 1\]"),
        (llama, our_llama, without("model.layers.0.self_attn.k_proj.weight"), r"lacks blocks\.0\.attn\.qkv\.weight"),
        (llama, lambda: our_llama(tie_embeddings=True), dict, r"which has lm_head\.weight"),
        (llama, our_llama, without("lm_head.weight"), r"lacks head\.weight"),
    ],
)  # fmt: skip
def test_half_a_fit_is_refused(theirs: Any, ours: Any, change: Callable[[Weights], Weights], says: str) -> None:
    refused(ours(), change(theirs().state_dict()), says)


@pytest.mark.parametrize("source", [None, 3, {}, {"a": 1}, "nowhere", {1: torch.ones(1)}])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_weights(source: Any) -> None:
    refused(our_vit(), source, r"expected .*; got ")


def test_the_report_says_what_went_where() -> None:
    theirs = llama(tie_word_embeddings=True)
    model = our_llama(tie_embeddings=True)
    report = relpos.load_weights(model, {**theirs.state_dict(), "model.rotary_emb.inv_freq": torch.ones(4)})
    assert report.family == "transformers' Llama"
    assert report.parameters == sum(x.numel() for x in model.parameters())
    qkv = tuple(f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkv")
    assert report.fitted["blocks.1.attn.qkv.weight"] == qkv
    assert set(report.left) == {"lm_head.weight", "model.rotary_emb.inv_freq"}
    said = str(report)
    assert "all loaded" in said
    assert "fitted  blocks.1.attn.qkv.weight <- model.layers.1.self_attn.q_proj.weight + " in said
    assert "left    lm_head.weight: is the token embedding" in said


def test_dtypes_are_the_models() -> None:
    theirs = timm_vit().to(torch.bfloat16)
    model = our_vit()
    relpos.load_weights(model, theirs.state_dict())
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, theirs.head.weight.float())  # type: ignore[union-attr, operator]


def test_our_own_weights() -> None:
    one, other = our_vit(position="learned+relative_2d"), our_vit(position="learned+relative_2d")
    report = relpos.load_weights(other, one.state_dict())
    assert report.family == "relpos"
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


# Files


def test_files_and_folders(tmp_path: Path) -> None:
    weights = timm_vit().state_dict()
    names = sorted(weights)
    halves = [{name: weights[name].contiguous() for name in part} for part in (names[::2], names[1::2])]
    whole = {name: x.contiguous() for name, x in weights.items()}
    for folder in ("whole", "sharded", "older"):
        (tmp_path / folder).mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "sharded" / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save(whole, tmp_path / "older" / "pytorch_model.bin")
    torch.save({"model": whole}, tmp_path / "wrapped.pth")
    for source in ("whole", "sharded", "older", "whole/model.safetensors", "wrapped.pth"):
        model = our_vit()
        relpos.load_weights(model, tmp_path / source)
        assert torch.equal(model.head.weight, weights["head.weight"]), source


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no weights")
    refused(our_vit(), tmp_path, rf"expected weights that can be read without .*; got .*{name}")


class Harmful:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was run",))


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"norm.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    refused(our_vit(), tmp_path, "expected weights that can be read without running code")


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(our_vit(), tmp_path, r"expected a folder with model\.safetensors, .* or pytorch_model\.bin")


# What shapes do not tell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_heads": 8, "num_kv_heads": 4}, r"num_heads 4, not 8; num_kv_heads 2, not 4"),
        ({"norm_eps": 1e-6}, r"norm_eps 1e-05, not 1e-06"),
        ({"norm_eps": None}, r"norm_eps 1e-05, not 1e-06"),
        ({"position": "rotary_1d"}, r"position .*500000\.0.*, not .*10000\.0"),
        ({"embed_scale": None}, r"embed_scale 1\.0, not None"),
    ],
)
def test_settings_that_shapes_do_not_tell_are_held_against_the_folder(
    settings: dict[str, Any], says: str, folder: Path
) -> None:
    right = {"position": RotaryChoice(500000.0)}
    relpos.load_weights(our_llama(**right), folder)
    refused(our_llama(**{**right, **settings}), folder, rf"expected the settings of .*config\.json, which has .*{says}")


@pytest.mark.parametrize("beside", ["", "model.safetensors"])
def test_the_configuration_beside_a_file_is_held_too(beside: str, folder: Path) -> None:
    relpos.load_weights(our_llama(position=RotaryChoice(500000.0)), folder / beside)
    refused(our_llama(), folder / beside, r"expected the settings of .*config\.json, which has position .*500000\.0")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    relpos.load_weights(our_llama(), folder / "other.safetensors")  # of which the configuration may not be


def test_a_configuration_that_cannot_be_read_is_no_reason_to_leave_it_out(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(our_llama(position=RotaryChoice(500000.0)), folder, r"config\.json: 'num_attention_heads'\. Copy it again")


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = our_vit()
    with pytest.raises(
        ValueError, match=r"VisionTransformer that has memory; got one on the device meta\. Build it on"
    ):
        relpos.load_weights(model, timm_vit().state_dict())


def test_a_llama_folder_builds_its_own_model(folder: Path) -> None:
    model = relpos.LanguageModel.from_pretrained(folder)
    theirs = imported("transformers").LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(11, (2, 30))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert not model.training


FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 3.0, 5.0]}
ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0},
    "yarn: all settings": {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.7,
                           "truncate": False},
    "yarn: two magnitudes": {"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn: a magnitude that counts for nothing": {"factor": 4.0, "mscale": 2.0},
    "yarn: no factor": {"factor": None},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
    "proportional: no factor": {"partial_rotary_factor": 0.75},
    "longrope": FACTORS,
    "longrope: a factor of its own": {**FACTORS, "factor": 9.0},
    "longrope: a magnitude": {**FACTORS, "factor": 9.0, "attention_factor": 1.4},
}  # fmt: skip
"""By the rope_type, what a configuration has for it. Of `TRAINED` tokens, where it tells that."""
TRAINED = 16


def written(folder: Path, rope: dict[str, Any], *, older: bool = False, **change: Any) -> None:
    """A rotation into the configuration of a folder, as transformers 5 or as earlier ones write it."""
    config = json.loads((folder / "config.json").read_text())
    own = {**rope, "rope_theta": 5000.0}
    if older:
        del config["rope_parameters"]
        config |= {"rope_theta": own.pop("rope_theta"), "rope_scaling": {**own, "type": own.pop("rope_type")}}
        del config["rope_scaling"]["rope_type"]
    else:
        config["rope_parameters"] = own
    (folder / "config.json").write_text(json.dumps({**config, **change}))


@pytest.mark.parametrize(
    ("name", "written_as"),
    [
        *((name, "now") for name in ROTATIONS),
        *((name, how) for name in ("linear", "dynamic", "yarn", "longrope") for how in ("before", "beside")),
    ],
)
def test_a_llama_folder_turns_as_its_configuration_says(name: str, written_as: str, tmp_path: Path) -> None:
    """At lengths within and beyond what it was trained on, and then at a short one once more."""
    torch.manual_seed(0)
    source = perturbed(llama(), torch.float32)
    source.save_pretrained(tmp_path)  # type: ignore[operator]
    library, kind, trained = imported("transformers"), name.split(":")[0], {"original_max_position_embeddings": TRAINED}
    rope = {"rope_type": kind, **ROTATIONS[name]}
    told = kind not in ("linear", "dynamic")
    if written_as == "beside":  # both names, and the length as Phi-3 has it: these go before the others
        other = {**rope, "rope_theta": 5000.0, **({"original_max_position_embeddings": 8} if told else {})}
        written(tmp_path, {"rope_type": "default"}, rope_scaling=other, **trained)
    else:
        written(tmp_path, {**rope, **(trained if told else {})}, older=written_as == "before")
    ours = relpos.LanguageModel.from_pretrained(tmp_path).double()
    plain = our_llama(position=RotaryChoice(5000.0)).double()
    weights = {name: x for name, x in ours.state_dict().items() if not is_settings(name)}
    plain.load_state_dict(with_settings(plain, weights))  # which are refused with those that they were saved with
    with in_float64(), torch.no_grad():
        theirs = library.LlamaForCausalLM(library.LlamaConfig.from_pretrained(tmp_path)).eval()
        theirs.load_state_dict(source.state_dict())
        texts = [torch.randint(11, (2, length)) for length in (TRAINED - 7, TRAINED, TRAINED + 1, 40, 64, 80, 9)]
        wanted = [theirs(text).logits for text in texts]
    with torch.no_grad():
        for text, logits in zip(texts, wanted, strict=True):
            torch.testing.assert_close(ours(text), logits, rtol=1e-9, atol=1e-9)
        apart = [float((plain(text) - logits).abs().max()) for text, logits in zip(texts, wanted, strict=True)]
    assert max(apart) > 1e-3, "another rotation is seen"
    assert relpos.load_weights(ours, tmp_path)  # whose configuration is held against the model
    ours.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        again = relpos.LanguageModel.from_pretrained(tmp_path / "ours")
        assert torch.equal(again(texts[-2]), ours(texts[-2]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, "expected a Llama with hidden_act = 'silu'; got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = False; got True"),
        ({"head_dim": 16}, "heads as wide as .*; got 16"),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, r"got 'su'\. .* with other angles"),
        ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, r"got 'ntk'\. .* with other angles"),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            r"got 'proportional' \(expected share of at most 1; got 1\.5\)\. relpos\.LanguageModel has no other",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"one rotation for all layers; got full_a"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "transformers' Llama; got .*factor"),
        ({"rope_parameters": {"rope_type": "longrope", **FACTORS, "long_factor": [2.0]}}, "short factors as long"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2, "beta_slow": 2}},
            r"got 'yarn' \(expected beta_slow below beta_fast; got 2 and 2\)\. relpos\.LanguageModel has no other",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0.0}},
            r"factor to be a number above 0; got float 0\.0\)",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "4 factors, one per pair",
        ),
        ({"hidden_size": None}, "expected a configuration of transformers' Llama"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 1\.0; got 0\.5"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor = 1\.0; got 0\.0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 1\.0; got 0\.5\. transformers' own Llama does not compute it",
        ),
        ({"vocab_size": 2**31}, r"expected weights that fit .* of shape \[11, 32\], not \[2147483648, 32\]"),
        ({"vocab_size": 2**62}, r"whose model can be built; got "),
        ({"num_hidden_layers": 2**31}, r"2147483648, but only \d+ weights"),
        ({"intermediate_size": 2**40}, r"expected weights that fit .* of shape "),
    ],
)
def test_a_llama_that_is_not_served_is_named(change: dict[str, Any], says: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=says) as caught:
        relpos.LanguageModel.from_pretrained(folder)
    wrong = re.search("Choose|Did you mean|published|Give|Take", str(caught.value))
    assert not wrong, "who follows it would load other numbers"
