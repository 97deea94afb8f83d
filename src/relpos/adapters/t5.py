"""T5's buckets of distances: a table of numbers, one a bucket and head, made by the first layer for all.

    score[h, i, j] += relative_attention_bias[bucket(j - i), h]

Served by transformers' attention interface: `compute_bias` returns one number an offset, `[1, H, 1, N + M - 1]`, in
place of `[1, H, N, M]`. Later layers get that tensor. Cross-attention, which has no position, gets one zero in place
of N x M.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos.adapters.draws import Draws
from relpos.adapters.interface import dense_by_offset, refuse_weights
from relpos.adapters.kinds import Kind, Refused, Replaced, Verified
from relpos.adapters.retrofitted import Retrofitted, is_swapped
from relpos.core import LineBias, Sequence
from relpos.core.checks import fail
from relpos.position import T5Bias


class T5Attention(Retrofitted):
    """`T5Attention` and its copies in other architectures."""

    border = 512
    training_border = 256

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        """The bias: one number an offset where relpos attends."""
        at_end = isinstance(past_seen_tokens, int) and past_seen_tokens + query_length == key_length
        if not (at_end and self.takes(query_length, key_length)):
            published: Tensor = super().compute_bias(query_length, key_length, device, past_seen_tokens)  # type: ignore[misc]
            return published
        table: Tensor = self.relative_attention_bias.weight  # type: ignore[union-attr, assignment]
        bias = T5Bias(
            table.shape[1],
            num_buckets=table.shape[0],
            max_distance=self.relative_attention_max_distance,  # type: ignore[arg-type]
            bidirectional=not getattr(self, "is_decoder", True),  # pix2struct's text model is a decoder, and says nothing
            init_std=0.0,
        )
        terms = bias.terms_from(
            {"relative_attention_bias": table}, Sequence(query_length, start=past_seen_tokens), Sequence(key_length)
        )
        values = next(term for term in terms if isinstance(term, LineBias)).values
        return values[None, :, None]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The published forward, without its N x M zeros where there is no position."""
        names = ("mask", "key_value_states", "position_bias", "past_key_values")
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        refuse_weights(kwargs.get("output_attentions"))
        if getattr(kwargs.get("past_key_values"), "is_compileable", False):
            fail(
                "a cache that grows, after relpos.retrofit",
                type(kwargs["past_key_values"]).__name__,
                'Generate with cache_implementation="dynamic", or call relpos.restore(model) first.',
            )
        if kwargs.get("position_bias") is None and not self.has_relative_attention_bias:
            kwargs["position_bias"] = hidden_states.new_zeros(1, self.n_heads, 1, 1)  # type: ignore[arg-type]
        return super().forward(hidden_states, **kwargs)


def _run(module: Any, draws: Draws) -> tuple[Tensor, ...]:
    """A layer with a bias: its own, then the one that the layer before it hands on; and one that attends to others."""
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    config, tokens = module.config, draws.tokens
    padding = draws.padding(draws.batch, tokens)
    x, y = (draws.normal(draws.batch, tokens, module.q.in_features) for _ in range(2))
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


_LIKE_T5 = {
    "t5": "T5Attention",
    "mt5": "MT5Attention",
    "umt5": "UMT5Attention",
    "switch_transformers": "SwitchTransformersAttention",
    "pix2struct": "Pix2StructTextAttention",
    "pop2piano": "Pop2PianoAttention",
    "longt5": "LongT5Attention",
}


def _path(architecture: str, name: str) -> str:
    return f"transformers.models.{architecture}.modeling_{architecture}.{name}"


KINDS = (
    Kind(
        name="T5 buckets",
        library="transformers",
        switches=True,
        replaced=tuple(
            Replaced(
                architecture,
                _path(architecture, name),
                T5Attention,
                reads=("forward", "compute_bias", "_relative_position_bucket"),
            )
            for architecture, name in _LIKE_T5.items()
        ),
        verified=tuple(
            Verified(_path(architecture, name), _run, tables=("relative_attention_bias.weight",))
            for architecture, name in _LIKE_T5.items()
        ),
        refused=(
            Refused("longt5", _path("longt5", "LongT5LocalAttention"), "it attends within blocks, in O(N) as it is"),
        ),
    ),
)
