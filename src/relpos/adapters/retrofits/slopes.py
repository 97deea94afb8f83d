"""ALiBi's slopes in BLOOM, MPT and Falcon: a bias that falls linearly with the distance, with one slope per head.

    score[h, i, j] += slope[h] * j          which in a softmax over j is slope[h] * (j - i)

The published bias is one number per key, in addition to an N x N causal mask. In BLOOM and MPT, the model makes no such
mask if it gets one with four dimensions, so it gets only the padding,

    [B, 1, 1, M]    True at padded keys
    [1, 1, M, 1]    nothing is padded

and a layer that gets one of these attends with relpos. Without padding the bias is one number per offset. With padding,
and in half precision, where each key's number is rounded, the bias becomes one more component of the key, multiplied
with a 1 in every query:

    <(q, 1), (k[j], bias[j])> = <q, k[j]> + bias[j]

Falcon always rounds each key's number to bfloat16. From a mask with four dimensions it makes a mask of all pairs that
includes the bias; from a switched configuration's mask it does not. A padded query attends to no key, or to other keys
than as published.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from relpos.adapters.common import interface, sharing
from relpos.adapters.common.interface import mask_of, published_mask
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, published_class
from relpos.core import LineBias, Sequence, Terms, at_least_float32, lines
from relpos.core.checks import fail


class AlibiModel(Retrofitted):
    """`BloomModel` and `MptModel`: the mask that they pass to their layers."""

    border = 512
    training_border = 768

    def forward(
        self,
        input_ids: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        **more: Any,
    ) -> Any:
        """The published forward."""
        tokens = inputs_embeds if input_ids is None else input_ids
        asked = self.config.output_attentions if output_attentions is None else output_attentions
        if tokens is not None and self.shared_sequence is not None:
            sharing.require_plain(not self.takes(*tokens.shape[:2]), bool(asked))
            attention_mask = sharing.mask_by_key(attention_mask, tokens, getattr(self.config, "is_causal", True))
        elif tokens is not None:
            attention_mask = self.handed_on(attention_mask, tokens, past_key_values, asked)
        return super().forward(
            input_ids, past_key_values, attention_mask, inputs_embeds, use_cache, output_attentions, **more
        )

    def handed_on(self, mask: Tensor | None, tokens: Tensor, cache: Any, asked: bool) -> Tensor | None:
        """The mask that lets the layers attend by relpos, or the caller's mask if they cannot (weights were
        requested)."""
        queries = tokens.shape[1]
        keys = queries + (0 if cache is None else cache.get_seq_length())
        if mask is not None and mask.dim() == 4:
            return self.of_caller(mask, queries, keys)
        if (
            asked
            or getattr(cache, "is_compileable", False)
            or not getattr(self.config, "is_causal", True)
            or not self.takes(queries, keys)
            or (mask is not None and mask.shape != (tokens.shape[0], keys))
        ):
            return mask
        if mask is None or (not torch.compiler.is_compiling() and bool(mask.all())):
            return torch.zeros(1, 1, keys, 1, dtype=torch.bool, device=tokens.device)
        return ~mask.bool()[:, None, None].to(tokens.device)

    def of_caller(self, mask: Tensor, queries: int, keys: int) -> Tensor:
        """A caller's mask of four dimensions, expanded so that it does not look like ours."""
        sizes = (new if old == 1 else -1 for old, new in zip(mask.shape[2:], (queries, keys), strict=True))
        return mask.expand(-1, -1, *sizes)


