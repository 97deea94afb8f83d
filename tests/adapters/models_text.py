"""Models of text: T5's buckets, disentangled attention, slopes, and buckets of boxes on a page."""

from typing import Any

import torch
from torch import Tensor, nn

from models import SMALL, Model, at_real, at_tokens, hf, padding, tokens
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.verification import _InFloat64

ALIKE = frozenset({"alike"})


def text(*, left: bool = False) -> dict[str, Tensor]:
    """Three texts, of which two are padded."""
    return {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=left)}


# T5's buckets

T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
TABLES = ("relative_attention_bias.weight",)


def _translation() -> dict[str, Tensor]:
    decoded = {"decoder_input_ids": tokens(3, 13, seed=1), "decoder_attention_mask": padding(3, 13)}
    return text() | decoded


def _translated(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    encoded = at_tokens(out.encoder_last_hidden_state, inputs["attention_mask"])
    return at_tokens(out[0], inputs["decoder_attention_mask"]), encoded


def _translator(name: str, file: str, prefix: str, tags: frozenset[str] = frozenset(), **more: Any) -> Model:
    """An encoder and a decoder; T5's norm takes its variance in float32, so that rounding in float64 shows as 1e-7."""
    build = lambda: hf(file, prefix, **T5, **more)  # noqa: E731
    return Model(name, build, _translation, _translated, 1e-6, TABLES, tags)


def _pix2struct() -> nn.Module:
    settings = {**T5, "hidden_size": 32, "is_decoder": True}
    del settings["d_model"]
    return hf("pix2struct", "Pix2StructText", **settings, initializer_range=0.02)  # of the whole model's configuration


# Disentangled attention

_DEBERTA = {
    **SMALL, "vocab_size": 99, "max_position_embeddings": 64, "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
}  # fmt: skip
_VECTORS = ("rel_embeddings.weight",)


def _deberta_v2(**more: Any) -> nn.Module:
    return hf("deberta_v2", "DebertaV2", **_DEBERTA | {"type_vocab_size": 0, "position_biased_input": False} | more)


def _deberta_v3() -> nn.Module:
    """With buckets, shared projections, a norm of the table and the convolution, as v2-xlarge and v3 have them."""
    return _deberta_v2(position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", conv_kernel_size=3)


def _sew_d() -> nn.Module:
    made = hf(
        "sew_d", "SEWD", **_DEBERTA, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(4, 2),
        num_feat_extract_layers=2, num_conv_pos_embeddings=6, num_conv_pos_embedding_groups=2, position_buckets=8,
        squeeze_factor=2, mask_time_prob=0.0, mask_feature_prob=0.0, hidden_dropout=0.0, activation_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0,
    )  # fmt: skip
    # PyTorch pickles no module with a weight norm
    made.get_submodule("encoder.pos_conv_embed").conv = nn.Conv1d(32, 32, 6, stride=2, padding=3, groups=2)
    return made


def _sound() -> dict[str, Tensor]:
    wave = torch.randn(2, 8 * 40, generator=torch.Generator().manual_seed(0))
    return {"input_values": wave, "attention_mask": (torch.arange(320) < torch.tensor([[320], [240]])).long()}


# published and checkpointed, reentrant, these go back through the norm of the table once a layer, which PyTorch refuses
NORMED = frozenset({"not reentrant"})


# Slopes


_BLOOM = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_MPT = {"vocab_size": 99, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}
_FALCON = {"vocab_size": 99, **SMALL, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}


def bloom(**more: Any) -> nn.Module:
    """BLOOM."""
    return hf("bloom", "Bloom", **_BLOOM | {"use_cache": False} | more)


def mpt() -> nn.Module:
    """MPT, with heads that are no power of two."""
    return hf("mpt", "Mpt", **_MPT, use_cache=False)


def falcon(**more: Any) -> nn.Module:
    """Falcon with slopes."""
    return hf("falcon", "Falcon", **_FALCON | {"use_cache": False} | more)


_WRITERS = {"T5": T5, "UMT5": T5, "Bloom": _BLOOM, "Mpt": _MPT, "Falcon": _FALCON}


def writer(kind: str = "T5", **more: Any) -> Any:
    """A whole model that generates text, the same at every call."""
    torch.manual_seed(0)
    of_pairs = {"decoder_start_token_id": 0, "eos_token_id": 1}
    settings = {"pad_token_id": 0, **_WRITERS[kind], **(of_pairs if "T5" in kind else {}), **more}
    part = "ForConditionalGeneration" if "T5" in kind else "ForCausalLM"
    return hf(kind.lower(), kind, part, **settings).eval()


def _holed() -> dict[str, Tensor]:
    inputs = text()
    inputs["attention_mask"][:, 7] = 0
    return inputs


def _decoder(name: str, build: Any, inputs: Any = text, tags: frozenset[str] = ALIKE) -> Model:
    return Model(name, build, inputs, at_real, 1e-6, tags=tags)


LINEAR = frozenset({"no off by one"})  # every key of a query is as much further, which a softmax does not see


# Relative logits

LOGITS = ("rel_logits_proj.proj",)
_INKLING = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2, "swa_head_dim": 4, "sliding_window_size": 7, "d_rel": 3, "rel_extent": 9,
    "log_scaling_n_floor": 5, "log_scaling_alpha": 0.7, "mlp_layer_types": ["dense", "dense"], "intermediate_size": 48,
    "conv_kernel_size": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def inkling(part: str = "Model", **more: Any) -> nn.Module:
    """Inkling's text model; `part` "ForCausalLM" for the whole one."""
    prefix = "InklingText" if part == "Model" else "Inkling"
    library = imported("transformers.models.inkling.modeling_inkling")
    config = library.InklingTextConfig(**_INKLING | {"use_cache": False} | more)
    made: nn.Module = getattr(library, prefix + part)(config)
    return made


def inkling2(part: str = "Model", **more: Any) -> nn.Module:
    """Inkling 2's text model, with a linear layer in place of each layer's experts."""
    library = imported("transformers.models.inkling2.modeling_inkling2")
    own = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "unpadded_vocab_size": 99}
    own |= {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"], "use_cache": False}
    settings = {**_INKLING, **own, "n_layers_per_attn_res_block": 2, "qk_l2_clip_threshold": 1.0, **more}
    for name in ("mlp_layer_types", "intermediate_size"):
        del settings[name]
    config = library.Inkling2TextConfig(**settings, rel_l2_clip_threshold=0.5)
    model: nn.Module = getattr(library, ("Inkling2Text" if part == "Model" else "Inkling2") + part)(config)
    for layer in model.get_submodule("layers" if part == "Model" else "model.layers").children():
        layer.mlp = nn.Linear(32, 32)
    return model


# Rotated values


def deepseek(*layer_types: str, part: str = "Model", **more: Any) -> nn.Module:
    """DeepSeek V4 with layers of these types, by default two sliding ones, and a linear layer in place of experts."""
    kinds = list(layer_types) or ["sliding_attention"] * 2
    settings = {
        "vocab_size": 99, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": len(kinds),
        "layer_types": kinds, "num_attention_heads": 4, "head_dim": 12, "partial_rotary_factor": 1 / 3,
        "q_lora_rank": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "hc_mult": 2,
        "sliding_window": 7, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip
    model = hf("deepseek_v4", "DeepseekV4", part, **settings | more)
    for layer in model.get_submodule("layers" if part == "Model" else "model.layers").children():
        layer.mlp = _Mlp(32, 32)
    return model


class _Mlp(nn.Linear):
    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return super().forward(x)


# Boxes


def _layoutlmv3(**more: Any) -> nn.Module:
    return hf(
        "layoutlmv3", "LayoutLMv3", **SMALL, vocab_size=99, coordinate_size=5, shape_size=6, max_position_embeddings=64,
        visual_embed=False, **more,
    )  # fmt: skip


def _page() -> dict[str, Tensor]:
    corners = torch.randint(0, 500, (3, 21, 2), generator=torch.Generator().manual_seed(0))
    return text() | {"bbox": torch.cat([corners, corners + torch.tensor([30, 10])], -1)}


def _udop(part: str = "Model", **more: Any) -> nn.Module:
    return hf("udop", "Udop", part, **T5, image_size=16, patch_size=4, max_2d_position_embeddings=64, **more)


def _document() -> dict[str, Tensor]:
    """Texts with boxes, as fractions of the page, and pictures, of which some patches have no text."""
    chance = torch.Generator().manual_seed(0)
    corners = torch.rand(3, 21, 2, generator=chance) * 0.9
    boxes = torch.cat([corners, corners + 0.1], -1)
    return _translation() | {"bbox": boxes, "pixel_values": torch.randn(3, 3, 16, 16, generator=chance)}


def _prefixed() -> dict[str, Tensor]:
    """Texts with boxes after a prefix, of which the boxes are negative."""
    inputs = _document()
    inputs["bbox"][0, :2] *= -1
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "bbox")}


_PREFIXED = [
    {"type": "1d", "relative_attention_num_buckets": 8, "prefix_bucket": True},
    {"type": "horizontal", "relative_attention_num_buckets": 12, "prefix_bucket": True, "bidirectional": False},
]


def _read(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """At real tokens of the text; patches stand behind them."""
    encoded = out.encoder_last_hidden_state[:, : inputs["input_ids"].shape[1]]
    return at_tokens(out[0], inputs["decoder_attention_mask"]), at_tokens(encoded, inputs["attention_mask"])


class Wide(nn.Module):
    """A module that takes scores to float32 and there hides some by the least number of float64, which fails."""

    def __init__(self, published: nn.Module) -> None:
        super().__init__()
        self.published = published

    def forward(self, **inputs: Any) -> Any:
        """The published forward, in float64 throughout."""
        with _InFloat64():
            return self.published(**inputs)


def _layoutlmv2(**more: Any) -> nn.Module:
    """Its encoder alone: the model needs detectron2."""
    return Wide(hf("layoutlmv2", "LayoutLMv2", "Encoder", **SMALL, **more))


def _encoded_page() -> dict[str, Tensor]:
    """What the model gives its encoder: a mask that is the least number where keys are hidden."""
    page = _page()
    hidden = (1.0 - page["attention_mask"][:, None, None].float()) * torch.finfo(torch.float32).min
    x = torch.randn(3, 21, 32, generator=torch.Generator().manual_seed(0))
    return {"hidden_states": x, "attention_mask": hidden, "bbox": page["bbox"], "position_ids": torch.arange(21)[None]}


BOXES = ("rel_pos_bias.weight", "rel_pos_x_bias.weight", "rel_pos_y_bias.weight")

MODELS = [
    _translator("t5", "t5", "T5"),
    Model(
        "t5 encoder, eager",
        lambda: hf("t5", "T5", "EncoderModel", **T5, attn_implementation="eager"),
        text,
        at_real,
        1e-6,
        TABLES,
    ),
    _translator("mt5", "mt5", "MT5", ALIKE),
    _translator("umt5", "umt5", "UMT5"),
    _translator(
        "switch_transformers", "switch_transformers", "SwitchTransformers", num_experts=2, router_jitter_noise=0.0
    ),
    _translator("longt5", "longt5", "LongT5", ALIKE),
    Model("pix2struct", _pix2struct, text, at_real, 1e-6, TABLES),
    Model("mpnet", lambda: hf("mpnet", "MPNet", vocab_size=99, **SMALL), text, at_real, tables=TABLES),
    Model(
        "pop2piano",
        lambda: hf("pop2piano", "Pop2Piano", "ForConditionalGeneration", **T5),
        _translation,
        lambda out, inputs: (out.encoder_last_hidden_state,),
        1e-6,
        TABLES,
    ),
    Model("deberta_v2", _deberta_v3, text, at_real, tables=_VECTORS, tags=NORMED),
    Model("deberta_v2, clipped", lambda: _deberta_v2(max_relative_positions=9), text, at_real, tables=_VECTORS),
    *(
        Model(
            f"deberta_v2, {kind} alone",
            lambda kind=kind: _deberta_v2(pos_att_type=[kind], position_buckets=8),
            text,
            at_real,
            tables=_VECTORS,
            tags=ALIKE,
        )
        for kind in ("c2p", "p2c")
    ),
    # its layer norm is computed in float32
    Model("deberta", lambda: hf("deberta", "Deberta", **_DEBERTA), text, at_real, 1e-6, _VECTORS),
    Model("sew_d", _sew_d, _sound, lambda out, inputs: (out[0][0], out[0][1, :30]), tables=_VECTORS, tags=NORMED),
    _decoder("bloom", bloom, tags=LINEAR),
    _decoder("bloom, a token hidden", bloom, _holed),
    _decoder("bloom, 16 heads", lambda: bloom(n_head=16)),
    _decoder("mpt", mpt, tags=LINEAR),
    _decoder("falcon", falcon, tags=frozenset()),
    _decoder("falcon, padded left", falcon, lambda: text(left=True)),
    _decoder("falcon, eager", lambda: falcon(attn_implementation="eager")),
    _decoder("falcon, keys shared", lambda: falcon(multi_query=True, parallel_attn=True)),
    _decoder("falcon, new", lambda: falcon(new_decoder_architecture=True, parallel_attn=True, num_kv_heads=2)),
    # its norms and convolutions are computed in float32
    Model("inkling", inkling, text, at_real, 1e-6, LOGITS),
    Model(
        "inkling, eager",
        lambda: inkling(attn_implementation="eager", log_scaling_n_floor=None),
        text,
        at_real,
        1e-6,
        LOGITS,
        ALIKE,
    ),
    Model("inkling2", inkling2, text, at_real, 1e-6, LOGITS),
    Model("udop", lambda: _udop(use_cache=False), _document, _read, 1e-6, TABLES),
    Model(
        "udop encoder, eager, a prefix, few buckets",
        lambda: _udop("EncoderModel", attn_implementation="eager", relative_bias_args=_PREFIXED),
        _prefixed,
        at_real,
        1e-6,
        TABLES,
        ALIKE,
    ),
    Model("deepseek_v4", deepseek, text, at_real, 1e-6, ("sinks",), frozenset({"no sign"})),
    Model("layoutlmv3", _layoutlmv3, _page, at_real, tables=BOXES),
    Model(
        "layoutlmv2 encoder",
        _layoutlmv2,
        _encoded_page,
        lambda out, inputs: (at_tokens(out[0], inputs["attention_mask"][:, 0, 0] == 0),),
        tables=BOXES,
    ),
    Model(
        "layoutlmv2 encoder, q, k and v apart, text alone",
        lambda: _layoutlmv2(fast_qkv=False, has_spatial_attention_bias=False),
        _encoded_page,
        lambda out, inputs: (at_tokens(out[0], inputs["attention_mask"][:, 0, 0] == 0),),
        tables=BOXES[:1],
        tags=ALIKE,
    ),
    Model(
        "layoutlmv3, text alone",
        lambda: _layoutlmv3(has_spatial_attention_bias=False),
        _page,
        at_real,
        tables=BOXES[:1],
        tags=ALIKE,
    ),
]
