"""Parity with language models as Hugging Face publishes them: T5, BLOOM, MPT, GPT-NeoX, Llama, RoFormer, GPT-J, Marian.

Never skipped: transformers is part of the test extra. Private functions of theirs are used where nothing else has the
numbers. Where their code computes in float32, that is how close two can come, and the test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from position.published import EXACT, config, heads, model
from relpos import (
    ALiBi,
    LineBias,
    Mask,
    RotaryEmbedding,
    Sequence,
    SinusoidalPositionEmbedding,
    T5Bias,
    alibi_slopes,
    attention,
    rotate,
)

pytestmark = pytest.mark.usefixtures("timm")  # transformers imports torchvision as timm does; see there

SINGLE = {"rtol": 1e-5, "atol": 1e-6}


# T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "most"), [(32, 128), (32, 20), (64, 128), (16, 100), (8, 64), (128, 512), (12, 256), (100, 4096)]
)
def test_t5_buckets(buckets: int, most: int, bidirectional: bool) -> None:
    """At every distance up to 4 x 128 and far beyond the largest, on both sides."""
    offsets = torch.arange(-4 * most - 512, 4 * most + 513)
    theirs = model("t5").T5Attention._relative_position_bucket(
        -offsets, bidirectional=bidirectional, num_buckets=buckets, max_distance=most
    )
    ours = T5Bias(1, num_buckets=buckets, max_distance=most, bidirectional=bidirectional).bucket(offsets)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_t5_attention(decoder: bool, backend: str) -> None:
    """Output and the gradients of tokens, projections and table, in float64; no scale but 1."""
    settings = config("t5", d_model=12, d_kv=5, num_heads=3, is_decoder=decoder, dropout_rate=0.0)
    settings._attn_implementation = "eager"
    block = model("t5").T5Attention(settings, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    n = 150  # beyond the largest distance
    x = torch.randn(2, n, 12, dtype=torch.float64, requires_grad=True)
    future = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1) if decoder else None
    theirs = block(x, mask=future)[0]
    projections = [block.q.weight, block.k.weight, block.v.weight]
    upstream = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, [x, *projections, block.relative_attention_bias.weight], upstream)

    own = T5Bias(3, bidirectional=not decoder).double()
    own.load_state_dict({"relative_attention_bias": block.relative_attention_bias.weight})
    q, k, v = (heads(nn.functional.linear(x, weight), 3) for weight in projections)
    mask = Mask.causal() if decoder else None
    attended = attention(q, k, v, position=own, queries=Sequence(n), mask=mask, backend=backend)
    assert isinstance(attended, Tensor)
    output = block.o(attended.transpose(1, 2).flatten(2))
    found = torch.autograd.grad(output, [x, *projections, own.relative_attention_bias], upstream)
    torch.testing.assert_close(output, theirs, **EXACT)  # type: ignore[arg-type]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)  # type: ignore[arg-type]


def test_t5_decodes_with_a_cache() -> None:
    """One query against a cache: their bias of the last row."""
    block = model("t5").T5Attention(
        config("t5", d_model=12, d_kv=4, num_heads=3, is_decoder=True), has_relative_attention_bias=True, layer_idx=0
    )
    own = T5Bias(3, bidirectional=False)
    own.load_state_dict({"relative_attention_bias": block.relative_attention_bias.weight})
    (line,) = own.terms(Sequence(1, start=199), Sequence(200)).of(LineBias)
    theirs = block.compute_bias(1, 200, past_seen_tokens=199)
    assert torch.equal(line.values[:, line.lines.index()], theirs[0])


# ALiBi


def alibi_rows(count: int, n: int) -> Tensor:
    (line,) = ALiBi(count).terms(Sequence(n)).of(LineBias)
    return line.values[:, line.lines.index()]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes(count: int) -> None:
    """Theirs are powers formed in float32: exact where the head count is a power of two up to 8."""
    ours = torch.tensor(alibi_slopes(count))
    bloom = model("bloom")._get_alibi_slopes(count, torch.device("cpu"))
    mpt = model("mpt").build_mpt_alibi_tensor(count, 2)[:, 0]
    for theirs in (bloom, mpt[:, 1] - mpt[:, 0]):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
        if count in (1, 2, 8):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [8, 12])
def test_blooms_attention(count: int) -> None:
    """The whole layer under a causal mask. Its softmax is in float32; so is the bias, slope times key index."""
    width, n = 4 * count, 40
    settings = config("bloom", hidden_size=width, n_head=count, attention_dropout=0.0, hidden_dropout=0.0)
    block = model("bloom").BloomAttention(settings, layer_idx=0)
    x = torch.randn(2, n, width)
    bias = model("bloom").build_alibi_tensor(torch.ones(2, n), count, torch.float32)
    future = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)
    theirs, _ = block(x, torch.zeros_like(x), bias, future)
    q, k, v = block.query_key_value(x).unflatten(-1, (count, 3, 4)).permute(3, 0, 2, 1, 4)
    ours = attention(q, k, v, position=ALiBi(count), queries=Sequence(n), mask=Mask.causal())
    assert isinstance(ours, Tensor)
    torch.testing.assert_close(block.dense(ours.transpose(1, 2).flatten(2)), theirs, **SINGLE)  # type: ignore[arg-type]
    one_row = bias.view(2, count, 1, n)[0]
    rows = alibi_rows(count, n)
    for i in range(n):  # a number a row apart, which no softmax sees
        difference = rows[:, i, : i + 1] - one_row[:, 0, : i + 1]
        torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [8, 12])
def test_mpts_attention(count: int) -> None:
    """The whole layer under a causal mask; its softmax is in float32, its bias the last row's for all."""
    width, n = 4 * count, 40
    block = model("mpt").MptAttention(config("mpt", d_model=width, n_heads=count), layer_idx=0)
    x = torch.randn(2, n, width)
    bias = model("mpt").build_mpt_alibi_tensor(count, n)
    theirs, _ = block(x, position_bias=bias, attention_mask=torch.ones(n, n).triu(1).bool())
    q, k, v = block.Wqkv(x).unflatten(-1, (3, count, 4)).permute(2, 0, 3, 1, 4)
    ours = attention(q, k, v, position=ALiBi(count), queries=Sequence(n), mask=Mask.causal())
    assert isinstance(ours, Tensor)
    torch.testing.assert_close(block.out_proj(ours.transpose(1, 2).flatten(2)), theirs, **SINGLE)  # type: ignore[arg-type]
    torch.testing.assert_close(alibi_rows(count, n)[:, -1:], bias, rtol=2e-6, atol=0)


