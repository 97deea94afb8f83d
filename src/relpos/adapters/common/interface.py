"""transformers' attention interface with masks of one number per token and biases of one number per offset.

transformers builds the mask once per model, `[B, 1, N, M]`, with the function registered under `_attn_implementation`.
Each layer calls the attention function of that name. Ours are registered as "relpos_sdpa" and "relpos_eager", named
after the model's own implementation. Both functions are always registered: an attention function without a mask
function would get no mask and silently ignore padding.

    mask        None, or [B, M], True at real tokens             expanded to the published one for published layers
                [B, 1, 1, M] of the model's own making           as it is
    bias        [1, H, 1, N + M - 1], one number an offset       relpos.attention
                [1, H, 1, R] with what each pair reads of it     relpos.attention
                anything else                                    the published attention function

Layers pass a bias on as a plain tensor, since activation checkpointing tracks only tensors.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.recording import recorded
from relpos.adapters.common.sharing import attend_by_offset, require_no_dropout, require_plain
from relpos.core import DenseBias, IndexedBias, LineBias, Mask, Sequence, Terms, lines
from relpos.core.checks import fail
from relpos.core.densify import expand_regular
from relpos.core.pair_table import read_pairs
from relpos.core.tree import unchecked
from relpos.engines import attention
from relpos.layers.context import SharedSequence

SERVED = ("sdpa", "eager")
PREFIX = "relpos_"
"""Prefix of the names that our functions are registered under."""

PAIRS = "relpos_pairs"
"""The argument by which layers hand on what each pair reads of a bias: a list, empty or of one tensor `[1 or B, N, M]`
of integers."""

SELECTS = "_attn_implementation_internal"
"""The attribute of a configuration that selects the functions."""

_MASKING = "transformers.masking_utils."
MASKS = tuple(_MASKING + name for name in ("create_bidirectional_mask", "_preprocess_mask_arguments"))
"""The functions a model makes its mask with: they decide which masks pass unchanged and how a mask function is
called."""

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
"""The functions that ours replace or depend on. Their source has a fingerprint, as a class's has. So has the
`eager_attention_forward` of a model's file."""


OWN_WINDOWS = ("inkling_text", "inkling2_text")
"""Model types whose layers apply their window themselves: a mask of causality and window is one of tokens for them."""


BOTH_FORMS = ("deepseek_v4",)
"""Model types with layers that run as published beside others, all with one mask: the published one, which carries that
of tokens as `OF_TOKENS`."""

OF_TOKENS = "relpos_of_tokens"
"""An attribute of a published mask: a tuple with `[B, M]`, or None where no token is padded. It gets lost wherever the
mask is copied or changed, and layers then run as published."""


_SWITCHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The switched configurations of live models, by id; a copy does not count."""


def switch(config: Any) -> None:
    """Let the models of a configuration use our functions, which fall back to the functions they had.

    Does not switch if the configuration asks for attention weights in every call. All calls then run as published, and
    the library rejects such a configuration with any name but "eager".
    """
    register()
    _SWITCHED[id(config)] = config
    if is_switched(config) or getattr(config, "output_attentions", False):
        return  # the first, if copied from a switched one
    # the property's setter would change sub-configurations too
    config._attn_implementation_internal = PREFIX + implementation(config)


def switch_back(config: Any) -> None:
    """Select a configuration's own functions again."""
    _SWITCHED.pop(id(config), None)
    if is_switched(config):
        config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(PREFIX)


def is_switched(config: Any) -> bool:
    """Whether a configuration selects our functions."""
    return str(getattr(config, "_attn_implementation_internal", None)).startswith(PREFIX)


def require_switched(config: Any) -> None:
    """Raise unless a configuration selects our functions: others would attend without position, or to a share."""
    if not is_switched(config):
        remedy = "Call set_attn_implementation on the model that relpos has changed."
        fail("a configuration that selects relpos's attention", implementation(config), remedy)


def is_shared(config: Any) -> bool:
    """Whether a configuration belongs to a retrofitted model."""
    return config is not None and _SWITCHED.get(id(config)) is config


def implementation(config: Any) -> str:
    """The implementation that a configuration selects, without our prefix."""
    return str(getattr(config, "_attn_implementation_internal", None) or "eager").removeprefix(PREFIX)


