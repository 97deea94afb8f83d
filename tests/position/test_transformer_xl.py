"""Transformer-XL: projected sinusoids of the distance, two biases, and published code in both layouts."""

import math
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from parity import TIGHT, layers_agree
from position.published import BOTH, attended, config, heads, merged, model, random, tokens
from position.suites import PositionSuite
from relpos import Grid, Mask, Sequence, Site, TransformerXLPosition
from relpos.position.base.angles import frequencies, turned, waves
from relpos.position.base.saved_settings import with_settings
from relpos.testing import oracle


class TransformerXL(PositionSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    raster = True
    translation_invariant = True
    layout: ClassVar[Literal["grouped", "interleaved"]] = "grouped"
    base: ClassVar[float] = 100.0

    def build(self, site: Site) -> TransformerXLPosition:
        return TransformerXLPosition(site.num_heads, site.head_dim, 6, layout=self.layout, base=self.base, init_std=1.0)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        count, width = own.u.shape
        weight = own.projection.weight.view(count, width, 6)

        def vector(distance: int) -> Tensor:
            angles = [distance / self.base ** (p / 3) for p in range(3)]
            if self.layout == "grouped":
                wave = [math.sin(x) for x in angles] + [math.cos(x) for x in angles]
            else:
                wave = [turn(x) for x in angles for turn in (math.sin, math.cos)]
            return weight @ torch.tensor(wave, dtype=torch.float64).to(weight.dtype)

        vectors = self.by_offset(queries, keys, vector, q.new_zeros(count, width))
        return {"q": q + own.u[:, None], "bias": oracle.meet(q + own.v[:, None], vectors) * width**-0.5}


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


@BOTH
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
    output = block.linear_out(merged(attended(own, q, k, v, queries=Sequence(n), backend=backend)))
    layers_agree(
        "transformer_xl (interleaved sinusoid)",
        "transformers Wav2Vec2ConformerSelfAttention",
        output,
        theirs,
        {"x": x, **dict(block.named_parameters())},
        {"pos_bias_u": own.u, "pos_bias_v": own.v, "linear_pos.weight": own.projection.weight},
        limit=TIGHT[dtype],
    )


@BOTH
@pytest.mark.parametrize("memory", [0, 5])
def test_parity_with_xlnet(timm: Any, memory: int, backend: str, dtype: torch.dtype) -> None:
    """The whole layer, Transformer-XL's own relative shift with all sines first; queries behind a memory too. Its
    tokens come second to the batch, its weights a head at a time."""
    settings = config("xlnet", d_model=12, n_head=3, d_inner=8, dropout=0.0)
    block = random(model("xlnet").XLNetRelativeAttention(settings), dtype)
    n, m = 7, 7 + memory
    x, past = tokens(n, 2, 12, dtype=dtype), tokens(memory, 2, 12, dtype=dtype)
    wave = sinusoid(range(m, -n, -1), "grouped").to(dtype)  # theirs begins one farther than it reads
    later = torch.ones(n, m).triu(1 + memory).to(dtype)[:, :, None, None].expand(-1, -1, 2, 3)
    theirs, _ = block(x, None, later, None, wave[:, None].expand(-1, 2, -1), None, mems=past)

    own = TransformerXLPosition(3, 4, 12).to(dtype)
    own.u, own.v = block.r_w_bias, block.r_r_bias
    del own.projection.weight
    own.projection.weight = block.r.flatten(1).T  # no parameter of ours: gradients reach theirs through it
    whole = torch.cat([past, x])
    sides = ((x, block.q), (whole, block.k), (whole, block.v))
    found = attended(
        own,
        *(torch.einsum("ibh,hnd->bnid", side, weight) for side, weight in sides),
        queries=Sequence(n, start=memory),
        keys=Sequence(m),
        mask=Mask.causal(torch.arange(memory, m), torch.arange(m)),
        backend=backend,
    )
    output = block.layer_norm(x + torch.einsum("bnid,hnd->ibh", found, block.o))
    leaves = {name: x for name, x in block.named_parameters() if name not in ("r_s_bias", "seg_embed")}  # no segments
    leaves |= {"x": x, "past": past} if memory else {"x": x}
    layers_agree("transformer_xl", "transformers XLNetRelativeAttention", output, theirs, leaves, limit=TIGHT[dtype])


def test_an_odd_width_of_tokens_is_rounded_down() -> None:
    assert TransformerXLPosition.from_site(Site(3, 4, 13, Grid(2, 5))).projection.in_features == 12
