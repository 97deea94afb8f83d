"""PyTorch's `nn.TransformerEncoder` and `nn.MultiheadAttention`. They have no position: the caller gives coordinates.

In eval mode PyTorch bypasses an attention layer's `forward` with fused kernels that have no position, and packs padded
batches into nested tensors for them. Both require certain settings; the properties below report others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Stack, require_class
from relpos.core import Coordinates
from relpos.core.checks import fail
from relpos.engines import attention_weights
from relpos.position import Site

ATTENTION = "torch.nn.modules.activation.MultiheadAttention"


class RepositionedMultiheadAttention(Repositioned):
    """`nn.MultiheadAttention` among the tokens of one sequence or grid."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, which disables fused kernels. Weights are in one tensor nevertheless."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and, with `need_weights`, weights; arguments and shapes are PyTorch's.

        Raises:
            ValueError: queries and keys are not the same tokens, or their number differs from the coordinates'.
        """
        module: Any = self
        if not query.shape == key.shape == value.shape:
            came = f"queries {tuple(query.shape)} and keys {tuple(key.shape)}"
            fail(
                "the same tokens as queries, keys and values",
                came,
                "Call replace_position on the encoder only.",
            )
        batched, first = query.dim() == 3, module.batch_first
        inputs = [x if batched else x[None] for x in (query, key, value)]
        inputs = [x.transpose(0, 1) if batched and not first else x for x in inputs]
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        weights = module.in_proj_weight.chunk(3)
        q, k, v = (
            linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        mask = _joined(None if is_causal else attn_mask, key_padding_mask, q)
        dropout = module.dropout if self.training else 0.0
        out = self.attend_repositioned(q, k, v, mask, causal=is_causal, dropout=dropout)
        x = module.out_proj(out.transpose(1, 2).flatten(2))
        x = x.transpose(0, 1) if batched and not first else x
        x = x if batched else x[0]
        if not need_weights:
            return x, None
        terms, allowed = self.terms_and_mask(q.shape[2], k.shape[2], mask, causal=is_causal)
        maps = attention_weights(q, k, position=terms, mask=allowed)
        maps = maps.mean(dim=1) if average_attn_weights else maps
        return x, maps if batched else maps[0]


class RepositionedEncoder(Repositioned):
    """`nn.TransformerEncoder`: tokens get their position on the way in."""

    @property
    def use_nested_tensor(self) -> bool:
        """False: only fused kernels need nested tensors."""
        return False

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The published forward on tokens with their position."""
        first = self.layers[0].self_attn.batch_first
        if src.dim() == 2:
            x = self.layer_position.embed(src[None])[0]
        else:
            x = (
                self.layer_position.embed(src)
                if first
                else self.layer_position.embed(src.transpose(0, 1)).transpose(0, 1)
            )
        encoded: Tensor = super().forward(x, *args, **kwargs)
        return encoded


def _joined(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """PyTorch's masks, True or minus infinity at hidden pairs, in the form of `attend_repositioned`."""
    batch, count = q.shape[:2]
    if attn_mask is None and padding is not None and padding.dtype == torch.bool:
        return ~padding.view(batch, -1)
    pairs = None if attn_mask is None else _numbers(attn_mask, q)
    if pairs is not None:
        pairs = pairs[None, None] if pairs.dim() == 2 else pairs.unflatten(0, (batch, count))
    keys = None if padding is None else _numbers(padding, q).view(batch, 1, 1, -1)
    return keys if pairs is None else pairs if keys is None else pairs + keys


def _numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def _encoder(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(served(require_class(getattr(layer, "self_attn", layer), ATTENTION)) for layer in model.layers)
    yield Stack(
        name, model, _site(layers, given), layers, RepositionedMultiheadAttention, (), ((model, RepositionedEncoder),)
    )


def layers_alone(model: nn.Module, given: Given) -> list[Stack]:
    """The stack of all `nn.MultiheadAttention` in a model without other known layers; [] if there is none.

    Raises:
        ValueError: their sizes differ.
    """
    layers = tuple(served(module) for module in model.modules() if type(module) is nn.MultiheadAttention)
    if not layers:
        return []
    sizes = sorted({(layer.embed_dim, layer.num_heads) for layer in layers})
    if len(sizes) > 1:
        came = ", ".join(f"{heads} heads of width {width // heads}" for width, heads in sizes)
        fail("nn.MultiheadAttention of one size", came, "Pass the modules of each size separately.")
    return [Stack("", model, _site(layers, given), layers, RepositionedMultiheadAttention, ())]


def served(layer: Any) -> nn.MultiheadAttention:
    """The layer; raises if its settings are not served."""
    if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:
        wanted = "nn.MultiheadAttention for plain self-attention"
        fail(wanted, "one with kdim, vdim, add_bias_kv or add_zero_attn", "Build it without.")
    assert isinstance(layer, nn.MultiheadAttention)
    return layer


def _site(layers: tuple[nn.MultiheadAttention, ...], given: Given) -> Site:
    first = layers[0]
    return Site(first.num_heads, first.head_dim, first.embed_dim, _required(given), causal=bool(given.causal))


def _required(given: Given) -> Coordinates:
    if given.coordinates is None:
        remedy = "Pass coordinates=relpos.Sequence(length) or relpos.Grid(rows, columns)."
        fail("coordinates, which PyTorch's modules do not hold", "None", remedy)
    return given.coordinates


STACKS = {"torch.nn.modules.transformer.TransformerEncoder": _encoder}
READS: dict[str, tuple[str, ...]] = {}  # the tests run with the oldest and newest supported PyTorch
REFUSED = {"torch.nn.modules.transformer.TransformerDecoderLayer": "Pass the encoder: model.encoder."}
