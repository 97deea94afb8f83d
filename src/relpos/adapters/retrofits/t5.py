"""T5's buckets of distances: a table of one number per bucket and head. The first layer makes the bias for all layers.

    score[h, i, j] += relative_attention_bias[bucket(j - i), h]

Served through transformers' attention interface: `compute_bias` returns one number per offset, `[1, H, 1, N + M - 1]`,
in place of `[1, H, N, M]`. Later layers get that tensor. Cross-attention has no position and gets one zero in place of
N x M.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos.adapters.common.borders import SEQUENCE_ON_GPU
from relpos.adapters.common.interface import (
    by_offset_term,
    dense_by_offset,
    is_by_offset,
    is_switched,
    mask_of,
    published_mask,
    require_switched,
)
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, paused, rows_of
from relpos.core import LineBias, Sequence, Terms
from relpos.position import T5Bias


def by_offset(bias: T5Bias, table: Tensor, queries: int, keys: int) -> Tensor:
    """The bias of the last `queries` of `keys` tokens, one number per offset: `[1, H, 1, N + M - 1]`."""
    terms = bias.terms_from({"relative_attention_bias": table}, Sequence(queries, start=keys - queries), Sequence(keys))
    values = next(term for term in terms if isinstance(term, LineBias)).values
    return values[None, :, None]


class T5Attention(Retrofitted):
    """`T5Attention` and its copies in other architectures."""

    # equal borders: reentrant checkpointing first runs a layer without gradients, and the next layer keeps that bias
    border = 512
    training_border = 512
    on_gpu = SEQUENCE_ON_GPU

    def make_mechanism(self) -> T5Bias | None:
        """T5's bias if the layer has a table, else None."""
        if "relative_attention_bias" not in self._modules:
            return None
        buckets, heads = self.relative_attention_bias.weight.shape
        return T5Bias(
            heads,
            num_buckets=buckets,
            max_distance=self.relative_attention_max_distance,
            bidirectional=not getattr(self, "is_decoder", True),  # Pix2Struct's text decoder lacks the attribute
            init_std=0.0,
        )

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
        """The bias: one number per offset if relpos attends."""
        if self.shared_sequence is not None:
            query_length, key_length = (count * self.shared_sequence.size for count in (query_length, key_length))
        at_end = isinstance(past_seen_tokens, int) and past_seen_tokens + query_length == key_length
        served = at_end and is_switched(self.config)  # `set_attn_implementation` may have undone it
        if not (served and self.takes(query_length, key_length)):
            published: Tensor = super().compute_bias(query_length, key_length, device, past_seen_tokens)  # type: ignore[misc]
            return published
        return by_offset(self.mechanism, rows_of(self.relative_attention_bias), query_length, key_length)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The published forward, without its N x M zeros if there is no position."""
        names = ("mask", "key_value_states", "position_bias", "past_key_values")
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        if self.shared_sequence is not None:
            require_switched(self.config)
        if kwargs.get("position_bias") is None and not self.has_relative_attention_bias:
            kwargs["position_bias"] = hidden_states.new_zeros(1, self.n_heads, 1, 1)
        if kwargs.get("output_attentions"):
            with paused(self):
                return super().forward(hidden_states, **kwargs)
        return super().forward(hidden_states, **kwargs)


class Pix2StructTextAttention(T5Attention):
    """A layer that cuts its mask to the number of keys and needs it in four dimensions."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        if mask is not None and mask.dim() == 2:
            mask, kwargs["by_token"] = mask[:, None, None], True
        return super().forward(hidden_states, mask, *args, **kwargs)


