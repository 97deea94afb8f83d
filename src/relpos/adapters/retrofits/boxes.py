"""LayoutLM's buckets of the distance in the text, and of the horizontal and vertical distance of boxes on the page.

    score[h, i, j] += (text[bucket(t_j - t_i), h] + x[bucket(x_j - x_i), h] + y[bucket(y_j - y_i), h]) / sqrt(D)

LayoutLMv2 does not divide by sqrt(D). Tokens lie anywhere on the page, and the tables get no gradient, as published. So
the encoder makes the dense sum once for all layers, including the padding, and PyTorch's kernel reads it. The published
layers each add such tensors and save more for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.adapters.common.interface import published_mask
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import DenseBias, Positions, Terms
from relpos.position import T5Bias


class LayoutLMv3Encoder(Retrofitted):
    """The encoder, which makes the bias of all layers."""

    border = 128
    training_border = 128

    def make_mechanism(self) -> tuple[T5Bias, ...]:
        """The buckets of text, x and y."""
        sizes = [(self.rel_pos_bins, self.max_rel_pos)]
        if self.has_spatial_attention_bias:
            sizes += [(self.rel_2d_pos_bins, self.max_rel_2d_pos)] * 2
        heads = self.config.num_attention_heads
        return tuple(T5Bias(heads, num_buckets=buckets, max_distance=far, init_std=0.0) for buckets, far in sizes)

    def forward(
        self,
        hidden_states: Tensor,
        bbox: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        """The published forward, except that layers get one bias that includes the padding."""
        tokens = hidden_states.shape[1]
        if (
            position_ids is not None
            and self.takes(tokens, tokens)
            and (attention_mask is None or attention_mask.dim() == 2)
        ):
            hidden = None if attention_mask is None else ~attention_mask.bool()[:, None, None]
            scale = self.layer[0].attention.self.attention_head_size ** -0.5
            attention_mask = self.bias(position_ids, bbox, hidden, hidden_states, scale)
            bbox = position_ids = None
        return super().forward(hidden_states, bbox, attention_mask, position_ids, *args, **more)

    def _cal_1d_pos_emb(self, position_ids: Tensor | None) -> Any:
        return None if position_ids is None else super()._cal_1d_pos_emb(position_ids)  # type: ignore[misc]

    def _cal_2d_pos_emb(self, bbox: Tensor | None) -> Any:
        return None if bbox is None else super()._cal_2d_pos_emb(bbox)  # type: ignore[misc]

    @torch.no_grad()  # as published
    def bias(
        self, order: Tensor, boxes: Tensor | None, hidden: Tensor | None, like: Tensor, scale: float = 1.0
    ) -> Tensor:
        """The bias to add to the scores, `[B, H, N, N]`; the least number where keys are hidden, `[B, 1, 1, N]`."""
        reach = max(self.config.max_position_embeddings, self.config.max_2d_position_embeddings)
        anywhere = Positions(torch.zeros(1, dtype=torch.long, device=order.device), low=0, high=reach)
        tables = [(self.rel_pos_bias, order)]
        if self.has_spatial_attention_bias:
            assert boxes is not None
            tables += [(self.rel_pos_x_bias, boxes[..., 0]), (self.rel_pos_y_bias, boxes[..., 3])]
        batch, tokens, _ = like.shape
        bias = like.new_zeros(batch, self.config.num_attention_heads, tokens, tokens)
        for mechanism, (layer, positions) in zip(self.mechanism, tables, strict=True):
            term = next(iter(mechanism.terms_from({"relative_attention_bias": layer.weight.t()}, anywhere)))
            offsets = positions[:, :, None] - positions[:, None, :] + reach
            bias += term.values.to(like.dtype)[:, offsets].transpose(0, 1)
        bias *= scale
        if hidden is not None:
            bias.masked_fill_(hidden, torch.finfo(like.dtype).min)
        return bias


class LayoutLMv2Encoder(LayoutLMv3Encoder):
    """The same of LayoutLMv2, whose mask is not 0 where keys are hidden."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        bbox: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The published forward, except that layers get one bias that includes the padding."""
        tokens = hidden_states.shape[1]
        by_key = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1)
        if position_ids is not None and by_key and self.takes(tokens, tokens):
            assert attention_mask is not None
            attention_mask = self.bias(position_ids, bbox, attention_mask.bool(), hidden_states)
            bbox = position_ids = None
        return super(LayoutLMv3Encoder, self).forward(hidden_states, attention_mask, bbox, position_ids, **kwargs)

    def _calculate_1d_position_embeddings(self, position_ids: Tensor | None) -> Any:
        return None if position_ids is None else super()._calculate_1d_position_embeddings(position_ids)  # type: ignore[misc]

    def _calculate_2d_position_embeddings(self, bbox: Tensor | None) -> Any:
        return None if bbox is None else super()._calculate_2d_position_embeddings(bbox)  # type: ignore[misc]


