"""Parity with language models as Hugging Face publishes them: T5, BLOOM, MPT, GPT-NeoX, Llama, RoFormer, GPT-J, Marian.

Never skipped: transformers is part of the test extra. Private functions of theirs are used where nothing else has the
numbers. Whole layers run in float32 as they are, and in float64 with float64 wherever they say float32
(`published.running_in`). Where their code computes in float32 all the same, that is how close two can come, and the
test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parity import TIGHT, layers_agree
from position.published import DTYPES, EXACT, before, config, heads, model, random, running_in, tokens
from relpos import (
    ALiBi,
    LineBias,
    Mask,
    Mechanism,
    RotaryEmbedding,
    Sequence,
    SinusoidalPositionEmbedding,
    T5Bias,
    alibi_slopes,
    attention,
    rotate,
)
from relpos.position.saved import with_settings

pytestmark = pytest.mark.usefixtures("timm")  # transformers imports torchvision as timm does; see there

SINGLE = {"rtol": 1e-5, "atol": 1e-6}
ROUNDED = "ours rounds its bias once, to float32, and theirs is widened here"


def causal_attention(q: Tensor, k: Tensor, v: Tensor, position: Mechanism, backend: str = "reference") -> Tensor:
    """Ours on `[B, H, N, D]` under a causal mask, as tokens `[B, N, H D]`."""
    queries = Sequence(q.shape[2])
    output = attention(q, k, v, position=position, queries=queries, mask=Mask.causal(), backend=backend)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).flatten(2)


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


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_t5_attention(decoder: bool, backend: str, dtype: torch.dtype) -> None:
    """Output and the gradients of tokens, projections and table; no scale but 1."""
    settings = config("t5", d_model=12, d_kv=5, num_heads=3, is_decoder=decoder, dropout_rate=0.0)
    settings._attn_implementation = "eager"
    n = 150  # beyond the largest distance
    x = tokens(2, n, 12, dtype=dtype)
    with running_in(dtype):
        block = model("t5").T5Attention(settings, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder)
        theirs = random(block, dtype)(x, mask=before(n, dtype) if decoder else None)[0]
    own = T5Bias(3, bidirectional=not decoder).to(dtype)
    own.load_state_dict(with_settings(own, {"relative_attention_bias": block.relative_attention_bias.weight}))
    q, k, v = (heads(layer(x), 3) for layer in (block.q, block.k, block.v))
    mask = Mask.causal() if decoder else None
    attended = attention(q, k, v, position=own, queries=Sequence(n), mask=mask, backend=backend)
    assert isinstance(attended, Tensor)
    layers_agree(
        "t5",
        "transformers T5Attention",
        block.o(attended.transpose(1, 2).flatten(2)),
        theirs,
        {"x": x, **dict(block.named_parameters())},
        {"relative_attention_bias.weight": own.relative_attention_bias},
        limit=TIGHT[dtype],
    )


def test_t5_decodes_with_a_cache() -> None:
    """One query against a cache: their bias of the last row."""
    block = model("t5").T5Attention(
        config("t5", d_model=12, d_kv=4, num_heads=3, is_decoder=True), has_relative_attention_bias=True, layer_idx=0
    )
    own = T5Bias(3, bidirectional=False)
    own.load_state_dict(with_settings(own, {"relative_attention_bias": block.relative_attention_bias.weight}))
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


def alibi(count: int) -> str:
    return "alibi" if count == 8 else f"alibi ({count} heads)"


def slack(count: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of 8 heads the slopes are exact in float32; of 12 some are rounded there, and with them our bias."""
    exact = count == 8 or dtype == torch.float32
    return {"limit": TIGHT[dtype]} if exact else {"limit": 2e-6, "why": ROUNDED}


