"""CARoPE: against loops and the paper's formula, as the RoPE that it starts as, and in a model with a cache."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import relpos
from position.of_content import ContentRotationSuite, decodes_as_it_reads, engines_agree
from relpos import CARoPE, RotaryEmbedding, Sequence, Site


def frequencies(mechanism: Any, states: Tensor, t: int) -> Tensor:
    """`f[b, h]` of a token, as the paper has it: 1 / (softplus + 1)."""
    weight, bias = (x.to(states.dtype) for x in (mechanism.frequency_proj.weight, mechanism.frequency_proj.bias))
    logits = (states[:, t, None] * weight).sum(-1) + bias
    return 1 / (torch.log1p(torch.exp(logits)) + 1)


class TestCARoPE(ContentRotationSuite):
    preset = "carope"

    def build(self, site: Site) -> CARoPE:
        rotary = CARoPE(site.num_heads, site.head_dim, site.embed_dim)
        nn.init.normal_(rotary.frequency_proj.weight, std=0.5)
        nn.init.uniform_(rotary.frequency_proj.bias, -1, 1)
        return rotary

    def steps(self, mechanism: Any, states: Tensor, places: list[int | None]) -> list[Tensor]:
        found = []
        for t, place in enumerate(places):
            f = frequencies(mechanism, states, t)
            powers = torch.stack([torch.ones_like(f), f], dim=-1)  # heads are 4 wide: two pairs
            found.append(powers if place is not None else 0 * powers)
        return found


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_it_starts_as_rope(layout: Literal["half", "interleaved"]) -> None:
    """Whatever the content; at 32,768 tokens as far as b in float32 can say the frequency."""
    own, rope = CARoPE(2, 10, 8, base=500.0, layout=layout).double(), RotaryEmbedding(10, base=500.0, layout=layout)
    q, k, v = torch.randn(3, 1, 2, 6, 10, dtype=torch.float64)
    tokens, x = Sequence(6), torch.randn(1, 6, 8, dtype=torch.float64)
    found = relpos.attention(q, k, v, position=own, queries=tokens, states=x)
    wanted = relpos.attention(q, k, v, position=rope, queries=tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    (turn,) = CARoPE(1, 64, 8).terms(Sequence(32_768), states=torch.randn(1, 32_768, 8))
    (plain,) = RotaryEmbedding(64).terms(Sequence(32_768))
    first = turn.key[0, 0, :1]  # type: ignore[attr-defined,index]
    assert ((turn.key[0, 0] - first) - plain.key[0, 0]).abs().max() < 0.02  # type: ignore[attr-defined,index]
    assert torch.equal(turn.key[0, 0, :, 0], torch.arange(1.0, 32_769, dtype=torch.float64))  # type: ignore[attr-defined,index]


@pytest.mark.parametrize("backend", ["sdpa", "streaming", "auto"])
def test_grouped_heads_in_every_engine(backend: str) -> None:
    own = CARoPE(4, 6, 8)
    nn.init.normal_(own.frequency_proj.weight, std=0.7)
    engines_agree(own, backend)


def test_a_model_decodes_crops_and_reorders_as_it_reads() -> None:
    decodes_as_it_reads("carope", 1)
