"""Models with buckets of boxes on a page."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported


def _layoutlmv3(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    config = transformers.LayoutLMv3Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        coordinate_size=5, shape_size=6, max_position_embeddings=64, visual_embed=False, **more,
    )  # fmt: skip
    made: nn.Module = transformers.LayoutLMv3Model(config)
    return made


def _page() -> dict[str, Tensor]:
    corners = torch.randint(0, 500, (3, 21, 2), generator=torch.Generator().manual_seed(0))
    boxes = torch.cat([corners, corners + torch.tensor([30, 10])], -1)
    return {"input_ids": tokens(3, 21), "bbox": boxes, "attention_mask": padding(3, 21)}


def _encoded(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], inputs["attention_mask"]),)


TABLES = ("rel_pos_bias.weight", "rel_pos_x_bias.weight", "rel_pos_y_bias.weight")
MODELS = [
    Model("layoutlmv3", _layoutlmv3, _page, _encoded, tables=TABLES),
    Model(
        "layoutlmv3, text alone",
        lambda: _layoutlmv3(has_spatial_attention_bias=False),
        _page,
        _encoded,
        tables=TABLES[:1],
        tags=frozenset({"alike"}),
    ),
]
