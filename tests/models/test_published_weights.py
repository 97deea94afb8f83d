"""Models of ours with the weights of published ones: outputs and gradients by name, and all or nothing of a fit."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from parity import agree
from position.widened import in_float64
from relpos.adapters.common.libraries import imported
from relpos.models import RotaryChoice
from relpos.position.base.saved_settings import is_settings

FAST_SHARE = 3  # of its tests, in the fast part
DTYPES = [torch.float64, torch.float32]


@dataclass(frozen=True)
class Pair:
    """A published model and ours.

    Attributes:
        theirs, ours: builders. renamed: patterns from our names of parameters to theirs, written here anew.
        like: the shape of an input; of numbers below `words` where that is given.
        joined: our names whose tensors are several of theirs, one after another.
    """

    oracle: str
    theirs: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    renamed: dict[str, str]
    like: tuple[int, ...]
    words: int = 0
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self, name: str) -> list[str]:
        """Theirs of a parameter of ours."""
        for pattern, several in self.joined.items():
            if match := re.fullmatch(pattern, name):
                return [match.expand(one) for one in several]
        for pattern, theirs in self.renamed.items():
            if match := re.fullmatch(pattern, name):
                return [match.expand(theirs)]
        return [name]


def timm_vit(kind: str = "vision_transformer.VisionTransformer", **settings: Any) -> nn.Module:
    module, name = kind.rsplit(".", 1)
    small = {"img_size": (12, 16), "patch_size": 4, "in_chans": 2, "num_classes": 5, "embed_dim": 24, "depth": 2}
    imported("timm")
    return getattr(imported(f"timm.models.{module}"), name)(**{**small, "num_heads": 3, "mlp_ratio": 2.0, **settings})


def our_vit(**settings: Any) -> relpos.VisionTransformer:
    small = {"img_size": (12, 16), "patch_size": 4, "in_chans": 2, "num_classes": 5, "embed_dim": 24, "depth": 2}
    return relpos.VisionTransformer(**{**small, "num_heads": 3, "mlp_ratio": 2.0, "norm_eps": 1e-6, **settings})


VIT = {
    r"positions\.0\.mechanisms\.0\.pos_embed": "pos_embed",
    "prefix_tokens": "cls_token",
    r"(blocks\.\d\.attn)\.qk_norm\.query\.(\w+)": r"\1.q_norm.\2",
    r"(blocks\.\d\.attn)\.qk_norm\.key\.(\w+)": r"\1.k_norm.\2",
}
IMAGES = (2, 2, 12, 16)


def timm_swin(version: int, **settings: Any) -> nn.Module:
    name = "SwinTransformer" if version == 1 else "SwinTransformerV2"
    imported("timm")
    return getattr(imported(f"timm.models.swin_transformer{'' if version == 1 else '_v2'}"), name)(**settings)


def our_swin(version: int, **settings: Any) -> relpos.SwinTransformer:
    return relpos.SwinTransformer(version=version, **settings)  # type: ignore[arg-type]


SWIN_SETTINGS = {
    "img_size": (32, 64), "patch_size": 2, "in_chans": 2, "num_classes": 5, "embed_dim": 8, "depths": (2, 3, 2),
    "num_heads": (1, 2, 4), "window_size": 4, "mlp_ratio": 2.0,
}  # fmt: skip
SWIN = {
    r"patch_norm\.(\w+)": r"patch_embed.norm.\1",
    r"stages\.(\d)\.merging\.(.+)": r"layers.\1.downsample.\2",
    r"stages\.(\d\.blocks\.\d\.attn)\.qk_norm\.logit_scale": r"layers.\1.logit_scale",
    r"stages\.(.+)": r"layers.\1",
    r"positions\.(\d)\.(\d)\.(?:mechanisms\.)*0\.(.+)": r"layers.\1.blocks.\2.attn.\3",
    r"positions\.(\d)\.(\d)\.mechanisms\.0\.(.+)": r"layers.\1.blocks.\2.attn.\3",
    r"head\.(\w+)": r"head.fc.\1",
}


def llama(name: str = "Llama", **settings: Any) -> nn.Module:
    small = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "attn_implementation": "eager"}  # fmt: skip
    library = imported("transformers")
    config = getattr(library, f"{name}Config")(**{**small, **settings})
    return getattr(library, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


def our_llama(**settings: Any) -> relpos.LanguageModel:
    small = {"vocab_size": 11, "context": 64, "embed_dim": 32, "mlp_hidden": 44, "depth": 2, "num_heads": 4,
             "num_kv_heads": 2, "norm_eps": 1e-5, "embed_scale": 1.0, "tie_embeddings": False}  # fmt: skip
    return relpos.LanguageModel(**{**small, **settings})


LLAMA = {
    r"token_embed\.weight": "model.embed_tokens.weight",
    r"head\.weight": "lm_head.weight",
    r"norm\.weight": "model.norm.weight",
    r"blocks\.(\d)\.attn\.proj\.(\w+)": r"model.layers.\1.self_attn.o_proj.\2",
    r"blocks\.(\d)\.mlp\.fc2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"blocks\.(\d)\.norm1\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blocks\.(\d)\.norm2\.weight": r"model.layers.\1.post_attention_layernorm.weight",
}
LLAMA_JOINED = {
    r"blocks\.(\d)\.attn\.qkv\.(\w+)": tuple(rf"model.layers.\1.self_attn.{one}_proj.\2" for one in "qkv"),
    r"blocks\.(\d)\.mlp\.fc1\.weight": tuple(rf"model.layers.\1.mlp.{one}_proj.weight" for one in ("gate", "up")),
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
MINISTRAL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 7,
             "num_hidden_layers": 3, "head_dim": 8}  # fmt: skip
OUR_MINISTRAL = {"depth": 3, "window": (7, 7, None)}


def llama_pair(oracle: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Pair:
    return Pair(oracle, lambda: llama(**theirs), lambda: our_llama(**ours), LLAMA, (2, 40), 11, LLAMA_JOINED)


DISTILLED = "deit.VisionTransformerDistilled"
PAIRS = {
    "vit": Pair("timm VisionTransformer", timm_vit, our_vit, VIT, IMAGES),
    "vit, averaged, registers, no class token": Pair(
        "timm VisionTransformer",
        lambda: timm_vit(global_pool="avg", class_token=False, reg_tokens=2),
        lambda: our_vit(global_pool="avg", class_token=False, reg_tokens=2, fc_norm=True),
        {**VIT, "prefix_tokens": "reg_token"},
        IMAGES,
    ),
    "vit, queries and keys normed, no biases": Pair(
        "timm VisionTransformer",
        lambda: timm_vit(qk_norm=True, qkv_bias=False),
        lambda: our_vit(qk_norm="layernorm", qkv_bias=False),
        VIT,
        IMAGES,
    ),
    "deit 3": Pair(
        "timm VisionTransformer (DeiT III)",
        lambda: timm_vit(no_embed_class=True, init_values=1e-6),
        lambda: our_vit(init_values=1e-6),
        VIT,
        IMAGES,
    ),
    "deit, distilled": Pair(
        "timm VisionTransformerDistilled",
        lambda: timm_vit(DISTILLED),
        lambda: our_vit(distilled=True),
        VIT,
        IMAGES,
        joined={"prefix_tokens": ("cls_token", "dist_token")},
    ),
    "swin": Pair(
        "timm SwinTransformer",
        lambda: timm_swin(1, **SWIN_SETTINGS),
        lambda: our_swin(1, **SWIN_SETTINGS),
        SWIN,
        (2, 2, 32, 64),
    ),
    "swin 2": Pair(
        "timm SwinTransformerV2",
        lambda: timm_swin(2, **SWIN_SETTINGS),
        lambda: our_swin(2, **SWIN_SETTINGS),
        SWIN,
        (2, 2, 32, 64),
    ),
    "llama": llama_pair("transformers LlamaForCausalLM", {}, {}),
    "llama, tied, with biases, another base": llama_pair(
        "transformers LlamaForCausalLM",
        {"tie_word_embeddings": True, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"tie_embeddings": True, "qkv_bias": True, "position": RotaryChoice(500000.0)},
    ),
    "llama 3": llama_pair(
        "transformers LlamaForCausalLM (Llama 3)",
        {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
        {"position": RotaryChoice(500000.0, relpos.Llama3Scaling(4.0, 16)), "num_kv_heads": 1},
    ),
    "mistral": llama_pair(
        "transformers MistralForCausalLM", {"name": "Mistral", "sliding_window": 7, "head_dim": 8}, {"window": 7}
    ),
    "ministral": llama_pair("transformers MinistralForCausalLM", {"name": "Ministral", **MINISTRAL}, OUR_MINISTRAL),
}  # fmt: skip


def perturbed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With every parameter moved: tables and scales start so near 0 that nothing would be compared."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


@pytest.mark.parametrize("version", [1, 2])
def test_the_authors_files_of_swin(version: int) -> None:
    """They merge at the end of a stage and have another head; timm's own filter turns them into timm's."""
    theirs, ours = (
        perturbed(timm_swin(version, **SWIN_SETTINGS), torch.float32),
        our_swin(version, **SWIN_SETTINGS).eval(),
    )
    original = {}
    for name, x in theirs.state_dict().items():
        stage = re.sub(r"layers\.(\d)\.downsample", lambda found: f"layers.{int(found[1]) - 1}.downsample", name)
        original[stage.replace("head.fc.", "head.")] = x
    file = imported(f"timm.models.swin_transformer{'' if version == 1 else '_v2'}")
    filtered = file.checkpoint_filter_fn(original, theirs)
    theirs.load_state_dict(filtered, strict=False)
    relpos.load_weights(ours, original)
    x = torch.randn(2, 2, 32, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def scores(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits


def gradients(model: nn.Module, upstream: Tensor, output: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(output, list(named.values()), upstream, allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(named.items(), found, strict=True)}


def made(pair: Pair, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor]:
    theirs = perturbed(pair.theirs(), dtype)
    ours = pair.ours().to(dtype).eval()
    x = torch.randint(pair.words, pair.like) if pair.words else torch.randn(pair.like, dtype=dtype)
    return theirs, ours, x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRS)
def test_ours_is_theirs(name: str, dtype: torch.dtype) -> None:
    pair = PAIRS[name]
    with in_float64() if dtype == torch.float64 else nullcontext():
        theirs, ours, x = made(pair, dtype)
        report = relpos.load_weights(ours, theirs.state_dict())
        wanted = scores(theirs, x)
        upstream = torch.randn_like(wanted)
        expected = gradients(theirs, upstream, wanted)
    output = scores(ours, x)
    found = gradients(ours, upstream, output)
    assert set(report.fitted) == {name for name in ours.state_dict() if not is_settings(name)}
    by_name = {}
    for own, gradient in found.items():
        several = [expected.pop(one) for one in pair.names(own)]
        by_name[own] = torch.cat(several, dim=1 if own == "prefix_tokens" else 0)
        if by_name[own].shape != gradient.shape:  # DeiT III has no vectors for its prefix
            assert own.endswith("pos_embed")
            found[own] = gradient[:, -by_name[own].shape[1] :]
    assert not expected, f"gradients of theirs that were not compared: {sorted(expected)}"
    agree(name, pair.oracle, {"output": output.detach(), **found}, {"output": wanted.detach(), **by_name})


def test_a_scale_of_cosines_beyond_the_largest() -> None:
    """Without shifts: the -100 that theirs adds where windows are shifted hides little beside scores up to 100."""
    settings = {**SWIN_SETTINGS, "depths": (1, 1, 1)}
    theirs, ours = perturbed(timm_swin(2, **settings), torch.float64), our_swin(2, **settings).double().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("logit_scale"):
                parameter[0] += 3.0
    relpos.load_weights(ours, theirs.state_dict())
    x = torch.randn(2, 2, 32, 64, dtype=torch.float64)
    torch.testing.assert_close(
        scores(ours, x), scores(theirs, x), rtol=1e-6, atol=1e-6
    )  # theirs rounds its coordinates
    scale = dict(ours.named_parameters())["stages.1.blocks.0.attn.qk_norm.logit_scale"]
    assert scale[0] > torch.tensor(100.0).log()
