"""Parity with language models as Hugging Face publishes them: T5, BLOOM, MPT, Llama, GPT-NeoX, GPT-J, RoFormer, Marian,
Llama 4 and DeepSeek V4.

Never skipped: transformers is part of the test extra. Whole layers run in float32 as they are, and in float64 with
float64 wherever they say float32 (`published.running_in`). Private functions of theirs are used where nothing else has
the numbers.
"""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import LIMITS, TIGHT, layers_agree
from position.published import DTYPES, before, config, heads, merged, model, random, running_in, tokens
from relpos import (
    ALiBi,
    LineBias,
    Mask,
    Mechanism,
    QueryScale,
    RotaryEmbedding,
    Rotation,
    Sequence,
    Sinks,
    SinusoidalPositionEmbedding,
    T5Bias,
    YaRN,
    alibi_slopes,
    attention,
    rotate,
)
from relpos.position.base.saved_settings import with_settings

pytestmark = pytest.mark.usefixtures("timm")  # transformers imports torchvision as timm does; see there

N = 40
ROUNDED = "ours rounds its bias once, to float32, and theirs is widened here"


def attended(qkv: Iterable[Tensor], own: Mechanism, backend: str = "reference", causal: bool = True) -> Tensor:
    """Ours on three times `[B, H, N, D]`, as tokens `[B, N, H D]`."""
    q, k, v = qkv
    queries, mask = Sequence(q.shape[2]), Mask.causal() if causal else None
    return attention(q, k, v, position=own, queries=queries, mask=mask, backend=backend).transpose(1, 2).flatten(2)


def agree(
    row: str, block: Any, x: Tensor, ours: Tensor, theirs: Tensor, own: Any = None, why: str = "", limit: float = 0.0
) -> None:
    """Output, and the gradients of tokens and of all weights of a published layer."""
    oracle = f"transformers {type(block).__name__}"
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(row, oracle, ours, theirs, leaves, own, limit=limit or TIGHT[x.dtype], why=why)


# T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "most"), [(32, 128), (32, 20), (64, 128), (16, 100), (8, 64), (128, 512), (12, 256), (100, 4096)]
)
def test_t5_buckets(buckets: int, most: int, bidirectional: bool) -> None:
    """At every distance up to 4 x 128 and far beyond the largest, on both sides."""
    offsets = torch.arange(-4 * most - 512, 4 * most + 513)
    settings: dict[str, Any] = {"bidirectional": bidirectional, "num_buckets": buckets, "max_distance": most}
    theirs = model("t5").T5Attention._relative_position_bucket(-offsets, **settings)
    assert torch.equal(T5Bias(1, **settings).bucket(offsets), theirs)


def t5(decoder: bool, dtype: torch.dtype) -> tuple[Any, T5Bias]:
    settings = config("t5", d_model=12, d_kv=5, num_heads=3, is_decoder=decoder, dropout_rate=0.0)
    settings._attn_implementation = "eager"
    block = model("t5").T5Attention(settings, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder)
    block, own = random(block, dtype), T5Bias(3, bidirectional=not decoder).to(dtype)
    own.load_state_dict(with_settings(own, {"relative_attention_bias": block.relative_attention_bias.weight}))
    return block, own


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_t5_attention(decoder: bool, backend: str, dtype: torch.dtype) -> None:
    """No scale but 1."""
    n = 150  # beyond the largest distance
    x = tokens(2, n, 12, dtype=dtype)
    with running_in(dtype):
        block, own = t5(decoder, dtype)
        theirs = block(x, mask=before(n, dtype) if decoder else None)[0]
    qkv = (heads(layer(x), 3) for layer in (block.q, block.k, block.v))
    ours = block.o(attended(qkv, own, backend, decoder))
    agree("t5", block, x, ours, theirs, {"relative_attention_bias.weight": own.relative_attention_bias})


def test_t5_decodes_with_a_cache() -> None:
    """One query against a cache: their bias of the last row."""
    block, own = t5(True, torch.float32)
    (line,) = own.terms(Sequence(1, start=199), Sequence(200)).of(LineBias)
    theirs = block.compute_bias(1, 200, past_seen_tokens=199)
    assert torch.equal(line.values[:, line.lines.index()], theirs[0])


# ALiBi


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


