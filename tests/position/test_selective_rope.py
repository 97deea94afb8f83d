"""Selective RoPE: against loops and the authors' lines, in a model with a cache, and what its convolution sees."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relpos
from position.of_content import ContentRotationSuite, decodes_as_it_reads, engines_agree
from relpos import Mask, Positions, SelectiveRoPE, Sequence, Site

RANK, BASE = 5, 9.0


class TestSelectiveRoPE(ContentRotationSuite):
    """Its terms are of CARoPE's kind; what its convolution sees is tested below."""

    alike = True
    preset = "selective_rope"

    def build(self, site: Site) -> SelectiveRoPE:
        rotary = SelectiveRoPE(site.num_heads, site.head_dim, site.embed_dim, rank=RANK, base=BASE)
        for weight in rotary.parameters():
            nn.init.normal_(weight, std=0.7)
        return rotary

    def steps(self, mechanism: Any, states: Tensor, places: list[int | None]) -> list[Tensor]:
        heads = states.shape[-1] // 4  # which are 4 wide
        weights = [x.to(states.dtype) for x in (*(y.weight for y in mechanism.phi_proj), mechanism.phi_conv1d.weight)]
        first, second, taps = weights[0], weights[1].view(heads, 2, RANK), weights[2].view(heads, 2, 4)
        phi = []
        for t in range(states.shape[1]):
            slices = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in states[:, t].split(4, dim=-1)]
            z = (torch.cat(slices, dim=-1)[:, None] * first).sum(-1)
            phi.append((z[:, None, None] * second).sum(-1))
        found = []
        for t, place in enumerate(places):
            near = [k for k in range(4) if place is not None and t >= k and places[t - k] == place - k]
            seen = [0 * phi[t], *(taps[..., 3 - k] * phi[t - k] for k in near)]
            pace = torch.tensor([1.0, BASE**-0.5], dtype=torch.float64).to(states.dtype)
            found.append(pace * torch.stack(seen).sum(0))
        return found


@pytest.mark.parametrize("conv_size", [1, 4])
def test_values_and_gradients_are_those_of_the_authors_lines(conv_size: int) -> None:
    """Their module with a cumulative sum, by PyTorch's convolution: of two batches, three heads and odd weights."""
    torch.manual_seed(0)
    own = SelectiveRoPE(3, 8, 12, rank=5, conv_size=conv_size, init_std=0.6).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
    slices = x.view(2, 9, 3, 4)
    hidden = (slices / (slices.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(2)
    phi = F.conv1d(F.pad(own.phi_proj(hidden).mT, (conv_size - 1, 0)), own.phi_conv1d.weight, groups=12)
    phi_tilde = phi.mT.view(2, 9, 3, 4).cumsum(dim=1).transpose(1, 2)
    temperature = 1.0 / 500_000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = (temperature * phi_tilde).cos(), (temperature * phi_tilde).sin()

    def turned(x: Tensor) -> Tensor:
        return torch.cat([x[..., :4] * cos - x[..., 4:] * sin, x[..., :4] * sin + x[..., 4:] * cos], dim=-1)

    wanted = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    found = relpos.attention(q, k, v, position=own, queries=Sequence(9), states=x, mask="causal")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pair = [torch.autograd.grad(y.square().sum(), list(own.parameters())) for y in (found, wanted)]
    for mine, theirs in zip(*pair, strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_a_model_decodes_crops_and_reorders_as_it_reads() -> None:
    decodes_as_it_reads("selective_rope", 4)


@pytest.mark.parametrize("backend", ["sdpa", "streaming", "auto"])
def test_grouped_heads_in_every_engine(backend: str) -> None:
    engines_agree(SelectiveRoPE(4, 6, 8, init_std=0.7), backend)


def test_what_stands_before_a_document_is_not_seen() -> None:
    """With places that count from 0 again; in a plain sequence it is seen, as published without lengths."""
    torch.manual_seed(0)
    own, q = SelectiveRoPE(2, 4, 8, init_std=0.9).double(), torch.randn(1, 2, 7, 4, dtype=torch.float64)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    other = x.clone()
    other[:, :3] = torch.randn(1, 3, 8)
    places = Positions(torch.tensor([0, 1, 2, 0, 1, 2, 3]), low=0, high=3)
    mask = Mask.causal() & Mask.packed(torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    for tokens, same in ((places, True), (Sequence(7), False)):
        found = [
            relpos.attention(q, q, q, position=own, queries=tokens, states=states, mask=mask)[:, :, 3:]
            for states in (x, other)
        ]
        assert torch.allclose(*found, rtol=1e-12, atol=1e-12) is same
