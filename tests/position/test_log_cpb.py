"""The log-spaced continuous bias: the network, its coordinates, and parity with Swin V2 in transformers."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.suite import LibrarySuite
from parity import layers_agree
from position.published import DTYPES, config, random, running_in, tokens
from relpos import Grid, LineBias, LogContinuousBias, Mask, Positions, Scale, Sequence, Site, Terms, attention
from relpos.core import Coordinates, expand
from relpos.engines import attention_weights
from relpos.position.saved import is_settings
from relpos.testing import oracle


class TestLogContinuous(LibrarySuite):
    axes = (1, 2, 3)
    translation_invariant = True
    preset = "log_cpb"

    def build(self, site: Site) -> LogContinuousBias:
        sizes = tuple(high - low + 1 for low, high in zip(site.queries.low, site.queries.high, strict=True))
        own = LogContinuousBias(site.num_heads, sizes, hidden_dim=5)
        nn.init.normal_(own.cpb_mlp[2].weight)  # type: ignore[arg-type]
        return own

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Liu et al. 2022 (Swin V2), section 3.3, a pair and a hidden unit at a time."""
        first, _, last = mechanism.cpb_mlp
        said: dict[Any, Tensor] = {None: last.weight.new_full((last.weight.shape[0],), 8.0)}
        pairs: list[Any] = []
        for query in oracle.places(queries):
            for key in oracle.places(keys):
                near = query is None or key is None
                offset = None if near else tuple(a - b for a, b in zip(query, key, strict=True))  # type: ignore[arg-type]
                if offset not in said:
                    assert offset is not None
                    said[offset] = self.network(first, last, offset, mechanism.sizes)
                pairs.append(offset)
        return torch.stack([said[offset] for offset in pairs], dim=-1).view(-1, queries.count, keys.count)

    def network(self, first: Any, last: Any, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        total = torch.zeros_like(last.weight[:, 0])
        for unit, out in enumerate(last.weight.T):
            inside = first.bias[unit]
            for steps, size, weight in zip(offset, sizes, first.weight[unit], strict=True):
                spread = 8 * steps / (size - 1 if size > 1 else 1)
                inside = inside + weight * math.copysign(math.log2(1 + abs(spread)) / 3, spread)
            total = total + out * inside.clamp(min=0)
        return 16 / (1 + torch.exp(-total))


# Swin V2 as transformers publishes it


@pytest.fixture
def swinv2(timm: ModuleType) -> ModuleType:
    """transformers imports torchvision as timm does; see there."""
    return importlib.import_module("transformers.models.swinv2.modeling_swinv2")


def published(
    swinv2: ModuleType, window: tuple[int, int], pretrained: tuple[int, int], dtype: torch.dtype = torch.float64
) -> Any:
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
EXACT = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize(("window", "pretrained", "built"), SWIN)
def test_swin_v2_table(
    swinv2: ModuleType, window: tuple[int, int], pretrained: tuple[int, int], built: tuple[int, int]
) -> None:
    block = published(swinv2, window, pretrained)
    theirs = 16 * block.continuous_position_bias_mlp(block.relative_coords_table).sigmoid().flatten(0, 2)
    (term,) = ours_of(block, built).terms(Grid(*window)).of(LineBias)
    torch.testing.assert_close(term.values, theirs.T, **EXACT)  # type: ignore[arg-type]
    dense = theirs[block.relative_position_index].permute(2, 0, 1)
    torch.testing.assert_close(expand(term.values, term.lines), dense, **EXACT)  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
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
    ours = attention(q, k, v, position=own, queries=Grid(*window), scale=1.0, backend=backend)
    assert isinstance(ours, Tensor)
    layers_agree(
        "log_cpb",
        "transformers Swinv2SelfAttention",
        ours.transpose(1, 2).flatten(2),
        theirs,
        {"x": x, **dict(block.named_parameters())},
        {f"continuous_position_bias_mlp.{name}": x for name, x in own.cpb_mlp.named_parameters()},
        limit={torch.float64: 1e-12, torch.float32: 2e-5}[dtype],
    )


@pytest.mark.parametrize(("window", "pretrained", "built"), SWIN)
def test_swin_v2_coordinates(
    swinv2: ModuleType, window: tuple[int, int], pretrained: tuple[int, int], built: tuple[int, int]
) -> None:
    """A network that passes one coordinate through: 16 sigmoid(x). Also for a window that was not pretrained."""
    block = published(swinv2, window, pretrained)
    for axis in range(2):
        own = LogContinuousBias(2, built, hidden_dim=1).double()
        with torch.no_grad():
            own.cpb_mlp[0].weight.copy_(torch.eye(2)[axis : axis + 1])  # type: ignore[operator]
            own.cpb_mlp[0].bias.fill_(100)  # type: ignore[operator]
            own.cpb_mlp[2].weight.fill_(0.01)  # type: ignore[operator]
        (term,) = own.terms(Grid(*window)).of(LineBias)
        coordinate = 100 * (term.values[0] / 16).logit() - 100
        wanted = block.relative_coords_table[..., axis].flatten()
        torch.testing.assert_close(coordinate, wanted, rtol=0, atol=1e-9)
        assert coordinate.max().item() == pytest.approx(math.log2(1 + 8 * (window[axis] - 1) / (built[axis] - 1)) / 3)


# what it says


def test_by_hand() -> None:
    """A window of 3 x 5: offset (1, -2) is (4, -4), whose logarithms are log2(5) / 3 and its negative."""
    own = LogContinuousBias(1, (3, 5), hidden_dim=2).double()
    with torch.no_grad():
        own.cpb_mlp[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # type: ignore[operator]
        own.cpb_mlp[0].bias.copy_(torch.tensor([0.0, 1.0]))  # type: ignore[operator]
        own.cpb_mlp[2].weight.copy_(torch.tensor([[2.0, -1.0]]))  # type: ignore[operator]
    query, key = (Positions(torch.tensor([place]), low=(0, 0), high=(2, 4)) for place in ([1, 0], [0, 2]))
    (term,) = own.terms(query, key).of(LineBias)
    value = term.values[0, term.lines.index()[0, 0]].item()
    x = math.log2(5) / 3
    assert value == pytest.approx(16 / (1 + math.exp(-(2 * x - (1 - x)))), rel=1e-12)


def test_a_larger_window_asks_the_same_network() -> None:
    """What the two windows share is the same number, and the far is between 0 and 16."""
    own = LogContinuousBias(3, (4, 4))
    (small,), (large,) = (own.terms(Grid(n, n)).of(LineBias) for n in (4, 9))
    torch.testing.assert_close(large.values.unflatten(1, (17, 17))[:, 5:12, 5:12].flatten(1), small.values)
    assert (large.values > 0).all()
    assert (large.values < 16).all()


def test_an_axis_one_cell_wide() -> None:
    """No division by 0: within the window it is 0, beyond it 8 a step."""
    own = LogContinuousBias(2, (1, 4))
    other = LogContinuousBias(2, (2, 4))
    other.cpb_mlp.load_state_dict(own.cpb_mlp.state_dict())
    for grid in (Grid(1, 4), Grid(3, 4)):
        (ours,), (theirs,) = (each.terms(grid).of(LineBias) for each in (own, other))
        assert ours.values.isfinite().all()
        assert torch.equal(ours.values, theirs.values)


def test_prefix_tokens_are_neither_favoured_nor_hidden() -> None:
    """A network at 0 says 8 everywhere: attention is then as without position, prefix included."""
    own = LogContinuousBias(2, (2, 3))
    with torch.no_grad():
        own.cpb_mlp[2].weight.zero_()  # type: ignore[operator]
    zeros = torch.zeros(1, 2, 7, 4)
    weights = attention_weights(zeros, zeros, position=own.terms(Grid(2, 3, prefix=1)))
    torch.testing.assert_close(weights, torch.full((1, 2, 7, 7), 1 / 7))


def test_names_of_published_checkpoints() -> None:
    own = LogContinuousBias(3, (8, 8))
    assert {name: tuple(x.shape) for name, x in own.state_dict().items() if not is_settings(name)} == {
        "cpb_mlp.0.weight": (512, 2),
        "cpb_mlp.0.bias": (512,),
        "cpb_mlp.2.weight": (3, 512),
    }


def test_with_a_scale_of_its_own_and_a_mask() -> None:
    """Swin V2's layer sets scale 1: the bias joins it and a mask as any other."""
    own = LogContinuousBias(2, (2, 3)).double()
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    terms = own.terms(Grid(2, 3)) + Terms(Scale(1.0))
    (term,) = own.terms(Grid(2, 3)).of(LineBias)
    allowed = torch.ones(6, 6).tril().bool()
    wanted = oracle.attention(
        q, k, v, bias=expand(term.values, term.lines)[None], allowed=allowed[None, None], scale=1.0
    )[0]
    torch.testing.assert_close(attention(q, k, v, position=terms, mask=Mask.causal()), wanted)


def test_from_site_and_growth() -> None:
    own = LogContinuousBias.from_site(Site(6, 4, 24, Grid(2, 5, prefix=1), Grid(4, 4)))
    assert own.sizes == (2, 5)
    own.terms(Grid(2, 5, prefix=1), Grid(4, 4))
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    LogContinuousBias(2, (5,)).terms(Sequence(9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")
