"""Models of other libraries whose tokens are spread over ranks: which can be, and how their layers attend.

`relpos.parallel.context_parallel` sets `shared_sequence` on each retrofitted module. The model then takes each rank's
share of the tokens. All it computes beside attention must belong to single tokens: no pooling, no convolution. So
only the models listed here are spread.

    self-attention      q, k, v of this rank's tokens, the position and mask of all      `SharedSequence.attend`
    cross-attention     q of this rank's tokens, and all keys and values, without position
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from relpos.core import LineBias, Mask, Sequence, Terms, lines
from relpos.core.checks import fail
from relpos.engines import attention
from relpos.layers.context import SharedSequence

_LIKE_T5 = ("Stack", "Model", "EncoderModel", "ForConditionalGeneration", "ForTokenClassification")
SPREAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "t5": ("T5", _LIKE_T5),
    "mt5": ("MT5", _LIKE_T5),
    "umt5": ("UMT5", _LIKE_T5),
    "mpt": ("Mpt", ("Model", "ForCausalLM", "ForTokenClassification")),
    "bloom": ("Bloom", ("Model", "ForCausalLM", "ForTokenClassification")),
    "llama": ("Llama", ("Model", "ForCausalLM", "ForTokenClassification")),
    "gpt2": ("GPT2", ("Model", "LMHeadModel", "ForTokenClassification")),
    "bert": ("Bert", ("Model", "ForMaskedLM", "ForTokenClassification")),
}
"""By architecture of transformers, the start of its classes' names and the ends of those whose outputs are by token.
The first five are retrofitted, or replaced in an encoder of T5; the others are replaced."""

_ATTENTION = (
    "T5Attention", "MT5Attention", "UMT5Attention", "MptAttention", "BloomAttention", "LlamaAttention",
    "GPT2Attention", "BertSelfAttention", "BertCrossAttention",
)  # fmt: skip
_LOCAL = {
    "labels": "Compute the loss from the logits and relpos.parallel.shard(labels, mesh): a shift would end at shares.",
    "position_ids": "Leave it out: each rank's tokens are numbered within the whole sequence.",
    "past_key_values": "Generate in one process: context_parallel(model, None).",
}
_GUARDED: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def require_spreadable(model: nn.Module) -> None:
    """Raise unless all that a model computes beside attention belongs to single tokens.

    Raises:
        ValueError: a class that is not listed, or an attention layer that runs as published.
    """
    for name, module in model.named_modules():
        kind = type(module)
        at = f"{kind.__name__}{f' at {name}' if name else ''}"
        swapped = hasattr(kind, "shared_sequence")
        ours = kind.__module__.startswith("relpos.")
        if (_is_model(module) or (swapped and not ours)) and not _is_listed(kind):
            families = ", ".join(start for start, _ in SPREAD.values())
            remedy = "Call relpos.parallel.context_attention in its attention, with coordinates of all tokens."
            fail(f"a model by token of {families} where its relpos attends over several ranks", at, remedy)
        if kind.__name__ in _ATTENTION and not swapped:
            remedy = "Call relpos.retrofit or relpos.replace_position on the whole model; others attend to a share."
            fail("relpos in every attention layer", f"{at} as published", remedy)
        if kind.__name__ == "BertModel" and getattr(module, "pooler", None) is not None:
            fail("a BertModel without pooler", at, "Build it with add_pooling_layer=False: its token is of one rank.")


def guard(model: nn.Module, context: SharedSequence | None) -> None:
    """Let the library's models within a model refuse arguments of whole sequences; None ends it."""
    for module in model.modules():
        if _is_model(module):
            if (handle := _GUARDED.pop(module, None)) is not None:
                handle.remove()
            if context is not None:
                _GUARDED[module] = module.register_forward_pre_hook(_refuse_local, with_kwargs=True)


def _is_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, by the name of the base class."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def _is_listed(kind: type[nn.Module]) -> bool:
    if kind.__name__ == "Embedding" and kind.__module__.startswith("torch."):
        return True  # of positions, in GPT-2 and BERT
    parts = kind.__module__.split(".")
    if parts[:2] != ["transformers", "models"] or parts[2] not in SPREAD:
        return False
    start, ends = SPREAD[parts[2]]
    models = any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)
    return kind.__name__ in [start + end for end in ends] if models else kind.__name__.startswith(start)