def register() -> None:
    """Register our functions with transformers, in this process."""
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
    """A mask as `[B, M]`, or None if only the future is hidden; other patterns as published."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
    )

    model_type = getattr(more.get("config"), "model_type", None)
    windowed = more.get("local_size") is not None and bool(more.get("allow_is_causal_skip"))
    windowed = windowed and model_type in (*OWN_WINDOWS, *BOTH_FORMS)
    plain = not recorded() and (windowed or mask_function in (causal_mask_function, bidirectional_mask_function))
    plain = plain and (attention_mask is None or attention_mask.dim() == 2)  # other shapes come from the caller
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_length + kv_offset
    by_token = plain and (mask_function is bidirectional_mask_function or at_end)
    whole = prepare_padding_mask(attention_mask, kv_length, kv_offset) if by_token else None  # it may have fewer tokens
    valid = None if whole is None else whole[:, kv_offset : kv_offset + kv_length]
    if valid is not None and not torch.compiler.is_compiling() and bool(valid.all()):
        valid = None
    if by_token and model_type not in BOTH_FORMS:
        return valid
    published: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[own](
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **more
    )
    if by_token and not torch.compiler.is_compiling():
        setattr(published, OF_TOKENS, (valid,))
    return published


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
    relpos_states: Any = None,
    relpos_pairs: Any = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of a switched configuration. With `by_token`, a mask `[B, 1, 1, M]` is one of ours.
    `relpos_states` come from a layer whose replaced position is made from them."""
    attend_repositioned = getattr(module, "attend_repositioned", None)  # set if the position was replaced
    shared: SharedSequence | None = getattr(module, "shared_sequence", None)
    if shared is not None:
        require_plain(recorded(), weights_are_recorded())
        require_no_dropout(dropout)
    if attend_repositioned is None and recorded():
        more |= {} if is_causal is None else {"is_causal": is_causal}
        more |= {} if position_bias is None else {"position_bias": position_bias}
        more |= {"dropout": dropout, "scaling": scaling}
        return _published(own, module)(module, query, key, value, attention_mask, **more)
    queries, keys = query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if by_token and attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = attention_mask[:, 0, 0]  # for a layer that reads its mask
    if attention_mask is not None and attention_mask.dim() == 4:
        causal = False  # such a mask includes causality
    if attend_repositioned is not None:
        refuse_weights(weights_are_recorded())  # there is no published version of a replaced position
        given = {"causal": causal, "scale": scaling, "dropout": dropout, "states": relpos_states}
        out = attend_repositioned(query, key, value, attention_mask, **given)
        return out.transpose(1, 2), None
    if shared is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        heads = (query, key, value)
        out = attend_by_offset(shared, heads, position_bias, attention_mask, causal=causal, scale=scale)
        return out.transpose(1, 2), None
    term: LineBias | IndexedBias | None = None
    if position_bias is not None and relpos_pairs:
        term = unchecked(IndexedBias, values=position_bias[0, :, 0], index=relpos_pairs[0])
    elif position_bias is not None and is_by_offset(position_bias, queries, keys):
        term = by_offset_term(position_bias, queries, keys)
    own_mask = attention_mask is None or attention_mask.dim() == 2
    if term is not None and (own_mask or is_added_by_key(attention_mask)):
        bias = Terms(term)
        if attention_mask is not None and not own_mask:  # it may hold numbers other than 0 and the dtype's minimum
            bias, attention_mask = bias + DenseBias(attention_mask.to(term.values.dtype)), None
        attend: Any = getattr(module, "attend", attention)  # a retrofitted module counts its calls
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
        # a constant bias has no effect, but published functions treat a caller's mask differently if there is a bias
        # but its parameters have a gradient of 0, as a decoder's own bias of a single token
        needless = own_mask and not position_bias.requires_grad
        position_bias = None if needless else position_bias.expand(-1, -1, queries, keys)
    if term is not None:
        warnings.warn(
            f"a mask of shape {tuple(attention_mask.shape)} came to a retrofitted layer, which expands its bias to "  # type: ignore[union-attr]
            "N x M numbers, as published. A mask of tokens, [batch, tokens], avoids that.",
            RuntimeWarning,
            stacklevel=2,
        )
        position_bias = _dense(term).to(query.dtype)
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
    """The function that the published layer calls."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return (
        sys.modules[type(module).__module__].eager_attention_forward if own == "eager" else ALL_ATTENTION_FUNCTIONS[own]
    )


def published_mask(
    own: str, mask: Tensor | None, query: Tensor, keys: int, *, causal: bool = False, window: int | None = None
) -> Tensor | None:
    """Our mask in the form that the published "sdpa" or "eager" function takes; others pass through.

    Beside `causal`, a query sees itself and the `window - 1` tokens before it.
    """
    queries = query.shape[2]
    hides_future, hides_past = causal and queries > 1, causal and window is not None and keys > window
    if mask is not None and mask.dim() != 2:
        return mask
    if mask is None and not hides_past and (not hides_future or (own == "sdpa" and queries == keys)):
        return None  # sdpa applies causality itself, but aligns fewer queries with the first keys
    allowed = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device) if mask is None else mask[:, None, None]
    if hides_future or hides_past:
        order = torch.arange(keys, device=query.device)
        distance = order[keys - queries :, None] - order
        allowed = allowed & ((distance >= 0) & (distance < (keys if window is None else window)))
    allowed = allowed.expand(-1, -1, queries, -1)
    if own == "sdpa":
        return allowed
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(allowed, zero, torch.finfo(query.dtype).min)


def mask_of(
    valid: Tensor | None, queries: int, keys: int, *, causal: bool = False, window: int | None = None
) -> Mask | None:
    """The mask of `[B, M]`, True (or 1) at real keys. Padded queries attend like others, as in transformers.

    Beside `causal`, a query sees itself and the `window - 1` tokens before it.
    """
    mask = None
    if causal:
        left = None if window is None or window >= keys else window - 1
        order = torch.arange(keys) if queries != keys else None
        mask = Mask(left, 0, query_order=None if order is None else order[keys - queries :], key_order=order)
    if valid is not None:
        everyone = torch.ones(valid.shape[0], queries, dtype=torch.bool, device=valid.device)
        padding = Mask.padding(valid.bool(), queries=everyone)
        mask = padding if mask is None else mask & padding
    return mask


def is_by_offset(bias: Tensor, queries: int, keys: int) -> bool:
    """Whether a bias holds one number per offset."""
    return bias.dim() == 4 and queries > 1 and bias.shape[2] == 1 and bias.shape[3] == queries + keys - 1


def is_added_by_key(mask: Any) -> bool:
    """Whether a mask, `[B, 1, 1, M]`, holds one number per key that is added for all queries (Switch's own). Boolean
    masks are excluded: their meaning depends on the implementation, and eager attention adds them."""
    return isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def by_offset_term(bias: Tensor, queries: int, keys: int) -> LineBias:
    """The term of a bias by offset, `[1, H, 1, N + M - 1]`, for the last queries of a sequence of keys."""
    line = lines(Sequence(queries, start=keys - queries), Sequence(keys), device=bias.device)
    return LineBias(bias[0, :, 0], line)


def dense_by_offset(bias: Tensor, queries: int, keys: int) -> Tensor:
    """A bias by offset as `[1, H, N, M]`."""
    return _dense(by_offset_term(bias, queries, keys))


def _dense(term: LineBias | IndexedBias) -> Tensor:
    """A bias as `[1 or B, H, N, M]`."""
    if isinstance(term, IndexedBias):
        return read_pairs(term.values, term.index)
    return expand_regular(term.values, term.lines)[None]


def weights_are_recorded() -> bool:
    """Whether the caller of a transformers model requested attention weights, which hooks record."""
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return False
    variable = library._active_collector
    if torch.compiler.is_compiling():  # Dynamo cannot read a context variable; the library keeps another for it
        collector = variable.global_var if variable.compiling else None
    else:
        collector = variable.get()
    return collector is not None and any("attentions" in key for key in collector)


def refuse_weights(wanted: bool | None) -> None:
    """Raise if a model whose position was replaced is asked for attention weights, `output_attentions=True`."""
    if wanted:
        expected = "output_attentions=False after relpos.replace_position, which computes no weights"
        fail(expected, "True", f"Leave it out; {LOST}")


def refuse_static(cache: Any) -> None:
    """Raise if a model whose position was replaced has a static cache."""
    if getattr(cache, "is_compileable", False):
        own = getattr(cache, "self_attention_cache", cache)  # an encoder-decoder model has two
        wanted, came = "a cache that grows, after relpos.replace_position", f"a static one ({type(own).__name__})"
        fail(wanted, came, f'Generate with cache_implementation="dynamic"; {LOST}')


LOST = "relpos.restore(model) would put the model's own position back."
"""Appended to messages: after a replacement, unlike after a retrofit, restoring is no remedy."""
