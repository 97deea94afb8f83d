"""Transformer-XL: projected sinusoids of the distance, two biases, and published code in both layouts."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from parity import TIGHT, layers_agree
from position.published import DTYPES, config, heads, largest_tensor, model, random, tokens
from relpos import Grid, Mask, Sequence, Site, TransformerXLPosition, attention
from relpos.core import Coordinates
from relpos.position.angles import frequencies, turned, waves
from relpos.position.saved import with_settings
from relpos.testing import SuiteCase, oracle


class TransformerXL(LibrarySuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    translation_invariant = True
    layout: ClassVar[Literal["grouped", "interleaved"]] = "grouped"
    base: ClassVar[float] = 100.0
    every: ClassVar[int] = 1  # of the cases

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> TransformerXLPosition:
        return TransformerXLPosition(site.num_heads, site.head_dim, 6, layout=self.layout, base=self.base, init_std=1.0)

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        count, width = mechanism.u.shape
        weight = mechanism.projection.weight.view(count, width, 6)
        made: dict[int, Tensor] = {}

        def vector(a: Any, b: Any) -> Tensor:
            if a is None or b is None:
                return q.new_zeros(count, width)
            distance = a[0] - b[0]
            if distance not in made:
                angles = [distance / self.base ** (p / 3) for p in range(3)]
                if self.layout == "grouped":
                    wave = [math.sin(x) for x in angles] + [math.cos(x) for x in angles]
                else:
                    wave = [turn(x) for x in angles for turn in (math.sin, math.cos)]
                made[distance] = weight @ torch.tensor(wave, dtype=torch.float64).to(weight.dtype)
            return made[distance]

        vectors = [[vector(a, b) for b in oracle.raster(keys)] for a in oracle.raster(queries)]
        bias = oracle.meet(q + mechanism.v[:, None], vectors) * width**-0.5
        return oracle.attention(q + mechanism.u[:, None], k, v, bias=bias, allowed=allowed)[0]

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestTransformerXL(TransformerXL):
    preset = "transformer_xl"


class TestTransformerXLInterleaved(TransformerXL):
    alike = True
    row = "transformer_xl (interleaved sinusoid)"
    layout = "interleaved"
    base = 10.0
    every = 4
    sampled = 4


class TestTransformerXLCausal(TransformerXL):
    alike = True
    row = "transformer_xl"
    axes = (1,)
    causal = True
    every = 4
    sampled = 4


def sinusoid(distances: range, layout: Any) -> Tensor:
    """Ours of width 12, which the published float32 one is compared with and replaced by."""
    places = torch.tensor(distances, dtype=torch.float64)[:, None]
    return waves(turned(places, frequencies(6, 10000.0)), layout)


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_parity_with_conformer(timm: Any, backend: str, dtype: torch.dtype) -> None:
    """The whole layer: output, and the gradients of tokens and of all that is learned. In float64 given their float32
    sinusoid in float64, which is all that rounds."""
    published, n = model("wav2vec2_conformer"), 11
    settings = config(
        "wav2vec2_conformer",
        hidden_size=12,
        num_attention_heads=3,
        position_embeddings_type="relative",
        attention_dropout=0.0,
        max_source_positions=20,
    )
    settings._attn_implementation = "eager"
    block = random(published.Wav2Vec2ConformerSelfAttention(settings), dtype)
    x = tokens(2, n, 12, dtype=dtype)
    own = TransformerXLPosition(3, 4, 12, layout="interleaved").to(dtype)
    learned = {"u": block.pos_bias_u, "v": block.pos_bias_v, "projection.weight": block.linear_pos.weight}
    own.load_state_dict(with_settings(own, learned))
    exact = sinusoid(range(n - 1, -n, -1), "interleaved")
    table = published.Wav2Vec2ConformerRelPositionalEmbedding(settings)(x.detach().float())
    torch.testing.assert_close(table[0].double(), exact, rtol=0, atol=2e-6)
    theirs = block(x, relative_position_embeddings=exact[None] if dtype == torch.float64 else table)[0]

    q, k, v = (heads(layer(x), 3) for layer in (block.linear_q, block.linear_k, block.linear_v))
    attended = attention(q, k, v, position=own, queries=Sequence(n), backend=backend)
    assert isinstance(attended, Tensor)
    output = block.linear_out(attended.transpose(1, 2).flatten(2))
    layers_agree(
        "transformer_xl (interleaved sinusoid)",
        "transformers Wav2Vec2ConformerSelfAttention",
        output,
        theirs,
        {"x": x, **dict(block.named_parameters())},
        {"pos_bias_u": own.u, "pos_bias_v": own.v, "linear_pos.weight": own.projection.weight},
        limit=TIGHT[dtype],
    )


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("memory", [0, 5])
def test_parity_with_xlnet(timm: Any, memory: int, backend: str, dtype: torch.dtype) -> None:
    """The whole layer, Transformer-XL's own relative shift with all sines first; queries behind a memory too. Its
    tokens come second to the batch, its weights a head at a time."""
    settings = config("xlnet", d_model=12, n_head=3, d_inner=8, dropout=0.0)
    block = random(model("xlnet").XLNetRelativeAttention(settings), dtype)
    n, m = 7, 7 + memory
    x, past = tokens(n, 2, 12, dtype=dtype), tokens(memory, 2, 12, dtype=dtype)
    wave = sinusoid(range(m, -n, -1), "grouped").to(dtype)  # theirs begins one farther than it reads
    bands = [10000.0 ** (-p / 6) for p in range(6)]
    if dtype == torch.float64:
        assert wave[m - 1].tolist() == pytest.approx([math.sin(x) for x in bands] + [math.cos(x) for x in bands])
    later = torch.ones(n, m).triu(1 + memory).to(dtype)[:, :, None, None].expand(-1, -1, 2, 3)
    theirs, _ = block(x, None, later, None, wave[:, None].expand(-1, 2, -1), None, mems=past)

    own = TransformerXLPosition(3, 4, 12).to(dtype)
    own.u, own.v = block.r_w_bias, block.r_r_bias
    del own.projection.weight
    own.projection.weight = block.r.flatten(1).T  # no parameter of ours: gradients reach theirs through it
    whole = torch.cat([past, x])
    sides = ((x, block.q), (whole, block.k), (whole, block.v))
    attended = attention(
        *(torch.einsum("ibh,hnd->bnid", side, weight) for side, weight in sides),
        position=own,
        queries=Sequence(n, start=memory),
        keys=Sequence(m),
        mask=Mask.causal(torch.arange(memory, m), torch.arange(m)),
        backend=backend,
    )
    assert isinstance(attended, Tensor)
    output = block.layer_norm(x + torch.einsum("bnid,hnd->ibh", attended, block.o))
    leaves = {name: x for name, x in block.named_parameters() if name not in ("r_s_bias", "seg_embed")}  # no segments
    leaves |= {"x": x, "past": past} if memory else {"x": x}
    layers_agree("transformer_xl", "transformers XLNetRelativeAttention", output, theirs, leaves, limit=TIGHT[dtype])


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_never_a_vector_a_pair(backend: str) -> None:
    """Of 256 tokens and width 64 the largest tensor is N x 2 N, the products with the line, not N x N x 64."""
    assert largest_tensor(TransformerXLPosition(1, 64, 64), backend) < 2 * 256 * 257


def test_from_site_and_growth() -> None:
    own = TransformerXLPosition.from_site(Site(3, 4, 13, Grid(2, 5)))
    assert own.projection.in_features == 12
    assert own.layout == "grouped"
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
