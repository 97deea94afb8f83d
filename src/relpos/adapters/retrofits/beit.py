"""BEiT's tables: Swin's on the grid of a whole image, plus three numbers per head for pairs with the class token.

    score[h, i, j] += table[row(i - j), h]          each layer's own table, or one for all, or the sum of both

A table for all layers is passed on as an image of offsets (`grids`); two images can be added. At another resolution the
table is first interpolated as published. Calls with a padding mask run as published.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.borders import GRID_ON_GPU
from relpos.adapters.common.grids import (
    EXTRAS,
    dense_of_image,
    image_of,
    is_image,
    terms_of_image,
    terms_of_table,
    with_extras,
)
from relpos.adapters.common.interface import MASKS, weights_are_recorded
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, paused
from relpos.adapters.retrofits.windows import projected_with_biases


class _Beit(Retrofitted):
    """Equal borders: reentrant checkpointing first runs layers without gradients, and the tables of the model and of a
    layer must have the same form to be added."""

    border = 512
    training_border = 512
    on_gpu = GRID_ON_GPU


class BeitBias(_Beit):
    """`BeitRelativePositionBias`: returns the table as an image if relpos attends."""

    def forward(
        self, window_size: tuple[int, int], interpolate_pos_encoding: bool = False, dim_size: int | None = None
    ) -> Tensor:
        """`[1, H, 2 R - 1, 2 C + 2]`, or `[1, H, N, N]` as published."""
        module: Any = self
        tokens = window_size[0] * window_size[1] + 1
        # Interpolating the dense bias to its own size changes nothing. In an export, or what transformers takes for one
        # (compiled by torch 2.10 and 2.11), it makes a mask if none is given, and adds it to the dense bias.
        dense = torch.compiler.is_exporting() or (interpolate_pos_encoding and dim_size != tokens)
        if dense or not self.takes(tokens, tokens):
            published: Tensor = super().forward(window_size, interpolate_pos_encoding, dim_size)
            return published
        old, table = module.window_size, module.relative_position_bias_table
        if old[0] == old[1] and tuple(old) == tuple(window_size):
            return image_of(table, window_size)
        old_height, old_width = (2 * size - 1 for size in old)
        new_height, new_width = (2 * size - 1 for size in window_size)
        image = table[: old_height * old_width].reshape(1, old_width, old_height, -1).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(new_height, new_width), mode="bilinear")
        return with_extras(image[0], table[old_height * old_width :])[None]


class BeitAttention(_Beit):
    """`BeitAttention`: its mask is the bias."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Attention between all tokens `[B, N, E]`; `padding` is what the caller gave the model."""
        module: Any = self
        tokens = hidden_states.shape[1]
        if attention_mask is None or not is_image(attention_mask, tokens):
            return super().forward(
                hidden_states, _with_padding(module, hidden_states, attention_mask, padding), **kwargs
            )
        if padding is not None or weights_are_recorded():
            dense = dense_of_image(attention_mask, tokens)
            return super().forward(hidden_states, _with_padding(module, hidden_states, dense, padding), **kwargs)
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        out = self.attend(
            q,
            k,
            v,
            position=terms_of_image(self, attention_mask, tokens),
            scale=module.scaling,
            dropout=module.attention_dropout if self.training else 0.0,
        )
        return module.o_proj(out.transpose(1, 2).flatten(2)), None


class BeitModel(_Beit):
    """`BeitModel`: prevents the caller's mask from being added to an image."""

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The published forward; the caller's mask goes to the layers under another name."""
        if attention_mask is not None:
            kwargs["padding"] = attention_mask
        return super().forward(pixel_values, bool_masked_pos, interpolate_pos_encoding, **kwargs)


