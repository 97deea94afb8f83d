"""torchvision's and MONAI's Swin layers, retrofitted: feature maps of any size, shifted and cut."""

import copy
import math
from typing import Any

import pytest
import torch

import relpos
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import route

FILE = {2: "torchvision.models.swin_transformer", 3: "torchvision.models.video.swin_transformer"}


@pytest.mark.parametrize(
    ("window", "shift", "sizes", "computed"),
    [
        ((4, 3), (2, 1), (9, 7), True),
        ((4, 3), (2, 1), (3, 7), True),  # one window a column, which is not shifted along it
        ((4, 3), (2, 1), (4, 3), True),
        ((2, 3, 4), (1, 1, 2), (3, 7, 9), True),
        ((2, 3, 4), (1, 1, 2), (2, 6, 4), True),
        ((2, 3, 4), (1, 1, 2), (1, 6, 8), False),
        ((2, 3, 4), (1, 1, 2), (4, 2, 8), False),
    ],
)
def test_feature_maps_of_any_size(
    window: tuple[int, ...], shift: tuple[int, ...], sizes: tuple[int, ...], computed: bool, calls: list[Any]
) -> None:
    """The published layer makes a window of three axes smaller where the map is; such calls run as published."""
    torch.manual_seed(0)
    name = "ShiftedWindowAttention" + ("3d" if len(window) == 3 else "")
    published = getattr(imported(FILE[len(window)]), name)(8, list(window), list(shift), 2).double()
    torch.nn.init.normal_(published.relative_position_bias_table)
    own = torch.nn.Sequential(copy.deepcopy(published))
    relpos.retrofit(own, border=0, verify=False)
    x = torch.randn(2, *sizes, 8, dtype=torch.float64)
    torch.testing.assert_close(own(x), published(x), rtol=1e-12, atol=1e-12)
    assert calls == ([(math.prod(window),) * 2] if computed else [])


@torch.no_grad()
def test_attention_of_monai_takes_the_blocks_segments_and_the_published_mask(calls: list[Any]) -> None:
    """The block hands on segments; its attention writes them out where it runs as published itself."""
    library = imported("monai.networks.nets.swin_unetr")
    torch.manual_seed(0)
    published = library.SwinTransformerBlock(8, 2, (4, 3), (2, 1)).double()
    torch.nn.init.normal_(published.attn.relative_position_bias_table)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    x = torch.randn(2, 7, 9, 8, dtype=torch.float64)
    mask = library.compute_mask((8, 9), (4, 3), (2, 1), x.device)
    wanted = published(x, mask)
    torch.testing.assert_close(own(x, mask), wanted, rtol=1e-12, atol=1e-12)
    windows = torch.randn(12, 12, 8, dtype=torch.float64)  # of two images
    torch.testing.assert_close(own.attn(windows, mask), published.attn(windows, mask), rtol=1e-12, atol=1e-12)
    assert calls == [(12, 12)] * 2
    route(own.attn).border = 13
    torch.testing.assert_close(own(x, mask), wanted, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2
