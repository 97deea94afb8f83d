"""The families that `replace_position` serves, each as one small model with inputs and a position, and variants."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import by_hand
import torch
from models_text import T5
from torch import Tensor, nn

import relpos
from models import SMALL, images, padding, tokens
from relpos import Grid, RotaryEmbedding, Sequence, Site, T5Bias
from relpos.adapters.common.libraries import imported


def _hf(kind: str, config: str, std: float = 0.3, **settings: Any) -> Any:
    """A model of transformers with weights that say something, in float64."""
    transformers = imported("transformers")
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    for x in model.parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=std)
    return model.eval().double()


_TEXT = {
    **SMALL, "intermediate_size": 64, "vocab_size": 90, "max_position_embeddings": 32, "eos_token_id": None,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def t5(**more: Any) -> Any:
    torch.manual_seed(0)
    config = {**T5, "decoder_start_token_id": 0, "eos_token_id": None, **more}
    return _hf("T5ForConditionalGeneration", "T5Config", std=0.2, **config)  # its scores have no scale


def bert(**more: Any) -> Any:
    torch.manual_seed(0)
    return _hf("BertModel", "BertConfig", add_pooling_layer=False, **{**_TEXT, **more})


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    return _hf("GPT2LMHeadModel", "GPT2Config", **{**_TEXT, **more})


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return _hf("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **{**_TEXT, **more})


def smollm3(**more: Any) -> Any:
    torch.manual_seed(0)
    more = {**_TEXT, "tie_word_embeddings": False, **more}
    return _hf("SmolLM3ForCausalLM", "SmolLM3Config", num_key_value_heads=2, **more)


def encoder(**more: Any) -> Any:
    torch.manual_seed(0)
    more = {"batch_first": True, "dropout": 0.0, "num_layers": 2, **more}
    depth, nested = more.pop("num_layers"), more["batch_first"] and not more.get("norm_first", False)
    layer = nn.TransformerEncoderLayer(32, 4, 64, **more)
    model = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(32), enable_nested_tensor=nested)
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model.eval().double()


class Own(nn.Module):
    """A model of a user's own, with PyTorch's attention in it."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, **{"batch_first": True, **more}) for _ in range(2))

    def forward(self, src: Tensor, **masks: Any) -> Tensor:
        for layer in self.layers:
            src = src + layer(src, src, src, **masks)[0]
        return src


def own(**more: Any) -> Any:
    torch.manual_seed(0)
    return Own(**more).eval().double()


def _tamed(model: nn.Module) -> Any:
    for name, x in model.named_parameters():
        if "token" in name or "pos" in name:
            nn.init.normal_(x, generator=torch.Generator().manual_seed(1))
    return model.eval().double()


_IMAGE = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}


def timm_vit(kind: str = "vision_transformer.VisionTransformer", **more: Any) -> Any:
    file, _, name = kind.partition(".")
    return _tamed(getattr(imported(f"timm.models.{file}"), name)(**{**_IMAGE, **more}))


def hf_vit(**more: Any) -> Any:
    transformers = imported("transformers")
    settings = {**SMALL, "intermediate_size": 64, "image_size": (16, 24), "patch_size": 8, **more}
    config = transformers.ViTConfig(**settings)
    return _tamed(transformers.ViTModel(config, add_pooling_layer=False))


def beit(own: bool = True, shared: bool = False, absolute: bool = False, **more: Any) -> Any:
    torch.manual_seed(0)
    return timm_vit(
        "beit.Beit", use_rel_pos_bias=own, use_shared_rel_pos_bias=shared, use_abs_pos_emb=absolute, init_values=0.5,
        use_fc_norm=False, global_pool="token", **more,
    )  # fmt: skip