def _with_padding(module: Any, x: Tensor, bias: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The mask as the published model gives it to a layer."""
    from transformers.masking_utils import create_bidirectional_mask

    if padding is None:
        return bias
    mask: Any = create_bidirectional_mask(config=module.config, inputs_embeds=x, attention_mask=padding)
    return bias if mask is None else mask if bias is None else bias + mask


class Data2VecAttention(_Beit):
    """`Data2VecVisionSelfAttention`, and its copy with sdpa, which returns None for weights."""

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> Any:
        """Attention between all tokens `[B, N, E]`; the given bias is shared by all layers."""
        module: Any = self
        image, tokens = relative_position_bias, hidden_states.shape[1]
        by_image = image is not None and is_image(image, tokens)
        known = by_image or (image is None and module.has_relative_position_bias)
        if output_attentions or not (known and self.takes(tokens, tokens)):
            dense = dense_of_image(image, tokens) if image is not None and by_image else image
            with paused(module):  # its own table module, too
                return super().forward(hidden_states, output_attentions, dense, interpolate_pos_encoding, resolution)
        if module.has_relative_position_bias:
            assert resolution is not None
            patch = module.config.patch_size
            own = module.relative_position_bias((resolution[0] // patch, resolution[1] // patch))
            image = own if image is None else own + image
        assert image is not None
        shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (module.query, module.key, module.value)
        )
        out = self.attend(
            q,
            k,
            v,
            position=terms_of_image(self, image, tokens),
            scale=q.shape[-1] ** -0.5,
            dropout=module.dropout.p if self.training else 0.0,
        )
        return out.transpose(1, 2).flatten(2), None


class TimmBias(_Beit):
    """timm's `RelativePositionBias`: a table for all layers."""

    def forward(self) -> Tensor:
        """`[1, H, 2 R - 1, 2 C + 2]`, or `[H, N, N]` as published."""
        module: Any = self
        tokens = module.window_area + 1
        if not self.takes(tokens, tokens):
            published: Tensor = super().forward()
            return published
        return image_of(module.relative_position_bias_table, module.window_size)


class TimmAttention(_Beit):
    """timm's `Attention` of BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Any:
        """Attention between all tokens `[B, N, E]`."""
        module: Any = self
        tokens, table = x.shape[1], module.relative_position_bias_table
        fits = shared_rel_pos_bias is None or is_image(shared_rel_pos_bias, tokens)
        if not (self.takes(tokens, tokens) and fits and (table is not None or shared_rel_pos_bias is not None)):
            return super().forward(x, shared_rel_pos_bias=shared_rel_pos_bias)
        q, k, v = (
            projected_with_biases(module, x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if shared_rel_pos_bias is None:
            terms = terms_of_table(self, table, module.window_size)
        else:
            own = 0 if table is None else image_of(table, module.window_size)
            terms = terms_of_image(self, shared_rel_pos_bias + own, tokens)
        out = self.attend(
            q, k, v, position=terms, scale=module.scale, dropout=module.attn_drop.p if self.training else 0.0
        )
        return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))


def _unfit(module: Any) -> str | None:
    config = module.config
    has = config.use_relative_position_bias or config.use_shared_relative_position_bias
    return None if has else "it has no relative position"


def _run_bias(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with the table at its own resolution, and at a small non-square one."""
    timm = hasattr(module, "window_area")
    outputs = []
    for window in (module.window_size,) if timm else (module.window_size, (3, 4)):
        tokens = window[0] * window[1] + 1
        q, k, v = (draws.normal(draws.batch, module.relative_position_bias_table.shape[1], tokens, 8) for _ in range(3))
        bias = module() if timm else module(window)
        if is_swapped(module):
            outputs.append(module.attend(q, k, v, position=terms_of_image(module, bias, tokens)))
        else:
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    return tuple(outputs)


def _shared(draws: RandomInputs, swapped: bool, heads: int, window: tuple[int, int]) -> Tensor:
    """A random table as an earlier part of the model passes it on."""
    rows, columns = window
    image = draws.normal(1, heads, 2 * rows - 1, 2 * columns - 1 + EXTRAS)
    return image if swapped else dense_of_image(image, rows * columns + 1)


def _run_attention(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with a given bias. Uses sdpa: eager attention computes its softmax in float32."""
    module.config._attn_implementation_internal = "sdpa"  # on a copy
    window = (4, 6)
    x = draws.normal(draws.batch, window[0] * window[1] + 1, module.q_proj.in_features)
    bias = _shared(draws, is_swapped(module), module.num_attention_heads, window)
    return (module(x, attention_mask=bias)[0],)


def _run_model(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the model with its first layer at a small non-square resolution, then with padding."""
    config = module.config  # on a copy
    config._attn_implementation_internal = "sdpa"
    rows, columns = 4, 6
    patch = config.patch_size
    padding = draws.padding(draws.batch, rows * columns + 1)
    outputs = []
    for mask in (None, padding):
        pixels = draws.normal(draws.batch, config.num_channels, rows * patch, columns * patch)
        outputs.append(module(pixels, attention_mask=mask).last_hidden_state)
    return tuple(outputs)


def _run_data2vec(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with its own bias, a given one, and both."""
    patch, window = module.config.patch_size, (4, 6)
    resolution = (window[0] * patch, window[1] * patch)
    x = draws.normal(draws.batch, window[0] * window[1] + 1, module.query.in_features)
    shared = _shared(draws, is_swapped(module), module.num_attention_heads, window)
    outputs = [module(x, relative_position_bias=shared, resolution=resolution)[0]]
    if module.has_relative_position_bias:
        outputs.append(module(x, resolution=resolution)[0])
    return tuple(outputs)


def _run_timm(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with its own bias, a given one, and both."""
    own = module.relative_position_bias_table is not None
    window = module.window_size if own else (4, 6)
    x = draws.normal(draws.batch, window[0] * window[1] + 1, module.qkv.in_features)
    shared = _shared(draws, is_swapped(module), module.num_heads, window)
    outputs = [module(x, shared_rel_pos_bias=shared)]
    if own:
        outputs.append(module(x))
    return tuple(outputs)


_BEIT = "transformers.models.beit.modeling_beit."
_DATA2VEC = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"
_TIMM = "timm.models.beit."
_TABLE = ("relative_position_bias_table",)

KINDS = (
    PositionKind(
        name="tables with a class token",
        library="transformers",
        replaced=(
            Replaced(
                "beit", _BEIT + "BeitRelativePositionBias", BeitBias, ("forward", "generate_relative_position_index")
            ),
            Replaced("beit", _BEIT + "BeitAttention", BeitAttention, ("forward", *MASKS), unfit=_unfit),
            Replaced("beit", _BEIT + "BeitModel", BeitModel, ("forward", *MASKS), unfit=_unfit),
            Replaced(
                "data2vec-vision",
                _DATA2VEC + "RelativePositionBias",
                BeitBias,
                ("forward", "generate_relative_position_index"),
            ),
            Replaced("data2vec-vision", _DATA2VEC + "SelfAttention", Data2VecAttention, unfit=_unfit),
            Replaced("data2vec-vision", _DATA2VEC + "SdpaSelfAttention", Data2VecAttention, unfit=_unfit),
        ),
        verified=(
            Verified(_BEIT + "BeitRelativePositionBias", _run_bias, _TABLE),
            Verified(_BEIT + "BeitAttention", _run_attention, _TABLE),
            Verified(
                _BEIT + "BeitModel",
                _run_model,
                (*_TABLE, "lambda_1", "lambda_2"),  # a layer scale of 1e-5 hides position
                first=("layers",),
            ),
            Verified(_DATA2VEC + "RelativePositionBias", _run_bias, _TABLE),
            Verified(_DATA2VEC + "SelfAttention", _run_data2vec, _TABLE),
            Verified(_DATA2VEC + "SdpaSelfAttention", _run_data2vec, _TABLE),
        ),
    ),
    PositionKind(
        name="tables with a class token",
        library="timm",
        replaced=(
            Replaced("beit", _TIMM + "RelativePositionBias", TimmBias, ("forward", "gen_relative_position_index")),
            Replaced(
                "beit",
                _TIMM + "Attention",
                TimmAttention,
                ("forward", "_get_rel_pos_bias", "gen_relative_position_index"),
            ),
        ),
        verified=(
            Verified(_TIMM + "RelativePositionBias", _run_bias, _TABLE),
            Verified(_TIMM + "Attention", _run_timm, _TABLE),
        ),
    ),
)