@DTYPES
@pytest.mark.parametrize("count", [8, 12])
def test_blooms_attention(count: int, dtype: torch.dtype) -> None:
    """The whole layer under a causal mask, and its bias, slope times key index: a number a row apart from ours."""
    width, n = 4 * count, 40
    settings = config("bloom", hidden_size=width, n_head=count, attention_dropout=0.0, hidden_dropout=0.0)
    x = tokens(2, n, width, dtype=dtype)
    with running_in(dtype):
        block = random(model("bloom").BloomAttention(settings, layer_idx=0), dtype)
        bias = model("bloom").build_alibi_tensor(torch.ones(2, n), count, dtype)
        theirs, _ = block(x, torch.zeros_like(x), bias, before(n, dtype))
    qkv = block.query_key_value(x).unflatten(-1, (count, 3, 4)).permute(3, 0, 2, 1, 4)
    output = block.dense(causal_attention(*qkv, position=ALiBi(count)))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(alibi(count), "transformers BloomAttention", output, theirs, leaves, **slack(count, dtype))
    one_row = bias.view(2, count, 1, n)[0]
    rows = alibi_rows(count, n)
    for i in range(n):  # a number a row apart, which no softmax sees
        difference = rows[:, i, : i + 1] - one_row[:, 0, : i + 1]
        torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("count", [8, 12])
def test_mpts_attention(count: int, dtype: torch.dtype) -> None:
    """The whole layer under a causal mask; its bias is the last row's for all."""
    width, n = 4 * count, 40
    x = tokens(2, n, width, dtype=dtype)
    with running_in(dtype):
        block = random(model("mpt").MptAttention(config("mpt", d_model=width, n_heads=count), layer_idx=0), dtype)
        bias = model("mpt").build_mpt_alibi_tensor(count, n)
        theirs, _ = block(x, position_bias=bias, attention_mask=torch.ones(n, n).triu(1).bool())
    qkv = block.Wqkv(x).unflatten(-1, (3, count, 4)).permute(2, 0, 3, 1, 4)
    output = block.out_proj(causal_attention(*qkv, position=ALiBi(count)))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(alibi(count), "transformers MptAttention", output, theirs, leaves, **slack(count, dtype))
    torch.testing.assert_close(alibi_rows(count, n)[:, -1:], bias.float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("count", [8, 12])
def test_alibi_in_float64(count: int) -> None:
    """Their bias with a softmax in float64: equal where the slopes are exact in float32, else to its last place."""
    n = 40
    q, k, v = torch.randn(3, 2, count, n, 4, dtype=torch.float64)
    bias = model("bloom").build_alibi_tensor(torch.ones(2, n), count, torch.float64).view(2, count, 1, n)
    scores = q @ k.mT / 2 + bias + torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)
    ours = attention(q, k, v, position=ALiBi(count), queries=Sequence(n), mask=Mask.causal())
    near: Any = EXACT if count == 8 else SINGLE
    torch.testing.assert_close(ours, scores.softmax(dim=-1) @ v, **near)


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