class BloomModel(AlibiModel):
    """`BloomModel`, which refuses masks of four dimensions."""

    def of_caller(self, mask: Tensor, queries: int, keys: int) -> Tensor:
        self._published(mask, self.num_heads, torch.float32)  # raises, as published
        return mask

    def build_alibi_tensor(self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """One number per key, or only the slopes, `[H, 1, 1]`, if nothing is padded or rounded."""
        if self.shared_sequence is not None:
            sharing.require_exact(self.shared_sequence, attention_mask, dtype)
            both = torch.ones(1, 2, dtype=torch.long, device=attention_mask.device)
            return self._published(both, num_heads, dtype)[..., 1:]
        if attention_mask.dim() != 4:
            return self._published(attention_mask, num_heads, dtype)
        if attention_mask.shape[3] != 1:
            return self._published((~attention_mask[:, 0, 0]).long(), num_heads, dtype)
        whole = torch.ones_like(attention_mask[:, 0, :, 0], dtype=torch.long)
        if dtype in (torch.float32, torch.float64):
            return self._published(whole[:, :2], num_heads, dtype)[..., 1:]
        return self._published(whole, num_heads, dtype)

    def _published(self, mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = super().build_alibi_tensor(mask, heads, dtype)  # type: ignore[misc]
        return made


class AlibiAttention(Retrofitted):
    """Common base of BLOOM's and MPT's attention."""

    border = AlibiModel.border
    training_border = AlibiModel.training_border

    def attended_by_share(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float, dropout: float, hidden: Tensor | None
    ) -> Tensor:
        """As `attended`, where the tokens are a share of a sequence; hidden `[B, n]`, True at padded keys."""
        assert self.shared_sequence is not None
        sharing.require_no_dropout(dropout)
        valid = None if hidden is None else ~hidden
        out = sharing.attend_by_slopes(self.shared_sequence, (q, k, v), at_least_float32(slopes), valid, scale)
        return out.transpose(1, 2).flatten(2)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float, dropout: float) -> Tensor:
        """The input of the output projection, `[B, N, E]`, with a bias of slopes `[H]`."""
        queries, keys, device = q.shape[2], k.shape[2], q.device
        line = self.cached(
            (queries, keys),
            device,
            lambda: lines(Sequence(queries, start=keys - queries), Sequence(keys), device=device),
            queries + keys,
        )
        bias = LineBias(-at_least_float32(slopes)[:, None] * line.offsets().axes[:, 0], line)
        mask = mask_of(None, queries, keys, causal=True)
        out = self.attend(q, k, v, position=Terms(bias), mask=mask, scale=scale, dropout=dropout)
        return out.transpose(1, 2).flatten(2)


def attended_by_key(
    module: Retrofitted,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    hidden: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """The input of the output projection, `[B, N, E]`, with one bias per key.

    Args:
        bias: `[1 or B, H, 1, M]`, scaled like the products of q and k.
        hidden: `[B, M]`, True at padded keys.
    """
    bias = bias.to(k.dtype)
    if hidden is not None:  # a quarter of the minimum, because more is added
        bias = bias.masked_fill(hidden[:, None, None], torch.finfo(k.dtype).min / 4)
    width = q.shape[-1]
    wider = -(width + 1) % 8  # kernels prefer multiples of 8
    q = pad(pad(q, (0, 1), value=1.0), (0, wider))
    k = pad(torch.cat((k, bias.mT.expand(*k.shape[:3], 1)), -1), (0, wider))
    v = pad(v, (0, 1 + wider))
    mask = mask_of(None, q.shape[2], k.shape[2], causal=True)
    out = module.attend(q, k, v, mask=mask, scale=scale, dropout=dropout)
    return out[..., :width].transpose(1, 2).flatten(2)


class BloomAttention(AlibiAttention):
    """`BloomAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        **more: Any,
    ) -> Any:
        """The published forward, or relpos if the model passed on a mask for it."""
        if self.shared_sequence is None and not _is_for_relpos(attention_mask, hidden_states.shape[1]):
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, **more)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        scale, dropout = float(self.inv_norm_factor), _probability(self, self.attention_dropout.p)
        if self.shared_sequence is not None:
            out = self.attended_by_share(q, k, v, alibi[:, 0, 0], scale, dropout, _hidden(attention_mask))
        elif alibi.shape[-1] == 1:
            out = self.attended(q, k, v, alibi[:, 0, 0], scale, dropout)
        else:
            bias = alibi.view(-1, q.shape[1], 1, k.shape[2])
            out = attended_by_key(self, q * scale, k, v, bias, _hidden(attention_mask), 1.0, dropout)
        out = torch.nn.functional.dropout(self.dense(out), p=self.hidden_dropout, training=self.training)
        return residual + out, None


class MptAttention(AlibiAttention):
    """`MptAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **more: Any,
    ) -> Any:
        """The published forward, or relpos if the model passed on a mask for it."""
        if self.shared_sequence is None and not _is_for_relpos(attention_mask, hidden_states.shape[1]):
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **more)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = mixed.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scale, dropout = float(self.softmax_scale), _probability(self, self.attn_dropout_p)
        hidden = _hidden(attention_mask)
        if self.shared_sequence is not None:
            out = self.attended_by_share(q, k, v, -position_bias[:, 0, -2], scale, dropout, hidden)
        elif hidden is None:
            out = self.attended(q, k, v, -position_bias[:, 0, -2], scale, dropout)  # -2: the key at distance -1
        else:
            bias = position_bias[None, :, :, -k.shape[2] :]
            out = attended_by_key(self, q * scale, k, v, bias, hidden, 1.0, dropout)
        return self.out_proj(out), None


class MptModel(AlibiModel):
    """`MptModel`, whose biases cover `max_seq_len` keys."""

    def handed_on(self, mask: Tensor | None, tokens: Tensor, cache: Any, asked: bool) -> Tensor | None:
        keys = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        if keys > self.config.max_seq_len:
            return mask  # fails, as published
        return super().handed_on(mask, tokens, cache, asked)


class FalconModel(Retrofitted):
    """`FalconModel`: its configuration is switched, which changes the mask. Its layers attend."""

    border = 512
    training_border = 512

    def make_mechanism(self) -> None:
        """None. Registers our names in the table by which Falcon finds the class of its layers."""
        classes = sys.modules[published_class(self).__module__].FALCON_ATTENTION_CLASSES
        classes.update({interface.PREFIX + own: _built for own in interface.SERVED})


class FalconAttention(Retrofitted):
    """`FalconAttention` with `alibi=True`."""

    also_recorded = True  # the published forward reads the implementation's name, which is switched
    border = FalconModel.border
    training_border = FalconModel.training_border

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        *args: Any,
        layer_past: Any = None,
        output_attentions: bool = False,
        **more: Any,
    ) -> Any:
        """Attention with relpos, or as published with the published mask."""
        batch, queries, _ = hidden_states.shape
        keys, by_key = alibi.shape[-1], attention_mask is None or attention_mask.dim() == 2
        own = str(self.config._attn_implementation_internal).removeprefix("relpos_")
        alibi = alibi.view(batch, self.num_heads, 1, keys)
        bias = alibi / math.sqrt(self.head_dim)
        ours = by_key and not output_attentions and self.takes(queries, keys)
        if by_key and not ours:
            dense = published_mask("eager", attention_mask, hidden_states[:, None], keys, causal=True)
            least = torch.finfo(hidden_states.dtype).min
            attention_mask = bias if dense is None else bias.masked_fill(dense < -1, least)
        if not ours and (output_attentions or own != "sdpa"):
            more |= {"layer_past": layer_past, "output_attentions": output_attentions}
            return super().forward(hidden_states, alibi, attention_mask, *args, **more)
        fused = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in fused)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        dropout = _probability(self, self.attention_dropout.p)
        if ours:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
            hidden = None if attention_mask is None else ~attention_mask.bool()
            # without sdpa the published layer adds the bias twice: the mask also contains it
            whole = alibi if own == "sdpa" else 2 * alibi
            out = attended_by_key(self, q, k, v, whole, hidden, float(self.inv_norm_factor), dropout)
        else:  # as published, without reading the configuration's implementation, which is switched
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=dropout)
            out = out.transpose(1, 2).flatten(2)
        return self.dense(out), None


def _built(config: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Called as a layer's class: builds a published layer from a configuration that was copied from a switched one."""
    if interface.is_shared(config):
        fail("a configuration not used by a retrofitted model", "one that is", "Build it with copy.deepcopy(config).")
    interface.switch_back(config)
    classes = sys.modules[class_path("falcon", "").rpartition(".")[0]].FALCON_ATTENTION_CLASSES
    layer: nn.Module = classes[interface.implementation(config)](config, *args, **kwargs)
    return layer


def _is_for_relpos(mask: Any, queries: int) -> bool:
    """Whether the model passed on only the padding."""
    if mask is None or mask.dim() != 4 or queries < 2 or mask.shape[1] != 1:
        return False
    return bool(mask.shape[2] == 1 or mask.shape[3] == 1)


def _hidden(mask: Tensor) -> Tensor | None:
    """`[B, M]`, True at padded keys, from the mask the model passed on; None if nothing is padded."""
    return mask[:, 0, 0] if mask.shape[3] != 1 else None


def _probability(module: nn.Module, dropout: Any) -> float:
    return float(dropout) if module.training else 0.0


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the model on full sequences, on padded ones, and with a hidden token in the middle."""
    padding = draws.padding(draws.batch, draws.tokens)
    holed = padding.clone()
    holed[0, draws.tokens // 2] = 0
    outputs = []
    for mask in (torch.ones_like(padding), padding, holed):
        x = draws.normal(draws.batch, draws.tokens, module.config.hidden_size)
        outputs.append(module(inputs_embeds=x, attention_mask=mask, use_cache=False)[0][mask.bool()])
    return tuple(outputs)


def _unfit(module: Any) -> str | None:
    return None if module.config.alibi else "alibi=False: it uses a rotation, which needs no N x N numbers"


def _verified(architecture: str, name: str, embedding: str, layers: str) -> Verified:
    # its bias of each key is rounded to float32
    return Verified(class_path(architecture, name), _run, (), exact=1e-6, without=(embedding,), first=(layers,))


KINDS = (
    PositionKind(
        name="slopes",
        library="transformers",
        replaced=(
            Replaced("bloom", "BloomModel", BloomModel, reads=("forward", "build_alibi_tensor", "_get_alibi_slopes")),
            Replaced(
                "bloom", "BloomAttention", BloomAttention, reads=("forward", "_reshape", "_merge_heads", "dropout_add")
            ),
            Replaced("mpt", "MptModel", MptModel, reads=("forward", "build_mpt_alibi_tensor")),
            Replaced("mpt", "MptAttention", MptAttention),
        ),
        verified=(
            _verified("bloom", "BloomModel", "word_embeddings", "h"),
            _verified("mpt", "MptModel", "wte", "blocks"),
        ),
    ),
    PositionKind(
        name="slopes",
        library="transformers",
        switches=True,
        replaced=(
            Replaced("falcon", "FalconModel", FalconModel, reads=("forward", "build_alibi_tensor"), unfit=_unfit),
            Replaced(
                "falcon",
                "FalconAttention",
                FalconAttention,
                reads=("forward", "_split_heads", "_merge_heads"),
                unfit=_unfit,
            ),
        ),
        verified=(_verified("falcon", "FalconModel", "word_embeddings", "h"),),
    ),
)
