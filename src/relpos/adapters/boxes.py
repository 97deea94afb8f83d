"""LayoutLM's buckets: of the distance in the text, and of the horizontal and vertical distance of boxes on the page.

    score[h, i, j] += (text[bucket(t_j - t_i), h] + x[bucket(x_j - x_i), h] + y[bucket(y_j - y_i), h]) / sqrt(D)

Each is a lookup on a line, on which tokens lie where the page has them. The encoder hands its layers the values at
every offset, `[3, H, 2 R - 1]`, and where tokens are, `[B, N, 3]`, in place of `[B, H, N, N]`. As published, the tables
get no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from relpos.adapters.interface import mask_of, published_mask, refuse_weights
from relpos.adapters.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.random_inputs import RandomInputs
from relpos.adapters.retrofitted import NEVER, Retrofitted
from relpos.core import LineBias, Positions, Terms, lines
from relpos.position import T5Bias


class LayoutLMv3Encoder(Retrofitted):
    """The encoder makes the biases of all layers."""

    border = NEVER  # without gradients the N x N numbers, made once for all layers, are faster at every length
    training_border = 512

    def mechanism(self) -> tuple[T5Bias, ...]:
        """The buckets of text, x and y."""
        sizes = [(self.rel_pos_bins, self.max_rel_pos)] + [(self.rel_2d_pos_bins, self.max_rel_2d_pos)] * 2
        heads = self.config.num_attention_heads
        return tuple(T5Bias(heads, num_buckets=buckets, max_distance=far, init_std=0.0) for buckets, far in sizes)

    def _reach(self) -> int:
        """Positions lie from 0 to here."""
        config: Any = self.config
        return max(config.max_position_embeddings, config.max_2d_position_embeddings)

    def _values(self, parts: slice, like: Tensor) -> Tensor:
        """The values at every offset, of some of text, x and y: `[parts, H, 2 R - 1]`."""
        layers: tuple[Any, ...] = (self.rel_pos_bias, self.rel_pos_x_bias, self.rel_pos_y_bias)
        anywhere = Positions(like.new_zeros(1), low=0, high=self._reach())
        with torch.no_grad():  # as published
            return torch.stack(
                [
                    next(iter(bias.terms_from({"relative_attention_bias": layer.weight.t()}, anywhere))).values
                    for bias, layer in list(zip(self.made, layers, strict=True))[parts]
                ]
            )

    def _cal_1d_pos_emb(self, position_ids: Tensor) -> Any:
        tokens = position_ids.shape[1]
        if not self.takes(tokens, tokens):
            return super()._cal_1d_pos_emb(position_ids)  # type: ignore[misc]
        return self._values(slice(0, 1), position_ids), position_ids[..., None]

    def _cal_2d_pos_emb(self, bbox: Tensor) -> Any:
        if not self.takes(bbox.shape[1], bbox.shape[1]):
            return super()._cal_2d_pos_emb(bbox)  # type: ignore[misc]
        return self._values(slice(1, 3), bbox), bbox[..., [0, 3]]


class LayoutLMv3SelfAttention(Retrofitted):
    """A layer that is handed values and positions."""

    border = LayoutLMv3Encoder.border
    training_border = LayoutLMv3Encoder.training_border

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rel_pos: Any = None,
        rel_2d_pos: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Attention by relpos where the encoder handed on positions, else as published."""
        refuse_weights(kwargs.get("output_attentions"))
        batch, tokens = hidden_states.shape[:2]
        if not isinstance(rel_pos, tuple) or (attention_mask is not None and attention_mask.dim() != 2):
            mask = published_mask("eager", attention_mask, hidden_states[:, None], tokens)
            return super().forward(hidden_states, mask, rel_pos=rel_pos, rel_2d_pos=rel_2d_pos, **kwargs)
        q, k, v = (
            part(hidden_states).view(batch, tokens, self.num_attention_heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        handed_on = (rel_pos, rel_2d_pos) if self.has_spatial_attention_bias else (rel_pos,)
        scale = 1 / math.sqrt(q.shape[-1])
        biases = [
            LineBias(value * scale, lines(Positions(position, low=0, high=(value.shape[-1] - 1) // 2)))
            for values, positions in handed_on
            for value, position in zip(values, positions.unbind(-1), strict=True)
        ]
        dropout: float = self.dropout.p if self.training else 0.0
        mask_ = mask_of(attention_mask, tokens, tokens)
        attended = self.attend(q, k, v, position=Terms(*biases), mask=mask_, dropout=dropout)
        return attended.transpose(1, 2).flatten(2), None


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """The first layer's attention, with the biases that the encoder makes."""
    from transformers.masking_utils import create_bidirectional_mask

    tokens, attention = draws.tokens, module.layer[0].attention.self
    x = draws.normal(draws.batch, tokens, attention.query.in_features)
    generator = torch.Generator().manual_seed(0)
    boxes = torch.randint(0, 1000, (draws.batch, tokens, 4), generator=generator).to(x.device)
    order = torch.arange(tokens, device=x.device).expand(draws.batch, -1)
    mask = create_bidirectional_mask(module.config, x, draws.padding(draws.batch, tokens))
    text = module._cal_1d_pos_emb(order)
    page = module._cal_2d_pos_emb(boxes) if module.has_spatial_attention_bias else None
    return (attention(x, mask, rel_pos=text, rel_2d_pos=page)[0],)


def _without_position(module: Any) -> str | None:
    return None if module.has_relative_attention_bias else "its relative position is switched off"


_PATH = "transformers.models.layoutlmv3.modeling_layoutlmv3"

KINDS = (
    PositionKind(
        name="buckets of boxes",
        library="transformers",
        switches=True,
        replaced=(
            Replaced(
                "layoutlmv3",
                f"{_PATH}.LayoutLMv3Encoder",
                LayoutLMv3Encoder,
                reads=("_cal_1d_pos_emb", "_cal_2d_pos_emb", "relative_position_bucket", "forward"),
                unfit=_without_position,
            ),
            Replaced(
                "layoutlmv3",
                f"{_PATH}.LayoutLMv3SelfAttention",
                LayoutLMv3SelfAttention,
                reads=("forward", "cogview_attention"),
                unfit=_without_position,
            ),
        ),
        verified=(
            Verified(
                f"{_PATH}.LayoutLMv3Encoder",
                _run,
                tables=("rel_pos_bias.weight", "rel_pos_x_bias.weight", "rel_pos_y_bias.weight"),
                first=("layer",),
            ),
        ),
        refused=(
            Refused(
                "layoutlmv2",
                "transformers.models.layoutlmv2.modeling_layoutlmv2.LayoutLMv2Encoder",
                "it needs detectron2, beside which it was not run",
            ),
            Refused(
                "pp_doclayout_v2",
                "transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2.PPDocLayoutV2ReadingOrderEncoder",
                "a bias of its own comes from the sizes of two boxes, which is no function of an offset",
            ),
            Refused(
                "udop",
                "transformers.models.udop.modeling_udop.UdopAttention",
                "its stack adds the biases of text and boxes into one N x N tensor before the layers",
            ),
            Refused(
                "phi4_multimodal",
                "transformers.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioRelativeAttentionBias",
                "its model adds the bias into the mask before the layers see it",
            ),
        ),
    ),
)