class LayoutLMv3SelfAttention(Retrofitted):
    """A layer that is given a bias."""

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
        """Attention by relpos if the encoder passed on the whole bias, else as published."""
        if rel_pos is not None or attention_mask is None:
            mask = published_mask("eager", attention_mask, hidden_states[:, None], hidden_states.shape[1])
            return super().forward(hidden_states, mask, rel_pos=rel_pos, rel_2d_pos=rel_2d_pos, **kwargs)
        projected = tuple(part(hidden_states) for part in (self.query, self.key, self.value))
        return self.attended(projected, attention_mask)

    def attended(self, projected: tuple[Tensor, ...], bias: Tensor) -> tuple[Tensor, None]:
        """Attention of tokens that were projected to q, k and v, `[B, N, H D]`."""
        q, k, v = (x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in projected)
        dropout: float = self.dropout.p if self.training else 0.0
        attended = self.attend(q, k, v, position=Terms(DenseBias(bias)), dropout=dropout)
        return attended.transpose(1, 2).flatten(2), None


class LayoutLMv2SelfAttention(LayoutLMv3SelfAttention):
    """The same of LayoutLMv2, whose published layer never gets a bias of all pairs as its mask."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rel_pos: Any = None,
        rel_2d_pos: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Attention by relpos if the encoder passed on the whole bias, else as published."""
        if rel_pos is not None:
            return super(LayoutLMv3SelfAttention, self).forward(
                hidden_states, attention_mask, rel_pos=rel_pos, rel_2d_pos=rel_2d_pos, **kwargs
            )
        return self.attended(self.compute_qkv(hidden_states), attention_mask)


def _page(draws: RandomInputs, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their boxes anywhere on the page, their order, and 1 at real ones."""
    x = draws.normal(draws.batch, draws.tokens, width)
    generator = torch.Generator().manual_seed(0)
    boxes = torch.randint(0, 1000, (draws.batch, draws.tokens, 4), generator=generator).to(x.device)
    order = torch.arange(draws.tokens, device=x.device).expand(draws.batch, -1)
    return x, boxes, order, draws.padding(draws.batch, draws.tokens)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run the encoder with one layer."""
    from transformers.masking_utils import create_bidirectional_mask

    x, boxes, order, valid = _page(draws, module.config.hidden_size)
    mask = create_bidirectional_mask(module.config, x, valid)
    return (module(x, boxes, mask, order)[0][valid.bool()],)


def _run_v2(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """The same of LayoutLMv2, with a mask as its model makes it."""
    x, boxes, order, valid = _page(draws, module.config.hidden_size)
    hidden = (1.0 - valid[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
    return (module(x, hidden, boxes, order)[0][valid.bool()],)


def _without_position(module: Any) -> str | None:
    return None if module.has_relative_attention_bias else "its relative position is switched off"


_TABLES = ("rel_pos_bias.weight", "rel_pos_x_bias.weight", "rel_pos_y_bias.weight")
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
                tables=_TABLES,
                first=("layer",),
            ),
        ),
        refused=(
            Refused(
                "pp_doclayout_v2",
                "transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2.PPDocLayoutV2ReadingOrderEncoder",
                "an extra bias depends on the sizes of two boxes, not on an offset",
            ),
        ),
    ),
    PositionKind(
        name="buckets of boxes, LayoutLMv2",
        library="transformers",
        replaced=(
            Replaced(
                "layoutlmv2",
                "LayoutLMv2Encoder",
                LayoutLMv2Encoder,
                reads=(
                    "_calculate_1d_position_embeddings",
                    "_calculate_2d_position_embeddings",
                    "relative_position_bucket",
                    "forward",
                ),
                unfit=_without_position,
            ),
            Replaced(
                "layoutlmv2",
                "LayoutLMv2SelfAttention",
                LayoutLMv2SelfAttention,
                reads=("forward", "compute_qkv"),
                unfit=_without_position,
            ),
        ),
        verified=(Verified(class_path("layoutlmv2", "LayoutLMv2Encoder"), _run_v2, tables=_TABLES, first=("layer",)),),
    ),
)