class UMT5Attention(T5Attention):
    """Every self-attention layer has its own table; no layer takes another's bias."""

    def compute_bias(self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
        """The bias; one zero if the layer attends to other tokens."""
        if "relative_attention_bias" not in self._modules:
            self.count()
            return next(self.parameters()).new_zeros(1, self.n_heads, 1, 1)
        return super().compute_bias(query_length, key_length, device, past_seen_tokens)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The published forward; without a position, it calls `compute_bias` instead of making N x M zeros."""
        module: Any = self
        if self.shared_sequence is not None:
            require_switched(self.config)
        has_table = "relative_attention_bias" in self._modules
        module.has_relative_attention_bias = True
        try:
            return super(T5Attention, self).forward(hidden_states, *args, **kwargs)
        finally:
            module.has_relative_attention_bias = has_table  # not the previous value: another thread may have set it


class MPNetEncoder(Retrofitted):
    """MPNet's encoder, which makes the bias for all layers."""

    border = T5Attention.border
    training_border = T5Attention.training_border
    on_gpu = T5Attention.on_gpu

    def make_mechanism(self) -> T5Bias:
        """T5's bias with MPNet's sizes."""
        buckets, heads = self.relative_attention_bias.weight.shape
        return T5Bias(heads, num_buckets=buckets, max_distance=128, init_std=0.0)

    def compute_position_bias(self, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
        """The bias: one number per offset if relpos attends."""
        tokens = x.shape[1]
        known = num_buckets == self.relative_attention_bias.weight.shape[0]
        if position_ids is not None or not known or not self.takes(tokens, tokens):
            published: Tensor = super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
            return published
        self.count()
        return by_offset(self.mechanism, rows_of(self.relative_attention_bias), tokens, tokens)


class MPNetSelfAttention(Retrofitted):
    """A layer that is given the bias."""

    border = T5Attention.border
    training_border = T5Attention.training_border
    on_gpu = T5Attention.on_gpu

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Attention by relpos if the bias is by offset and the mask by token, else as published."""
        batch, tokens = hidden_states.shape[:2]
        by_token = attention_mask is None or attention_mask.dim() == 2
        by_offset = position_bias is not None and is_by_offset(position_bias, tokens, tokens)
        if output_attentions or position_bias is None or not (by_token and by_offset):
            mask = published_mask("eager", attention_mask, hidden_states[:, None], tokens)
            if position_bias is not None and by_offset:
                position_bias = dense_by_offset(position_bias, tokens, tokens).to(hidden_states.dtype)
            published: tuple[Tensor, ...] = super().forward(hidden_states, mask, position_bias, output_attentions)
            return published
        q, k, v = (
            part(hidden_states).view(batch, tokens, self.num_attention_heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        bias = by_offset_term(position_bias, tokens, tokens)
        dropout: float = self.dropout.p if self.training else 0.0
        mask_ = mask_of(attention_mask, tokens, tokens)
        attended = self.attend(q, k, v, position=Terms(bias), mask=mask_, dropout=dropout)
        return (self.o(attended.transpose(1, 2).flatten(2)),)


def _width(module: Any) -> int:
    """The width of tokens, from the first parameter, which projects them to queries."""
    return int(next(module.parameters()).shape[1])


def run_attention(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run a layer with a bias from an earlier layer, with its own if it has a table, and as cross-attention."""
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    config, tokens = module.config, draws.tokens
    padding = draws.padding(draws.batch, tokens)
    x, y = (draws.normal(draws.batch, tokens, _width(module)) for _ in range(2))
    if module.is_causal:
        mask = create_causal_mask(config, x, padding, past_key_values=None)
    else:
        mask = create_bidirectional_mask(config, x, padding)
    bias = draws.normal(1, module.n_heads, 1, 2 * tokens - 1)
    handed_on = bias if is_swapped(module) else dense_by_offset(bias, tokens, tokens)
    outputs: list[Tensor] = [module(x, mask=mask, position_bias=handed_on)[0]]
    if module.has_relative_attention_bias:
        own, bias, _ = module(x, mask=mask)
        outputs += [own, module(own, mask=mask, position_bias=bias)[0]]
    if not module.is_causal:
        mask = create_bidirectional_mask(config, x, padding, encoder_hidden_states=y)
        outputs.append(module(x, mask=mask, key_value_states=y)[0])
    return tuple(outputs)


def _run_umt5(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run a layer as self-attention or cross-attention."""
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    config, tokens = module.config, draws.tokens
    padding = draws.padding(draws.batch, tokens)
    x, y = (draws.normal(draws.batch, tokens, _width(module)) for _ in range(2))
    if "relative_attention_bias" not in module._modules:
        mask = create_bidirectional_mask(config, x, padding, encoder_hidden_states=y)
        return (module(x, encoder_hidden_states=y, attention_mask=mask)[0],)
    if module.is_causal:
        mask = create_causal_mask(config, x, padding, past_key_values=None)
    else:
        mask = create_bidirectional_mask(config, x, padding)
    return (module(x, attention_mask=mask)[0],)


def _run_mpnet_encoder(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """The bias of all layers as a dense tensor."""
    x = draws.normal(draws.batch, draws.tokens, 4)
    bias = module.compute_position_bias(x) + 0 * x.sum()
    bias = dense_by_offset(bias, draws.tokens, draws.tokens) if is_swapped(module) else bias[:1]
    return (bias,)


def _run_mpnet(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run a layer that is given the bias."""
    tokens = draws.tokens
    x = draws.normal(draws.batch, tokens, module.q.in_features)
    bias = draws.normal(1, module.num_attention_heads, 1, 2 * tokens - 1)
    mask: Tensor | None = draws.padding(draws.batch, tokens).bool()
    if not is_swapped(module):
        mask, bias = published_mask("eager", mask, x[:, None], tokens), dense_by_offset(bias, tokens, tokens)
    return (module(x, mask, bias)[0],)


_LIKE_T5: dict[str, tuple[str, type[Retrofitted]]] = {
    "t5": ("T5Attention", T5Attention),
    "mt5": ("MT5Attention", T5Attention),
    "switch_transformers": ("SwitchTransformersAttention", T5Attention),
    "pix2struct": ("Pix2StructTextAttention", Pix2StructTextAttention),
    "pop2piano": ("Pop2PianoAttention", T5Attention),
    "longt5": ("LongT5Attention", T5Attention),
}


_UMT5 = class_path("umt5", "UMT5Attention")

KINDS = (
    PositionKind(
        name="T5 buckets",
        library="transformers",
        switches=True,
        replaced=(
            *tuple(
                Replaced(architecture, name, mixin, reads=("forward", "compute_bias", "_relative_position_bucket"))
                for architecture, (name, mixin) in _LIKE_T5.items()
            ),
            Replaced("umt5", _UMT5, UMT5Attention, reads=("forward", "compute_bias", "_relative_position_bucket")),
            Replaced("mpnet", "MPNetEncoder", MPNetEncoder, ("compute_position_bias", "relative_position_bucket")),
            Replaced("mpnet", "MPNetSelfAttention", MPNetSelfAttention),
        ),
        verified=(
            *tuple(
                Verified(class_path(architecture, name), run_attention, tables=("relative_attention_bias.weight",))
                for architecture, (name, _) in _LIKE_T5.items()
            ),
            Verified(_UMT5, _run_umt5, tables=("relative_attention_bias.weight",)),
            Verified(
                class_path("mpnet", "MPNetEncoder"),
                _run_mpnet_encoder,
                tables=("relative_attention_bias.weight",),
                without=("layer",),
            ),
            Verified(class_path("mpnet", "MPNetSelfAttention"), _run_mpnet, tables=()),
        ),
        refused=(Refused("longt5", "LongT5LocalAttention", "it attends within blocks, already in O(N)"),),
    ),
)