@pytest.mark.parametrize("count", [8, 12])
def test_alibi_in_float64(count: int) -> None:
    """Their bias with a softmax in float64: equal where the slopes are exact in float32, else to its last place."""
    n = 40
    q, k, v = torch.randn(3, 2, count, n, 4, dtype=torch.float64)
    bias = model("bloom").build_alibi_tensor(torch.ones(2, n), count, torch.float64).view(2, count, 1, n)
    scores = q @ k.mT / 2 + bias + torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)
    ours = attention(q, k, v, position=ALiBi(count), queries=Sequence(n), mask=Mask.causal())
    slack: Any = EXACT if count == 8 else SINGLE
    torch.testing.assert_close(ours, scores.softmax(dim=-1) @ v, **slack)


# rotations: their angles are formed in float32, so places up to 40 agree to about 40 units in its last place


def test_gpt_neox_turns_a_part() -> None:
    published = model("gpt_neox")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    settings = config("gpt_neox", hidden_size=48, num_attention_heads=3, rope_parameters=rope)
    q, k = torch.randn(2, 2, 3, 40, 16, dtype=torch.float64)
    cos, sin = published.GPTNeoXRotaryEmbedding(settings)(q, torch.arange(40)[None])
    assert cos.shape[-1] == 4
    theirs = published.apply_rotary_pos_emb(q, k, cos, sin)
    own = RotaryEmbedding(16, rotary_dim=4)
    for mine, other in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotate(mine, own.angles(Sequence(40)), layout="half"), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llamas_rotation(base: float) -> None:
    published = model("llama")
    rope = {"rope_type": "default", "rope_theta": base}
    settings = config("llama", hidden_size=48, num_attention_heads=3, rope_parameters=rope)
    rotary, places = published.LlamaRotaryEmbedding(settings), torch.arange(40)[None]
    q, k = torch.randn(2, 2, 3, 40, 16, dtype=torch.float64)
    theirs = published.apply_rotary_pos_emb(q, k, *rotary(q, places))
    own = RotaryEmbedding(16, base=base)
    for mine, other in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotate(mine, own.angles(Sequence(40)), layout="half"), other, rtol=1e-5, atol=1e-5)
    bands = torch.tensor([base ** (-p / 8) for p in range(8)])
    torch.testing.assert_close(rotary.inv_freq, bands, rtol=1e-6, atol=0)