@DTYPES
@pytest.mark.parametrize("count", [8, 12])
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_attention_with_slopes(name: str, count: int, dtype: torch.dtype) -> None:
    """BLOOM's bias is slope times key index and MPT's the last row's for all: a number a row apart from ours."""
    width = 4 * count
    x = tokens(2, N, width, dtype=dtype)
    with running_in(dtype):
        if name == "bloom":
            settings = config(name, hidden_size=width, n_head=count, attention_dropout=0.0, hidden_dropout=0.0)
            block = random(model(name).BloomAttention(settings, layer_idx=0), dtype)
            bias = model(name).build_alibi_tensor(torch.ones(2, N), count, dtype)
            theirs, _ = block(x, torch.zeros_like(x), bias, before(N, dtype))
            qkv = block.query_key_value(x).unflatten(-1, (count, 3, 4)).permute(3, 0, 2, 1, 4)
        else:
            block = random(model(name).MptAttention(config(name, d_model=width, n_heads=count), layer_idx=0), dtype)
            bias = model(name).build_mpt_alibi_tensor(count, N)
            theirs, _ = block(x, position_bias=bias, attention_mask=torch.ones(N, N).triu(1).bool())
            qkv = block.Wqkv(x).unflatten(-1, (3, count, 4)).permute(2, 0, 3, 1, 4)
    ours = (block.dense if name == "bloom" else block.out_proj)(attended(qkv, ALiBi(count)))
    exact = count == 8 or dtype == torch.float32  # of 12 slopes some are rounded to float32, and with them our bias
    slack: dict[str, Any] = {} if exact else {"limit": 2e-6, "why": ROUNDED}
    agree("alibi" if count == 8 else f"alibi ({count} heads)", block, x, ours, theirs, **slack)


# whole layers that rotate


@DTYPES
@pytest.mark.parametrize(("base", "backend"), [(10000.0, "reference"), (500000.0, "sdpa")])
def test_llamas_attention(base: float, backend: str, dtype: torch.dtype) -> None:
    """Six heads with two of keys."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    settings = config("llama", **sizes, rope_parameters={"rope_type": "default", "rope_theta": base})
    settings._attn_implementation = "eager"
    x = tokens(2, N, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("llama").LlamaAttention(settings, layer_idx=0), dtype)
        waves = model("llama").LlamaRotaryEmbedding(settings)(x, torch.arange(N)[None])
        theirs, _ = block(x, position_embeddings=waves, attention_mask=before(N, dtype))
    qkv = (heads(layer(x), count) for layer, count in ((block.q_proj, 6), (block.k_proj, 2), (block.v_proj, 2)))
    ours = block.o_proj(attended(qkv, RotaryEmbedding(8, base=base), backend))
    agree("rotary_1d", block, x, ours, theirs)


@DTYPES
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 16)], ids=["plain", "yarn"])
def test_gpt_neoxs_attention(scaling: YaRN | None, dtype: torch.dtype) -> None:
    """A quarter of each head turns, halves apart; under YaRN it is multiplied on both sides, and the rest is not."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if scaling is not None:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    settings = config("gpt_neox", hidden_size=48, num_attention_heads=3, rope_parameters=rope)
    settings._attn_implementation = "eager"
    x = tokens(2, N, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("gpt_neox").GPTNeoXAttention(settings, layer_idx=0), dtype)
        waves = model("gpt_neox").GPTNeoXRotaryEmbedding(settings)(x, torch.arange(N)[None])
        theirs, _ = block(x, before(N, dtype), position_embeddings=waves)
    qkv = block.query_key_value(x).unflatten(-1, (3, 3, 16)).permute(3, 0, 2, 1, 4)
    ours = block.dense(attended(qkv, RotaryEmbedding(16, rotary_dim=4, scaling=scaling)))
    agree("rotary_1d" if scaling is None else "rotary_yarn", block, x, ours, theirs)


@DTYPES
@pytest.mark.parametrize("turning", [16, 8])
def test_gpt_js_attention(turning: int, dtype: torch.dtype) -> None:
    """Neighbours turn, in the whole head or in a part of it."""
    settings = config("gptj", n_embd=48, n_head=3, n_positions=N, rotary_dim=turning)
    settings._attn_implementation = "eager"
    x = tokens(2, N, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("gptj").GPTJAttention(settings, layer_idx=0), dtype)
        theirs, _ = block(x, attention_mask=before(N, dtype), position_ids=torch.arange(N)[None])
    qkv = (heads(layer(x), 3) for layer in (block.q_proj, block.k_proj, block.v_proj))
    ours = block.out_proj(attended(qkv, RotaryEmbedding(16, rotary_dim=turning, layout="interleaved")))
    agree("rotary_1d (interleaved)", block, x, ours, theirs)


@DTYPES
def test_roformers_attention(dtype: torch.dtype) -> None:
    """Neighbours turn; no mask."""
    settings = config("roformer", hidden_size=48, num_attention_heads=3, attention_probs_dropout_prob=0.0)
    x = tokens(2, N, 48, dtype=dtype)
    with running_in(dtype):
        block = random(model("roformer").RoFormerSelfAttention(settings), dtype)
        table = model("roformer").RoFormerSinusoidalPositionalEmbedding(N, 16).create_weight()[None, None]
        theirs = block(x, sinusoidal_pos=table)[0]
    qkv = (heads(layer(x), 3) for layer in (block.query, block.key, block.value))
    ours = attended(qkv, RotaryEmbedding(16, layout="interleaved"), causal=False)
    agree("rotary_1d (interleaved)", block, x, ours, theirs)