# whole layers that rotate


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llamas_attention(base: float, backend: str, dtype: torch.dtype) -> None:
    """Six heads with two of keys."""
    n = 40
    settings = config(
        "llama",
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    settings._attn_implementation = "eager"
    x = tokens(2, n, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("llama").LlamaAttention(settings, layer_idx=0), dtype)
        waves = model("llama").LlamaRotaryEmbedding(settings)(x, torch.arange(n)[None])
        theirs, _ = block(x, position_embeddings=waves, attention_mask=before(n, dtype))
    q, k, v = (heads(layer(x), count) for layer, count in zip(layers(block), (6, 2, 2), strict=True))
    output = block.o_proj(causal_attention(q, k, v, RotaryEmbedding(8, base=base), backend))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree("rotary_1d", "transformers LlamaAttention", output, theirs, leaves, limit=TIGHT[dtype])


def layers(block: Any) -> tuple[Any, Any, Any]:
    return block.q_proj, block.k_proj, block.v_proj


@DTYPES
def test_gpt_neoxs_attention(dtype: torch.dtype) -> None:
    """A quarter of each head turns, halves apart."""
    n = 40
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    settings = config("gpt_neox", hidden_size=48, num_attention_heads=3, rope_parameters=rope)
    settings._attn_implementation = "eager"
    x = tokens(2, n, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("gpt_neox").GPTNeoXAttention(settings, layer_idx=0), dtype)
        waves = model("gpt_neox").GPTNeoXRotaryEmbedding(settings)(x, torch.arange(n)[None])
        theirs, _ = block(x, before(n, dtype), position_embeddings=waves)
    qkv = block.query_key_value(x).unflatten(-1, (3, 3, 16)).permute(3, 0, 2, 1, 4)
    output = block.dense(causal_attention(*qkv, position=RotaryEmbedding(16, rotary_dim=4)))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree("rotary_1d", "transformers GPTNeoXAttention", output, theirs, leaves, limit=TIGHT[dtype])


@DTYPES
@pytest.mark.parametrize("turning", [16, 8])
def test_gpt_js_attention(turning: int, dtype: torch.dtype) -> None:
    """Neighbours turn, in the whole head or in a part of it."""
    n = 40
    settings = config("gptj", n_embd=48, n_head=3, n_positions=n, rotary_dim=turning)
    settings._attn_implementation = "eager"
    x = tokens(2, n, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("gptj").GPTJAttention(settings, layer_idx=0), dtype)
        theirs, _ = block(x, attention_mask=before(n, dtype), position_ids=torch.arange(n)[None])
    q, k, v = (heads(layer(x), 3) for layer in layers(block))
    output = block.out_proj(causal_attention(q, k, v, RotaryEmbedding(16, rotary_dim=turning, layout="interleaved")))
    leaves = {"x": x, **dict(block.named_parameters())}
    name = "rotary_1d (interleaved)"
    layers_agree(name, "transformers GPTJAttention", output, theirs, leaves, limit=TIGHT[dtype])


@DTYPES
def test_roformers_attention(dtype: torch.dtype) -> None:
    """Neighbours turn; no mask."""
    n = 40
    settings = config("roformer", hidden_size=48, num_attention_heads=3, attention_probs_dropout_prob=0.0)
    x = tokens(2, n, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("roformer").RoFormerSelfAttention(settings), dtype)
        table = model("roformer").RoFormerSinusoidalPositionalEmbedding(n, 16).create_weight()[None, None]
        theirs = block(x, sinusoidal_pos=table)[0]
    q, k, v = (heads(layer(x), 3) for layer in (block.query, block.key, block.value))
    own = RotaryEmbedding(16, layout="interleaved")
    attended = attention(q, k, v, position=own, queries=Sequence(n))
    assert isinstance(attended, Tensor)
    output = attended.transpose(1, 2).flatten(2)
    leaves = {"x": x, **dict(block.named_parameters())}
    name = "rotary_1d (interleaved)"
    layers_agree(name, "transformers RoFormerSelfAttention", output, theirs, leaves, limit=TIGHT[dtype])


# sinusoids


@DTYPES
@pytest.mark.parametrize(
    "oracle",
    ["transformers MarianSinusoidalPositionalEmbedding", "transformers Speech2TextSinusoidalPositionalEmbedding"],
)
@pytest.mark.parametrize("width", [4, 6, 64])
def test_sinusoids_added_to_tokens(width: int, oracle: str, dtype: torch.dtype) -> None:
    """All sines, then all cosines. Speech2Text has tensor2tensor's frequencies, 10000^(-p / (pairs - 1)), a base that
    depends on the width, and its tokens begin at place 2."""
    n, pairs = 60, width // 2
    x = tokens(2, n, width, dtype=dtype)
    with running_in(dtype):
        if "Marian" in oracle:
            base, start = 10000.0, 0
            table = model("marian").MarianSinusoidalPositionalEmbedding(n, width).create_weight()
        else:
            base, start = 10000.0 ** (pairs / (pairs - 1)), 2
            made = model("speech_to_text").Speech2TextSinusoidalPositionalEmbedding(n, width, padding_idx=1)
            table = made(torch.full((1, n), 7))[0]
        theirs = x + table.to(dtype)
    own = SinusoidalPositionEmbedding(width, layout="grouped", base=base)
    ours = own.embed(x, Sequence(n, start=start))
    limit = {torch.float64: 1e-14, torch.float32: 2e-6}[dtype]
    layers_agree("sinusoidal_1d (grouped)", oracle, ours, theirs, {"x": x}, limit=limit)


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
