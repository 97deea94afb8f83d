"""Parts of `on_gpu.py`: retrofitted models beside the published ones, and FlexAttention in tiles that fit.

Both say each result as it comes. Models are built from configurations, with random weights, without a network.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Say = Callable[..., None]
BORDERS = (1024, 2048, 4096, 8192)
"""Tokens at which a border is looked for, one element of the batch."""


def models(layers: int, wide: int) -> dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, int | None], ...]]]:
    """By name, how a model is made, and batches and lengths; None for images, which have the model's size."""
    from retrofit import _timm, _transformers

    heads = wide // 64
    text = {"vocab_size": 1024, "num_hidden_layers": layers, "hidden_size": wide, "num_attention_heads": heads}
    image = {"num_hidden_layers": layers, "hidden_size": wide, "num_attention_heads": heads, "drop_path_rate": 0.0}

    def t5() -> nn.Module:
        sizes = {"d_model": wide, "d_kv": 64, "num_heads": heads, "num_layers": layers, "d_ff": 4 * wide}
        return _transformers("T5Config", "T5EncoderModel", vocab_size=1024, dropout_rate=0.0, **sizes)

    def deberta() -> nn.Module:
        return _transformers(
            "DebertaV2Config", "DebertaV2Model", **text, intermediate_size=4 * wide, relative_attention=True,
            position_buckets=256, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm",
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8192,
        )  # fmt: skip

    def bloom() -> nn.Module:
        return _transformers(
            "BloomConfig", "BloomModel", vocab_size=1024, hidden_size=wide, n_layer=layers, n_head=heads
        )

    def beit(pixels: int) -> Callable[[], nn.Module]:
        return lambda: _transformers(
            "BeitConfig", "BeitModel", **image, image_size=pixels, intermediate_size=4 * wide,
            use_relative_position_bias=True,
        )  # fmt: skip

    one = tuple((1, tokens) for tokens in BORDERS)
    return {
        "T5 encoder": (t5, ((16, 512), (4, 2048), *one)),
        "BEiT 512 px": (beit(512), ((4, None),)),
        "BEiT 224 px": (beit(224), ((32, None),)),
        "DeBERTa-v2": (deberta, ((8, 512), (2, 2048), *one[:3])),
        "timm swinv2_tiny 256 px": (lambda: _timm("swinv2_tiny_window16_256"), ((16, None),)),
        "timm vit_relpos_base 224 px": (lambda: _timm("vit_relpos_base_patch16_224"), ((32, None),)),
        "BEiT 1,024 px": (beit(1024), ((1, None),)),
        "BLOOM": (bloom, ((4, 2048), *one)),
    }


def each_retrofit(say: Say, left: Callable[[], float], *, dry: bool) -> None:
    """Both ways, under autocast, relpos at every length; and the border that one element of the batch gives."""
    from relpos.bench.retrofits import RetrofitPair, RetrofitTiming, border_by

    device = torch.device("cpu" if dry else "cuda")
    for name, (build, sizes) in models(1 if dry else 6, 64 if dry else 768).items():
        if dry and "timm" in name:
            continue  # of one size, too large for a CPU
        try:
            torch.manual_seed(0)
            pair = RetrofitPair(build().to(device), always=True, verify=False)
        except Exception as error:
            say("retrofits", model=name, failed=repr(error)[:300])
            continue
        found: dict[bool, list[RetrofitTiming]] = {True: [], False: []}
        for batch, length in [(1, None if sizes[0][1] is None else 24)] if dry else sizes:
            for train in (True, False):
                if left() < 3:
                    return
                try:
                    rounds = 1 if dry else 5
                    lengths = () if length is None else (length,)
                    (one,) = pair.timings(lengths, train=train, rounds=rounds, batch=batch, half=True)
                except Exception as error:  # out of memory: longer ones would be, too
                    say("retrofits", model=name, batch=batch, length=length, train=train, failed=repr(error)[:300])
                    continue
                say(
                    "retrofits", model=name, batch=batch, length=length, tokens=one.tokens, train=train,
                    published_ms=one.published_ms, retrofit_ms=one.retrofit_ms, ratio=one.ratio,
                    published_mib=one.published_mib, retrofit_mib=one.retrofit_mib,
                )  # fmt: skip
                if batch == 1:
                    found[train].append(one)
        for train, timings in found.items():
            if timings:
                say("retrofits", model=name, train=train, border=border_by(timings), timed=len(timings))
        del pair
        if device.type == "cuda":
            torch.cuda.empty_cache()


TILES = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 4, "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_stages": 1, "bwd_num_warps": 4,
}  # fmt: skip
"""With which FlexAttention compiles for Hopper; its own want 240 KiB of shared memory with a captured float32 table."""


def _adding(values: Tensor, tokens: int) -> Callable[..., Tensor]:
    """FlexAttention's change of a score: the table's number of the pair."""

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + values[h, i - j + tokens - 1]

    return add


def each_flex(say: Say, left: Callable[[], float], *, dry: bool) -> None:
    """Milliseconds of a forward pass and a step beside our own, with a table that learns and one that does not."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from relpos import LineBias, Mask, Sequence, attention
    from relpos import lines as lines_of
    from relpos.bench.measure import interleaved
    from relpos.bench.peers import Workload

    kind, heads, tokens = ("cpu", 1, 128) if dry else ("cuda", 8, 8192)
    for causal, learned in ((False, True), (True, True), (False, False)):
        if left() < 10:
            return
        try:
            q, k, v = (
                torch.randn(1, heads, tokens, 64, device=kind, dtype=torch.bfloat16, requires_grad=not dry)
                for _ in range(3)
            )
            line = lines_of(Sequence(tokens), device=torch.device(kind))
            values = torch.randn(heads, line.length, device=kind, requires_grad=learned and not dry)
            blocks = None
            if causal:
                blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=kind)
            add = _adding(values, tokens)
            torch._dynamo.reset()
            compiled: Any = flex_attention if dry else torch.compile(flex_attention, dynamic=False)

            def theirs(q=q, k=k, v=v, add=add, blocks=blocks, compiled=compiled) -> Tensor:  # type: ignore[no-untyped-def]
                out: Tensor = compiled(q, k, v, score_mod=add, block_mask=blocks, kernel_options=None if dry else TILES)
                return out

            def ours(q=q, k=k, v=v, values=values, line=line, causal=causal) -> Tensor:  # type: ignore[no-untyped-def]
                return attention(q, k, v, position=LineBias(values, line), mask=Mask.causal() if causal else None)  # type: ignore[return-value]

            leaves = () if dry else tuple(x for x in (q, k, v, values) if x.requires_grad)
            up = torch.randn_like(q)
            for train in (False, True):
                of = leaves if train else ()
                works = {name: Workload(one, of, up) for name, one in (("flex", theirs), ("relpos", ours))}
                with torch.set_grad_enabled(train):
                    times, reasons = interleaved(works, 1, 1 if dry else 9, kind)
                medians = {name: statistics.median(one) for name, one in times.items() if one}
                say("flex", tokens=tokens, causal=causal, learned=learned, train=train, ms=medians, failed=reasons)
        except Exception as error:
            say("flex", tokens=tokens, causal=causal, learned=learned, failed=repr(error)[:300])