# sinusoids


@DTYPES
@pytest.mark.parametrize("name", ["MarianSinusoidalPositionalEmbedding", "Speech2TextSinusoidalPositionalEmbedding"])
@pytest.mark.parametrize("width", [4, 6, 64])
def test_sinusoids_added_to_tokens(width: int, name: str, dtype: torch.dtype) -> None:
    """All sines, then all cosines. Speech2Text has tensor2tensor's frequencies, 10000^(-p / (pairs - 1)), a base that
    depends on the width, and its tokens begin at place 2."""
    n, pairs = 60, width // 2
    x = tokens(2, n, width, dtype=dtype)
    with running_in(dtype):
        if name.startswith("Marian"):
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
    layers_agree("sinusoidal_1d (grouped)", f"transformers {name}", ours, theirs, {"x": x}, limit=limit)


# Llama 4


@DTYPES
@pytest.mark.parametrize("n", [N, 1], ids=["a text", "a token after a cache"])
def test_llama_4s_temperature(n: int, dtype: torch.dtype) -> None:
    """Its layers without a rotation: queries grow by the logarithm of how often 7 tokens came before."""
    settings = importlib.import_module("transformers").Llama4TextConfig(
        num_hidden_layers=1, hidden_size=12, num_attention_heads=3, num_key_value_heads=1, head_dim=4,
        no_rope_layers=[0], attn_temperature_tuning=True, attn_scale=0.7, floor_scale=7,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    block = random(model("llama4").Llama4TextAttention(settings, 0), dtype)
    x, past = tokens(2, n, 12, dtype=dtype), [tokens(2, 1, N - n, 4, dtype=dtype) for _ in "kv"]
    with running_in(dtype):
        cache = importlib.import_module("transformers").DynamicCache() if n < N else None
        if cache is not None:
            cache.update(*past, 0)
        theirs, _ = block(x, None, before(N, dtype)[None, None, N - n :], cache)
    q, *kv = (heads(one(x), count) for one, count in ((block.q_proj, 3), (block.k_proj, 1), (block.v_proj, 1)))
    k, v = (torch.cat(pair, dim=2) for pair in zip(past, kv, strict=True))
    factor = torch.tensor([1 + 0.7 * math.log1p((place + 1) // 7) for place in range(N - n, N)], dtype=torch.float64)
    position = QueryScale(factor[None, None])
    causal = Mask.causal() if n == N else None
    output = block.o_proj(merged(attention(q, k, v, position=position, mask=causal, backend="reference")))
    agree("QueryScale", block, x, output, theirs, limit=LIMITS[dtype])  # one query: gradients of its keys cancel


# DeepSeek V4


@DTYPES
@pytest.mark.parametrize("n", [N, 1], ids=["a text", "a token after a cache"])
def test_deepseek_v4s_values_turn(n: int, dtype: torch.dtype) -> None:
    """A sliding layer: keys are the values, their last dimensions turn, and the output turns back."""
    window, start = 9, 12 - 8
    settings = config(
        "deepseek_v4", hidden_size=16, num_attention_heads=4, head_dim=12, partial_rotary_factor=8 / 12, q_lora_rank=8,
        num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=window, o_groups=2, o_lora_rank=4,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    library = model("deepseek_v4")
    block = random(library.DeepseekV4Attention(settings, 0), dtype)
    x, past = tokens(2, n, 16, dtype=dtype), tokens(2, 1, min(N - n, window - 1), 12, dtype=dtype)
    m = n + past.shape[2]
    place = torch.arange(N - n, N)
    distance = place[:, None] - torch.arange(N - m, N)
    hidden = (distance < 0) | (distance >= window)
    mask = torch.zeros(1, 1, n, m, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    with running_in(dtype):
        cache = importlib.import_module("transformers").DynamicCache(config=settings) if n < N else None
        if cache is not None:
            cache.update(past, past, 0)
        turns = library.DeepseekV4RotaryEmbedding(settings)(x, place[None], layer_type="main")
        theirs, _ = block(x, {"main": turns}, place[None], mask, cache)
        q = block.q_b_norm(heads(block.q_b_proj(block.q_a_norm(block.q_a_proj(x))), 4))
        kv = heads(block.kv_norm(block.kv_proj(x)), 1)
    angles = RotaryEmbedding(8, layout="interleaved").angles(Sequence(n, start=N - n))
    if n < N:  # what a cache holds has been turned
        kv = torch.cat([past, rotate(kv, angles, layout="interleaved", start=start)], dim=2)
    keys = angles if n == N else None
    position = Rotation(angles, keys, "interleaved", start=start, values=True) + Sinks(block.sinks)
    own = attention(q, kv, kv, position=position, mask=Mask(window - 1, 0) if n == N else None, backend="reference")
    output = block.o_b_proj(block.o_a_proj(merged(own).unflatten(-1, (2, -1))).flatten(2))
    agree("Rotation.values", block, x, output, theirs)
