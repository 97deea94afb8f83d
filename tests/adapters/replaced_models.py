"""The families that `replace_position` serves, each as one small model with inputs and a position, for tests of use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from test_replace_t5 import t5
from test_replace_text import bert, gpt2, llama
from test_replace_torch import encoder
from test_replace_vit import timm_vit, transformers_vit
from test_replace_windows import beit, swin
from torch import Tensor

import relpos
from models import images, padding, tokens
from relpos import RotaryEmbedding, Sequence, Site, T5Bias


@dataclass(frozen=True)
class Family:
    """A model of others, and what is put into it.

    Attributes:
        build: the model in float64, without dropout at work.
        inputs: the arguments of a call, by name, each of four rows.
        position: a mechanism with parameters in attention, and on tokens where the model takes one.
        own: the mechanism that is what the model has itself; None where it has nothing.
        fill: copies what the model has learned of position into it.
        options: further arguments of `replace_position`.
    """

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    position: str
    own: Any = None
    fill: Callable[[Any], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)

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


def _words() -> dict[str, Tensor]:
    return {"input_ids": tokens(4, 12), "attention_mask": padding(4, 12)}


def _texts() -> dict[str, Tensor]:
    return {**_words(), "decoder_input_ids": tokens(4, 6, seed=1)}


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
        timm_vit, _pixels("x"), "learned+relative_2d", "learned", _vectors(lambda model: model.pos_embed)
    ),
    "ViT": Family(
        transformers_vit,
        _pixels("pixel_values"),
        "learned+relative_2d",
        "learned",
        _vectors(lambda model: model.embeddings._parameters["position_embeddings"]),
    ),
    "BEiT": Family(beit, _pixels("x"), "learned+relative_2d", "relative_2d", _fill_tables),
    "Swin": Family(swin, _pixels("x", (32, 24)), "relative_2d", "relative_2d", _fill_tables),
    "BERT": Family(
        bert,
        _words,
        "learned+relative_1d",
        "learned",
        _vectors(lambda model: model.embeddings.position_embeddings.weight),
    ),
    "GPT-2": Family(gpt2, _words, "learned+relative_1d", "learned", _vectors(lambda model: model.wpe.weight)),
    "Llama": Family(llama, _words, "relative_1d", lambda site: RotaryEmbedding(site.head_dim, layout="half")),
    "T5": Family(t5, _texts, "relative_1d", _buckets, _fill_t5),
    "PyTorch": Family(
        encoder,
        lambda: {"src": torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(0)).double()},
        "learned+relative_1d",
        options={"coordinates": Sequence(7)},
    ),
}
