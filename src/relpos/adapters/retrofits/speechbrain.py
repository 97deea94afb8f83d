"""SpeechBrain: Transformer-XL's positions in its Conformers and Branchformers.

    score[h, i, j] = ( <q[i] + u[h], k[j]> + <q[i] + v[h], W[h] r(i - j)> ) / sqrt(E)

E is the width of all heads together, and u and v are stored as `[D, H]` but read in that order as `[H, D]`.
`mask_pos_future` zeroes columns that are then cut off, and so nothing.

Encoders return the weights of every layer unless told otherwise, and nobody tells them. `TransformerASR` and the blocks
of separators discard them: within these, relpos computes and a layer has None in their place. An encoder that is called
by itself runs as published.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.pair_masks import mask_of_pairs
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.adapters.retrofits.transformer_xl import transformer_xl_terms
from relpos.core import Mask

_discarded: ContextVar[bool] = ContextVar("relpos_speechbrain_weights_discarded", default=False)
"""Whether a caller discards the attention weights that its layers return."""


@contextmanager
def _discarding(discards: bool = True):  # type: ignore[no-untyped-def]
    """Let layers return None for weights; nothing under torch.compile, which follows no context variable."""
    token = _discarded.set(discards and not torch.compiler.is_compiling())
    try:
        yield
    finally:
        _discarded.reset(token)


class TransformerASR(Retrofitted):
    """The model, which discards the weights of its layers if it decodes, or encodes alone."""

    border = 1024
    training_border = 1024

    def forward(self, src: Tensor, tgt: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """The published forward."""
        with _discarding(tgt is not None):
            return super().forward(src, tgt, *args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """The published method."""
        with _discarding():
            return super().encode(*args, **kwargs)  # type: ignore[misc]


class SeparatorBlock(Retrofitted):
    """A Conformer in a separator, whose forward discards the weights."""

    border = TransformerASR.border
    training_border = TransformerASR.training_border

    def forward(self, x: Tensor) -> Any:
        """The published forward."""
        with _discarding():
            return super().forward(x)


class SpeechBrainAttention(Retrofitted):
    """`RelPosMHAXL`."""

    border = TransformerASR.border
    training_border = TransformerASR.training_border

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_embs: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        return_attn_weights: bool = True,
    ) -> Any:
        """`out`, or `(out, None)` within a caller that discards weights. As published for weights, cross-attention,
        and masks that are not of intervals."""
        tokens = query.shape[1]
        unread = _discarded.get() or not return_attn_weights
        alike = query is key and key is value and pos_embs.shape[:2] == (1, 2 * tokens - 1)
        served = unread and alike and self._qkv_same_embed_dim and self.takes(tokens, tokens)
        masks = (key_padding_mask, attn_mask)
        plain = masks == (None, None)
        mask = _mask(key_padding_mask, attn_mask, tokens) if served and not plain else None
        if not served or (mask is None and not plain):
            return super().forward(query, key, value, pos_embs, *masks, return_attn_weights)
        mixed = torch.nn.functional.linear(query, self.in_proj_weight)
        q, k, v = mixed.unflatten(-1, (self.num_heads, 3 * self.head_dim)).transpose(1, 2).chunk(3, dim=-1)
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(self.num_heads, 1, self.vhead_dim)
        by_head = (self.num_heads, self.head_dim)
        u_bias, v_bias = self.pos_bias_u.view(by_head), self.pos_bias_v.view(by_head)
        out = self.attend(
            q,
            k,
            v,
            position=transformer_xl_terms(self.linear_pos(pos_embs)[0], u_bias, v_bias),
            mask=mask,
            scale=self.scale,
            dropout=self.dropout_att.p if self.training else 0.0,
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out, None) if return_attn_weights else out


def _mask(by_key: Tensor | None, of_pairs: Tensor | None, tokens: int) -> Mask | None:
    """The mask of both, True where hidden; a float mask of 0 and -inf is one. None if it cannot be served."""
    if by_key is not None and by_key.dtype != torch.bool:
        return None
    if of_pairs is None:
        return None if by_key is None else mask_of_pairs(by_key[:, None], tokens)
    if of_pairs.shape != (tokens, tokens) or torch.compiler.is_compiling():
        return None
    hidden = of_pairs
    if of_pairs.is_floating_point():  # get_lookahead_mask
        hidden = of_pairs.isneginf()
        if not bool((hidden | (of_pairs == 0)).all()):
            return None
    return mask_of_pairs(hidden[None] if by_key is None else hidden | by_key[:, None], tokens)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run with padding, and with chunks beside it."""
    tokens, width = draws.tokens, module.embed_dim
    x, pos_embs = draws.normal(draws.batch, tokens, width), draws.normal(1, 2 * tokens - 1, width)
    hidden = ~draws.padding(draws.batch, tokens).bool()
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    call = {"pos_embs": pos_embs, "return_attn_weights": False}
    masks = {"key_padding_mask": hidden}, {"key_padding_mask": hidden, "attn_mask": later}
    return tuple(module(x, x, x, **call, **more) for more in masks)


_ATTENTION = "speechbrain.nnet.attention.RelPosMHAXL"
_LOBES = "speechbrain.lobes.models."
_DISCARDED = (
    *(f"{_LOBES}transformer.Conformer.Conformer{part}" for part in ("Encoder", "EncoderLayer")),
    *(f"{_LOBES}transformer.Branchformer.Branchformer{part}" for part in ("Encoder", "EncoderLayer")),
)
"""The classes between a layer's weights and the caller that discards them."""

KINDS = (
    PositionKind(
        name="Transformer-XL",
        library="speechbrain",
        replaced=(
            Replaced("speechbrain", _ATTENTION, SpeechBrainAttention, ("forward", "rel_shift")),
            *(
                Replaced(
                    "speechbrain",
                    f"{_LOBES}transformer.{name}.{name}",
                    TransformerASR,
                    ("forward", "encode", *_DISCARDED),
                )
                for name in ("TransformerASR", "TransformerST")
            ),
            Replaced(
                "speechbrain",
                f"{_LOBES}dual_path.SBConformerEncoderBlock",
                SeparatorBlock,
                ("forward", *_DISCARDED),
            ),
        ),
        verified=(Verified(_ATTENTION, _run, ("pos_bias_u", "pos_bias_v", "linear_pos.weight")),),
    ),
)
