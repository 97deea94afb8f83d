"""transformers' attention interface: masks that stay one number a token, biases that stay one number an offset.

transformers builds the mask once a model, `[B, 1, N, M]`, by the function registered under `_attn_implementation`, and
each layer calls the attention function of that name. Ours are registered as "relpos_sdpa" and "relpos_eager", after the
implementation that a model had. They always come together: an attention function without a mask function would be
given no mask at all, and ignore padding without a word.

    mask        None, or [B, M], True at real tokens             expanded to the published one for published layers
                [B, 1, 1, M] of the model's own making           as it is
    bias        [1, H, 1, N + M - 1], one number an offset       relpos.attention
                anything else                                    the published attention function

A bias crosses the borders of layers as that tensor, since activation checkpointing follows tensors alone.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.recording import recorded
from relpos.core import DenseBias, LineBias, Mask, Sequence, Terms, lines
from relpos.core.checks import fail
from relpos.core.densify import written_out
from relpos.engines import attention

SERVED = ("sdpa", "eager")
PREFIX = "relpos_"
"""Of the names that our functions are registered under."""

SELECTS = "_attn_implementation_internal"
"""The attribute of a configuration that selects the functions."""

_MASKING = "transformers.masking_utils."
MASKS = tuple(_MASKING + name for name in ("create_bidirectional_mask", "_preprocess_mask_arguments"))
"""What a model makes its mask by: which masks it hands through, and what it asks of the function that makes one."""

READS = (
    *MASKS,
    *(
        _MASKING + name
        for name in (
            "create_causal_mask",
            "causal_mask_function",
            "bidirectional_mask_function",
            "prepare_padding_mask",
            "padding_mask_function",
            "sdpa_mask",
            "eager_mask",
        )
    ),
    "transformers.integrations.sdpa_attention.create_position_bias_mask",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
)
"""What our functions stand in front of. Their source has a fingerprint, as that of a class has; so has the
`eager_attention_forward` of a model's file."""


_SWITCHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The configurations that live models switch; a copy of one is another."""


def switch(config: Any) -> None:
    """Let the models of a configuration use our functions, in front of those they had.

    Not where it asks for attention weights in every call, all of which run as published: the library takes such a
    configuration for a wrong one where it names anything but "eager".
    """
    register()
    _SWITCHED[id(config)] = config
    if is_switched(config) or getattr(config, "output_attentions", False):
        return  # or copied from one that was
    # the property's setter would change sub-configurations too
    config._attn_implementation_internal = PREFIX + implementation(config)


def switch_back(config: Any) -> None:
    """Give a configuration back what it had."""
    _SWITCHED.pop(id(config), None)
    if is_switched(config):
        config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(PREFIX)


def is_switched(config: Any) -> bool:
    """Whether our functions are in use."""
    return str(getattr(config, "_attn_implementation_internal", None)).startswith(PREFIX)


def is_shared(config: Any) -> bool:
    """Whether a configuration is that of a retrofitted model."""
    return config is not None and _SWITCHED.get(id(config)) is config


def implementation(config: Any) -> str:
    """What a configuration selects, our functions apart."""
    return str(getattr(config, "_attn_implementation_internal", None) or "eager").removeprefix(PREFIX)


def register() -> None:
    """Make our functions known to transformers, in this process."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for own in SERVED:
        if PREFIX + own not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_ATTENTION_FUNCTIONS.register(PREFIX + own, partial(_attention, own))
            ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + own, partial(_mask, own))