def test_llamas_arithmetic_with_exact_angles() -> None:
    """Given our float64 cosines and sines, their rotation is ours."""
    published = model("llama")
    own = RotaryEmbedding(16)
    q, k = torch.randn(2, 2, 3, 40, 16, dtype=torch.float64)
    angles = own.angles(Sequence(40, start=100_000))[:, 0].repeat(1, 1, 2)
    theirs = published.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for mine, other in zip((q, k), theirs, strict=True):
        turned = rotate(mine, own.angles(Sequence(40, start=100_000)), layout="half")
        torch.testing.assert_close(turned, other, **EXACT)  # type: ignore[arg-type]


def test_roformers_interleaved_rotation() -> None:
    """Its table of sines and cosines is computed in float64 and kept in float32."""
    published = model("roformer")
    table = published.RoFormerSinusoidalPositionalEmbedding(40, 16).create_weight()[None, None].double()
    attend = published.RoFormerSelfAttention.apply_rotary_position_embeddings
    q, k = torch.randn(2, 2, 3, 40, 16, dtype=torch.float64)
    own = RotaryEmbedding(16, layout="interleaved")
    for mine, other in zip((q, k), attend(table, q, k), strict=True):
        turned = rotate(mine, own.angles(Sequence(40)), layout="interleaved")
        torch.testing.assert_close(turned, other, rtol=0, atol=1e-6)
    angles = own.angles(Sequence(40))
    exact = attend(torch.cat([angles.sin(), angles.cos()], dim=-1), q, k)
    for mine, other in zip((q, k), exact, strict=True):
        turned = rotate(mine, angles, layout="interleaved")
        torch.testing.assert_close(turned, other, **EXACT)  # type: ignore[arg-type]


def test_gpt_js_interleaved_rotation() -> None:
    published = model("gptj")
    sin, cos = published.create_sinusoidal_positions(40, 16).double()[None].chunk(2, dim=-1)
    x = torch.randn(2, 3, 40, 16, dtype=torch.float64)
    theirs = published.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    turned = rotate(x, RotaryEmbedding(16, layout="interleaved").angles(Sequence(40)), layout="interleaved")
    torch.testing.assert_close(turned, theirs, rtol=1e-5, atol=1e-5)


# sinusoids


@pytest.mark.parametrize("width", [4, 6, 64])
def test_marians_sinusoids(width: int) -> None:
    """All sines, then all cosines; computed in float64 and kept in float32. RoFormer has the same."""
    theirs = model("marian").MarianSinusoidalPositionalEmbedding(600, width).create_weight()
    for layout in ("grouped", "half"):
        own = SinusoidalPositionEmbedding(width, layout=layout)
        ours = own.embed(torch.zeros(1, 600, width), Sequence(600))[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=6e-8)
    interleaved = SinusoidalPositionEmbedding(width).embed(torch.zeros(1, 600, width), Sequence(600))[0]
    torch.testing.assert_close(interleaved[:, 0::2], theirs[:, : width // 2], rtol=0, atol=6e-8)
    torch.testing.assert_close(interleaved[:, 1::2], theirs[:, width // 2 :], rtol=0, atol=6e-8)
