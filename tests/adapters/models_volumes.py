"""Models of MONAI: windows of three axes, and vectors of each axis. The first imports MONAI, which takes seconds."""

from typing import Any

import torch
from torch import Tensor, nn

from models import Model, padding
from relpos.adapters.common.libraries import imported


def _swin() -> nn.Module:
    """The encoder of SwinUNETR: of four stages, in the last two of which the map is smaller than a window."""
    made: nn.Module = imported("monai.networks.nets.swin_unetr").SwinTransformer(
        1, 8, window_size=(3, 2, 2), patch_size=(2, 2, 2), depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2)
    )
    return made


def _volumes() -> Tensor:
    return torch.randn(2, 1, 16, 12, 14, generator=torch.Generator().manual_seed(0))


def _maps(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return tuple(out[1:])


def _attention() -> nn.Module:
    made: nn.Module = imported("monai.networks.blocks.selfattention").SABlock(
        16, 2, dim_head=4, rel_pos_embedding="decomposed", input_size=(4, 6)
    )
    return made


def _cross_attention() -> nn.Module:
    made: nn.Module = imported("monai.networks.blocks.crossattention").CrossAttentionBlock(
        16, 2, rel_pos_embedding="decomposed", input_size=(4, 6), context_input_size=8
    )
    return made


def _two_maps() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(2, 24, 16, generator=generator), "context": torch.randn(2, 24, 8, generator=generator)}


def _cells() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0)), "attn_mask": padding(2, 24)}


def _out(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out,)


_ARRAYS = ("rel_pos_arr.0", "rel_pos_arr.1")
MODELS = [
    Model("monai swin_unetr", _swin, _volumes, _maps, tables=("relative_position_bias_table",), tags={"windows"}),
    Model("monai sa_block", _attention, _cells, _out, tables=_ARRAYS, tags={"no head order"}),
    Model("monai cross_attention_block", _cross_attention, _two_maps, _out, tables=_ARRAYS, tags={"alike"}),
]