def swin(**more: Any) -> Any:
    """Stages of 8 x 6 and 4 x 3 tokens, in windows of 4 x 3; the second layer of the first stage is shifted."""
    torch.manual_seed(0)
    settings = {
        "img_size": (32, 24), "depths": (2, 1), "num_heads": (2, 4), "window_size": ((4, 3), (4, 3)), **more
    }  # fmt: skip
    return _tamed(imported("timm").models.swin_transformer.SwinTransformer(
        patch_size=4, embed_dim=16, num_classes=5, drop_path_rate=0.0, **settings
    ))  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model of others, and what is put into it.

    Attributes:
        build: the model in float64, without dropout at work.
        inputs: the arguments of a call, by name, each of four rows.
        expected: what the model says of these, by hand, once its position is replaced.
        position: a mechanism with parameters in attention, and on tokens where the model takes one.
        own: the mechanism that is what the model has itself; None where it has nothing.
        fill: copies what the model has learned of position into it.
        options: further arguments of `replace_position`.
        layers: of each stack.
        knows: whether the model has a position of its own.
    """

    build: Callable[..., Any]
    inputs: Callable[[], dict[str, Tensor]]
    expected: Callable[[Any, dict[str, Tensor]], Tensor]
    position: str
    own: Any = None
    fill: Callable[[Any], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = (2,)
    knows: bool = True

    def published(self) -> Any:
        """The model as its library has it, the same at every call."""
        torch.manual_seed(0)
        return self.build()

    def replaced(self) -> Any:
        """The model with the mechanism, in float64 and eval mode."""
        model = self.published()
        relpos.replace_position(model, self.position, init_std=0.5, **self.options)
        return model

    def same(self) -> Any:
        """The model with a mechanism that says what it knew itself."""
        model = self.published()
        relpos.replace_position(model, self.own, **self.options)
        with torch.no_grad():
            self.fill(model)
        return model

    def called(self, model: Any, rows: slice = slice(None)) -> Tensor:
        """What a model says of these rows, in the model's dtype."""
        dtype = next(model.parameters()).dtype
        cast = {name: (x.to(dtype) if x.is_floating_point() else x)[rows] for name, x in self.inputs().items()}
        out = model(**cast)
        first = out if isinstance(out, Tensor) else out[0]
        assert isinstance(first, Tensor)
        return first

    def features(self, model: Any) -> Tensor:
        """What is said of each token, in timm's models before their head."""
        out: Tensor = (
            model.forward_features(**self.inputs()) if hasattr(model, "forward_features") else self.called(model)
        )
        return out


def _words(*, padded: bool = True) -> dict[str, Tensor]:
    return {"input_ids": tokens(4, 12)} | ({"attention_mask": padding(4, 12)} if padded else {})


def _texts(*, padded: bool = True) -> dict[str, Tensor]:
    return {**_words(padded=padded), "decoder_input_ids": tokens(4, 6, seed=1)}


def _pixels(name: str, size: tuple[int, int] = (16, 24)) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: images(4, size).double()}


def _vectors(of: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    def fill(model: Any) -> None:
        holder = next(x for x in model.modules() if "positions" in x._modules)
        holder.positions[0].mechanisms[0].pos_embed.copy_(of(holder))

    return fill


def _buckets(site: Site) -> T5Bias:
    return T5Bias(site.num_heads, bidirectional=not site.causal)


def _fill_t5(model: Any) -> None:
    for stack in (model.encoder, model.decoder):
        own = stack.block[0].layer[0].SelfAttention
        for position in stack.positions:
            position.mechanisms[0].relative_attention_bias.copy_(own.relative_attention_bias.weight)


def _fill_tables(model: Any) -> None:
    for holder in (x for x in model.modules() if "positions" in x._modules):
        for block, position in zip(holder.blocks, holder.positions, strict=True):
            position.mechanisms[0].relative_position_bias_table.copy_(block.attn.relative_position_bias_table)


FAMILIES: dict[str, Family] = {
    "timm ViT": Family(
        timm_vit,
        _pixels("x"),
        by_hand.timm_vit,
        "learned+relative_2d",
        "learned",
        _vectors(lambda model: model.pos_embed),
    ),
    "ViT": Family(
        hf_vit,
        _pixels("pixel_values"),
        by_hand.hf_vit,
        "learned+relative_2d",
        "learned",
        _vectors(lambda model: model.embeddings._parameters["position_embeddings"]),
    ),
    "BEiT": Family(beit, _pixels("x"), by_hand.timm_vit, "learned+relative_2d", "relative_2d", _fill_tables),
    "Swin": Family(
        swin, _pixels("x", (32, 24)), by_hand.swin, "relative_2d", "relative_2d", _fill_tables, layers=(2, 1)
    ),
    "BERT": Family(
        bert,
        _words,
        by_hand.bert,
        "learned+relative_1d",
        "learned",
        _vectors(lambda model: model.embeddings.position_embeddings.weight),
    ),
    "GPT-2": Family(
        gpt2, _words, by_hand.gpt2, "learned+relative_1d", "learned", _vectors(lambda model: model.wpe.weight)
    ),
    "Llama": Family(
        llama, _words, by_hand.llama, "relative_1d", lambda site: RotaryEmbedding(site.head_dim, layout="half")
    ),
    "T5": Family(t5, _texts, by_hand.t5, "relative_1d", _buckets, _fill_t5, layers=(2, 2)),
    "PyTorch": Family(
        encoder,
        lambda: {"src": torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(0)).double()},
        by_hand.of_torch,
        "learned+relative_1d",
        options={"coordinates": Sequence(7)},
        knows=False,
    ),
}