def _mask(
    own: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """A mask as `[B, M]`, or None where nothing is hidden but the future; other patterns as published."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
    )

    plain = not recorded() and mask_function in (causal_mask_function, bidirectional_mask_function)
    plain = plain and (attention_mask is None or attention_mask.dim() == 2)  # any other is the caller's
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_length + kv_offset
    if not plain or (mask_function is causal_mask_function and not at_end):
        published: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[own](
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **more
        )
        return published
    if attention_mask is None:
        return None
    valid = attention_mask[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and bool(valid.all()):
        return None
    return valid


def _attention(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    by_token: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of a switched configuration. With `by_token` a mask `[B, 1, 1, M]` is one of ours."""
    placed = getattr(module, "attend_placed", None)  # whose position was replaced
    if placed is None and recorded():
        more |= {} if is_causal is None else {"is_causal": is_causal}
        more |= {} if position_bias is None else {"position_bias": position_bias}
        more |= {"dropout": dropout, "scaling": scaling}
        return _published(own, module)(module, query, key, value, attention_mask, **more)
    queries, keys = query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if by_token and attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = attention_mask[:, 0, 0]  # a layer that reads its mask was given one with four dimensions
    if attention_mask is not None and attention_mask.dim() == 4:
        causal = False  # such a mask says all
    if placed is not None:
        refuse_weights(weights_are_recorded())  # nothing is published of a position that was replaced
        out = placed(query, key, value, attention_mask, causal=causal, scale=scaling, dropout=dropout)
        return out.transpose(1, 2), None
    by_offset = position_bias is not None and is_by_offset(position_bias, queries, keys)
    own_mask = attention_mask is None or attention_mask.dim() == 2
    if by_offset and (own_mask or is_added_by_key(attention_mask)):
        assert position_bias is not None
        bias = Terms(by_offset_term(position_bias, queries, keys))
        if attention_mask is not None and not own_mask:  # not all of its numbers are 0 or the least there is
            bias, attention_mask = bias + DenseBias(attention_mask.to(position_bias.dtype)), None
        attend: Any = getattr(module, "attend", attention)  # a retrofitted module counts
        out = attend(
            query,
            key,
            value,
            position=bias,
            mask=mask_of(attention_mask, queries, keys, causal=causal),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            dropout=dropout,
        )
        return out.transpose(1, 2), None
    if position_bias is not None and position_bias.shape[2:] == (1, 1):
        # the same number everywhere is no bias; but published functions read a caller's mask by whether there is one
        position_bias = None if own_mask else position_bias.expand(-1, -1, queries, keys)
    if by_offset:
        assert position_bias is not None
        warnings.warn(
            f"a mask of shape {tuple(attention_mask.shape)} came to a retrofitted layer: its bias is written out as "  # type: ignore[union-attr]
            "N x M numbers, as published. A mask of tokens alone, [batch, tokens], saves them.",
            RuntimeWarning,
            stacklevel=2,
        )
        position_bias = dense_by_offset(position_bias, queries, keys).to(query.dtype)
    return _published(own, module)(
        module,
        query,
        key,
        value,
        published_mask(own, attention_mask, query, keys, causal=causal),
        dropout=dropout,
        scaling=scaling,
        **({} if is_causal is None else {"is_causal": is_causal}),
        **({} if position_bias is None else {"position_bias": position_bias}),
        **more,
    )


def _published(own: str, module: nn.Module) -> Any:
    """The function that a layer would have called."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return (
        sys.modules[type(module).__module__].eager_attention_forward if own == "eager" else ALL_ATTENTION_FUNCTIONS[own]
    )


def published_mask(own: str, mask: Tensor | None, query: Tensor, keys: int, *, causal: bool = False) -> Tensor | None:
    """A mask of ours as the published functions of "sdpa" or "eager" take it; others pass through."""
    queries = query.shape[2]
    hides_future = causal and queries > 1
    if mask is not None and mask.dim() != 2:
        return mask
    if mask is None and (not hides_future or (own == "sdpa" and queries == keys)):
        return None  # sdpa knows by itself that it is causal; of fewer queries it would take the first for the last
    allowed = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device) if mask is None else mask[:, None, None]
    if hides_future:
        order = torch.arange(keys, device=query.device)
        allowed = allowed & (order <= order[keys - queries :, None])
    allowed = allowed.expand(-1, -1, queries, -1)
    if own == "sdpa":
        return allowed
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(allowed, zero, torch.finfo(query.dtype).min)


def mask_of(valid: Tensor | None, queries: int, keys: int, *, causal: bool = False) -> Mask | None:
    """The mask of `[B, M]`, True (or 1) at real keys. Padded queries attend like others, as in transformers."""
    mask = None
    if causal:
        order = torch.arange(keys) if queries != keys else None
        mask = Mask.causal() if order is None else Mask.causal(order[keys - queries :], order)
    if valid is not None:
        everyone = torch.ones(valid.shape[0], queries, dtype=torch.bool, device=valid.device)
        padding = Mask.padding(valid.bool(), queries=everyone)
        mask = padding if mask is None else mask & padding
    return mask


def is_by_offset(bias: Tensor, queries: int, keys: int) -> bool:
    """Whether a bias holds one number an offset."""
    return bias.dim() == 4 and queries > 1 and bias.shape[2] == 1 and bias.shape[3] == queries + keys - 1


def is_added_by_key(mask: Any) -> bool:
    """Whether a mask, `[B, 1, 1, M]`, is a number of each key that is added, for all queries (Switch's own). What a
    boolean one means depends on the implementation: eager attention adds it, too."""
    return isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def by_offset_term(bias: Tensor, queries: int, keys: int) -> LineBias:
    """A bias of one number an offset, `[1, H, 1, N + M - 1]`, of the last queries of a sequence of keys."""
    line = lines(Sequence(queries, start=keys - queries), Sequence(keys), device=bias.device)
    return LineBias(bias[0, :, 0], line)


def dense_by_offset(bias: Tensor, queries: int, keys: int) -> Tensor:
    """The same as `[1, H, N, M]`."""
    term = by_offset_term(bias, queries, keys)
    return written_out(term.values, term.lines)[None]


def weights_are_recorded() -> bool:
    """Whether the caller of a model of transformers waits for attention weights, which hooks record."""
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return False
    variable = library._active_collector
    if torch.compiler.is_compiling():  # Dynamo cannot read a context's variable; the library keeps another for it
        collector = variable.global_var if variable.compiling else None
    else:
        collector = variable.get()
    return collector is not None and any("attentions" in key for key in collector)


def refuse_weights(asked: bool | None) -> None:
    """Raise where a model whose position was replaced is asked for attention weights, `output_attentions=True`."""
    if asked:
        wanted = "output_attentions=False after relpos.replace_position, which makes no weights"
        fail(wanted, "True", f"Leave it out; {LOST}")


def refuse_static(cache: Any) -> None:
    """Raise where a model whose position was replaced has a cache of its full length from the beginning."""
    if getattr(cache, "is_compileable", False):
        own = getattr(cache, "self_attention_cache", cache)  # a decoder that attends to an encoder has two
        wanted, came = "a cache that grows, after relpos.replace_position", f"a static one ({type(own).__name__})"
        fail(wanted, came, f'Generate with cache_implementation="dynamic"; {LOST}')


LOST = "relpos.restore(model) would put the model's own position back."
"""Why that is no remedy after a replacement, as it is after a retrofit, which computes the same numbers."""
