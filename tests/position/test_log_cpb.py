"""The log-spaced continuous bias: the network, its coordinates, and parity with Swin V2 in transformers."""

import importlib
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import layers_agree
from position.published import BOTH, attended, config, merged, random, running_in, tokens
from position.suites import OffsetSuite
from relpos import Grid, LogContinuousBias, Site


class TestLogContinuous(OffsetSuite):
    axes = (1, 2, 3)
    translation_invariant = True
    preset = "log_cpb"
    prefixed = 8.0

    def build(self, site: Site) -> LogContinuousBias:
        sizes = tuple(high - low + 1 for low, high in zip(site.queries.low, site.queries.high, strict=True))
        own = LogContinuousBias(site.num_heads, sizes, hidden_dim=5)
        nn.init.normal_(own.cpb_mlp[2].weight)  # type: ignore[arg-type]
        return own

    def value(self, own: Any, *offset: int) -> Tensor:
        """Liu et al. 2022 (Swin V2), section 3.3, a hidden unit at a time."""
        first, _, last = own.cpb_mlp
        total = torch.zeros_like(last.weight[:, 0])
        for unit, out in enumerate(last.weight.T):
            inside = first.bias[unit]
            for steps, size, weight in zip(offset, own.sizes, first.weight[unit], strict=True):
                spread = 8 * steps / (size - 1 if size > 1 else 1)
                inside = inside + weight * math.copysign(math.log2(1 + abs(spread)) / 3, spread)
            total = total + out * inside.clamp(min=0)
        return 16 / (1 + torch.exp(-total))


# Swin V2 as transformers publishes it


@pytest.fixture
def swinv2(timm: ModuleType) -> ModuleType:
    """transformers imports torchvision as timm does; see there."""
    return importlib.import_module("transformers.models.swinv2.modeling_swinv2")


def published(swinv2: ModuleType, window: tuple[int, int], pretrained: tuple[int, int], dtype: torch.dtype) -> Any:
    """Their layer with 3 heads; in float64 its coordinates too: they say `.float()` where they form them."""
    with running_in(dtype):
        block = swinv2.Swinv2SelfAttention(config("swinv2"), 12, 3, list(window), list(pretrained)).eval()
    nn.init.normal_(block.continuous_position_bias_mlp[2].weight)
    assert block.relative_coords_table.dtype == dtype
    return block


def ours_of(block: Any, window: tuple[int, int]) -> LogContinuousBias:
    own = LogContinuousBias(3, window).to(block.query.weight.dtype)
    own.cpb_mlp.load_state_dict(block.continuous_position_bias_mlp.state_dict(), strict=True)
    return own


SWIN = [
    ((4, 4), (0, 0), (4, 4)),
    ((4, 4), (4, 4), (4, 4)),
    ((5, 3), (0, 0), (5, 3)),
    ((7, 5), (4, 4), (4, 4)),
    ((3, 6), (5, 2), (5, 2)),
]
"""The window, theirs as pretrained (0 for the window itself), and the one that ours is built for."""


@BOTH
@pytest.mark.parametrize(("window", "pretrained", "built"), SWIN)
def test_swin_v2_attention(
    swinv2: ModuleType,
    window: tuple[int, int],
    pretrained: tuple[int, int],
    built: tuple[int, int],
    backend: str,
    dtype: torch.dtype,
) -> None:
    """The whole layer, cosine attention with a learned scale: output, and the gradients of tokens, projections,
    network and scale. All from a normal but the scale, whose last is beyond log 100."""
    block = random(published(swinv2, window, pretrained, dtype), dtype)
    with torch.no_grad():
        block.logit_scale.copy_(torch.tensor([1.0, 2.3, 9.0]).view(3, 1, 1))
        block.continuous_position_bias_mlp[2].weight.div_(16)  # of 512 numbers: the sum is then of order 1
    own = ours_of(block, built)
    x = tokens(2, window[0] * window[1], 12, dtype=dtype)
    theirs = block(x)[0]
    q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (block.query, block.key, block.value))
    q, k = (nn.functional.normalize(side, dim=-1) for side in (q, k))
    q = q * block.logit_scale.clamp(max=math.log(100)).exp()
    layers_agree(
        "log_cpb",
        "transformers Swinv2SelfAttention",
        merged(attended(own, q, k, v, queries=Grid(*window), scale=1.0, backend=backend)),
        theirs,
        {"x": x, **dict(block.named_parameters())},
        {f"continuous_position_bias_mlp.{name}": x for name, x in own.cpb_mlp.named_parameters()},
        limit={torch.float64: 1e-12, torch.float32: 2e-5}[dtype],
    )