def _refuse_local(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if all(getattr(one, "shared_sequence", None) is None for one in module.modules()):
        return  # it was restored
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    for name, remedy in _LOCAL.items():
        if given.get(name) is not None:
            fail(f"no {name} where ranks share a sequence", name, remedy)


def require_plain(recorded: bool, weights: bool) -> None:
    """Raise where a call would run as published, which would attend to this rank's tokens alone."""
    if recorded or weights:
        came = "a program that is recorded" if recorded else "attention weights requested"
        fail("a plain call where ranks share a sequence", came, "Call context_parallel(model, None) first.")


def require_no_dropout(dropout: float) -> None:
    """Raise where attention weights would be dropped."""
    if dropout:
        remedy = "Each would draw its own: set the attention dropout of its configuration to 0, or call model.eval()."
        fail("no dropout of attention weights over several ranks", f"{dropout:g}", remedy)


def require_by_token(mask: Tensor | Mask | None) -> None:
    """Raise unless a mask is of tokens, or there is none."""
    if isinstance(mask, Mask) or (mask is not None and mask.dim() != 2):
        came = repr(mask) if isinstance(mask, Mask) else f"one of {mask.dim()} dimensions"
        fail("a mask of this rank's tokens, [batch, tokens], or none", came, "Pass attention_mask=shard(mask, mesh).")


def whole_valid(shared: SharedSequence, k: Tensor, valid: Tensor | Mask | None) -> Tensor | None:
    """Which of all keys are real, `[B, M]`, or None if all are: a rank without padding has no mask.

    Raises:
        ValueError: a mask of pairs.
    """
    require_by_token(valid)
    assert not isinstance(valid, Mask)
    own = k.new_ones(k.shape[0], k.shape[2]) if valid is None else valid.to(k.dtype)
    found = shared.whole(own.detach()) > 0
    return None if bool(found.all()) else found


def whole_mask(valid: Tensor | None, tokens: int, causal: bool) -> Mask | None:
    """The mask among all tokens. Padded queries attend like others, as in transformers."""
    mask = Mask.causal() if causal else None
    if valid is not None:
        padding = Mask.padding(valid, queries=torch.ones_like(valid))
        mask = padding if mask is None else mask & padding
    return mask


def attend_by_offset(
    shared: SharedSequence,
    heads: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    valid: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of this rank's queries, `[B, H, n, D]`.

    Args:
        bias: of all N tokens by offset, `[1, H, 1, 2 N - 1]`: self-attention. None or `[1, H, 1, 1]`: cross-attention.
        valid: `[B, m]`, True or 1 at this rank's real keys.
    """
    q, k, v = heads
    allowed = whole_valid(shared, k, valid)
    if bias is None or bias.shape[3] == 1:
        if causal:
            fail("self-attention with a position, or cross-attention", "causal attention without position", _REPORT)
        keys, values = shared.whole(k, dim=2), shared.whole(v, dim=2)
        everyone = None if allowed is None else q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool)
        mask = None if allowed is None else Mask.padding(allowed, queries=everyone)
        out = attention(q, keys, values, mask=mask, scale=scale)
        assert isinstance(out, Tensor)
        return out
    tokens = q.shape[2] * shared.size
    if q.shape[2] != k.shape[2] or bias.shape[2] != 1 or bias.shape[3] != 2 * tokens - 1:
        fail("a bias by offset of all tokens", f"shape {tuple(bias.shape)} for {tokens}", _REPORT)
    term = LineBias(bias[0, :, 0], lines(Sequence(tokens), Sequence(tokens), device=bias.device))
    mask = whole_mask(allowed, tokens, causal)
    return shared.attend(
        heads, position=None, terms=Terms(term), coordinates=None, mask=mask, scale=scale, states=q.transpose(1, 2)
    )


def attend_by_slopes(
    shared: SharedSequence,
    heads: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    valid: Tensor | None,
    scale: float,
) -> Tensor:
    """Causal attention of this rank's queries with ALiBi's slopes `[H]`, `[B, H, n, D]`; others as above."""
    tokens = heads[0].shape[2] * shared.size
    line = lines(Sequence(tokens), Sequence(tokens), device=slopes.device)
    bias = -slopes[:, None] * line.offsets().axes[:, 0]
    return attend_by_offset(shared, heads, bias[None, :, None], valid, causal=True, scale=scale)


def mask_by_key(mask: Tensor | None, tokens: Tensor, causal: bool) -> Tensor:
    """A mask of this rank's tokens in the form that the layers of BLOOM and MPT take, `[B, 1, 1, n]` or `[1, 1, n, 1]`.

    Raises:
        ValueError: what they do not compute by relpos.
    """
    count = tokens.shape[1]
    if count < 2:
        fail("at least 2 tokens on each rank", "1", "Use fewer ranks for so short a sequence.")
    if not causal:
        fail("a causal model", "is_causal=False", "Its bias has no direction over several ranks.")
    require_by_token(mask)
    if mask is None:
        return torch.zeros(1, 1, count, 1, dtype=torch.bool, device=tokens.device)
    return ~mask.bool()[:, None, None].to(tokens.device)


def require_exact(shared: SharedSequence, hidden: Tensor, dtype: torch.dtype) -> None:
    """Raise where BLOOM's published bias, which counts real tokens and is rounded to the dtype, is not by offset.

    Args:
        hidden: from `mask_by_key`.
    """
    if dtype not in (torch.float32, torch.float64):
        remedy = "The published bias rounds the number of each token: use model.float()."
        fail("BLOOM in float32 or float64 where ranks share a sequence", str(dtype), remedy)
    own = hidden.any().to(dtype).expand(1, 2)  # a zigzag has two parts
    if bool(shared.whole(own).any()):
        fail("no padding in BLOOM where ranks share a sequence", "padded tokens", "Pack texts without padding.")


_REPORT = "Call the model as a whole, without a cache."