def _variant(name: str, build: Callable[..., Any], **more: Any) -> Family:
    return replace(FAMILIES[name], build=build, **more)


_GRID = Grid(2, 3, prefix=1)
_ON_A_GRID = {
    "expected": partial(by_hand.of_torch, where=_GRID), "options": {"coordinates": _GRID},
    "position": "learned+relative_2d",
}  # fmt: skip
VARIANTS: dict[str, Family] = {
    "DeiT": _variant("timm ViT", lambda: timm_vit("deit.VisionTransformerDistilled")),
    "ViT, registers": _variant(
        "timm ViT",
        lambda: timm_vit(reg_tokens=2, no_embed_class=True, qk_norm=True, global_pool="avg", fc_norm=False),
    ),
    "ViT, no class token": _variant("timm ViT", lambda: timm_vit(class_token=False, global_pool="avg", fc_norm=False)),
    "ViT, eager": _variant("ViT", lambda: hf_vit(attn_implementation="eager")),
    "BEiT, embedded": _variant("BEiT", partial(beit, shared=True, absolute=True)),
    "BEiT, no position": _variant("BEiT", partial(beit, own=False), knows=False),
    "BERT, eager": _variant("BERT", lambda: bert(attn_implementation="eager"), inputs=partial(_words, padded=False)),
    "GPT-2, eager": _variant(
        "GPT-2",
        lambda: gpt2(attn_implementation="eager", scale_attn_by_inverse_layer_idx=True),
        inputs=partial(_words, padded=False),
    ),
    "Llama, eager": _variant("Llama", lambda: llama(attn_implementation="eager"), inputs=partial(_words, padded=False)),
    "T5, eager": _variant("T5", lambda: t5(attn_implementation="eager"), inputs=partial(_texts, padded=False)),
    "PyTorch, norm first": _variant("PyTorch", lambda: encoder(norm_first=True, activation="gelu")),
    "PyTorch, layers alone": _variant("PyTorch", own, position="relative_1d"),
    "PyTorch, on a grid": _variant("PyTorch", encoder, **_ON_A_GRID),
    "PyTorch, on a grid, training": _variant("PyTorch", lambda: encoder(norm_first=True).train(), **_ON_A_GRID),
}
ALL = {**FAMILIES, **VARIANTS}
_SMALLEST: dict[str, dict[str, Any]] = {
    **{name: {"depth": 1} for name in ("timm ViT", "BEiT")},
    **{name: {"num_hidden_layers": 1} for name in ("ViT", "GPT-2", "Llama")},
    **{name: {"num_layers": 1} for name in ("T5", "PyTorch")},
    "Swin": {"depths": (2,), "num_heads": (2,), "window_size": ((4, 3),)},  # its shifted layer, too
}
ONE_LAYER = {
    name: replace(FAMILIES[name], build=partial(FAMILIES[name].build, **_SMALLEST[name])) for name in _SMALLEST
}
"""What is compiled, most of whose time is the compiler's; BERT is told of position by what T5 and GPT-2 have."""
