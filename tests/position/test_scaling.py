"""Context scalings of rotary positions: frequencies and magnitudes by loops and as published, and whole attentions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import parity
from conformance.suite import LibrarySuite
from position.published import config, heads, model
from position.widened import in_float64
from relpos import (
    DynamicNTK,
    Grid,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    Mask,
    NTKScaling,
    Positions,
    RotaryEmbedding,
    Rotation,
    Sequence,
    YaRN,
    attention,
    rotate,
)
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle

FAST_SHARE = 4  # of its tests, in the fast part

Scaled = tuple[list[float], float]


# the papers' formulas, by loops; d = 2 P dimensions turn, theta[p] = base^(-2p / d)


def plain(d: int, base: float) -> list[float]:
    return [1 / base ** (2 * p / d) for p in range(d // 2)]


def linear(d: int, base: float, length: int, s: float) -> Scaled:
    return [theta / s for theta in plain(d, base)], 1.0


def ntk(d: int, base: float, length: int, s: float) -> Scaled:
    """b' = b s^(d / (d - 2)); a single pair turns by 1 whatever the base."""
    return plain(d, base if d == 2 else base * s ** (d / (d - 2))), 1.0


def dynamic(d: int, base: float, length: int, s: float, trained: int) -> Scaled:
    return ntk(d, base, length, s * length / trained - (s - 1) if length > trained else 1.0)


def yarn(d: int, base: float, length: int, s: float, trained: int, fast: float = 32, slow: float = 1) -> Scaled:
    """The published ramp: over pairs, between those that turn `fast` and `slow` times, rounded outwards."""

    def pair(turns: float) -> float:
        return d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), d - 1)
    bands = []
    for p, theta in enumerate(plain(d, base)):
        if p <= low:
            kept = 1.0
        elif p >= high:
            kept = 0.0
        else:
            kept = 1 - (p - low) / (high - low)
        bands.append((1 - kept) * theta / s + kept * theta)
    return bands, 0.1 * math.log(s) + 1 if s > 1 else 1.0


def longrope(d: int, base: float, length: int, short: Any, long: Any, trained: int, s: float) -> Scaled:
    factors = long if length > trained else short
    return [theta / f for theta, f in zip(plain(d, base), factors, strict=True)], math.sqrt(
        1 + math.log(s) / math.log(trained)
    )


def llama3(d: int, base: float, length: int, s: float, trained: int, low: float, high: float) -> Scaled:
    bands = []
    for theta in plain(d, base):
        wave = 2 * math.pi / theta
        if wave < trained / high:
            bands.append(theta)
        elif wave > trained / low:
            bands.append(theta / s)
        else:
            smooth = (trained / wave - low) / (high - low)
            bands.append((1 - smooth) * theta / s + smooth * theta)
    return bands, 1.0


# the suite: attention by loops with those


class Scaling(LibrarySuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    declared = (("sdpa", torch.float32), ("reference", torch.bfloat16), ("reference", torch.float32))
    sampled = 2
    scaling: ClassVar[Any]
    loops: ClassVar[Callable[..., Scaled]]
    arguments: ClassVar[tuple[Any, ...]]
    rotary_dim: ClassVar[int] = 4
    every: ClassVar[int] = 6  # of the cases

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Any) -> RotaryEmbedding:
        return RotaryEmbedding(
            site.head_dim, base=100.0, rotary_dim=self.rotary_dim, scaling=self.scaling(*self.arguments)
        )

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
        sides = oracle.raster(queries), oracle.raster(keys)
        top = [one.values.new_tensor(one.high).item() for one in (queries, keys) if isinstance(one, Positions)]
        length = 1 + max([0, *top, *(place[0] for side in sides for place in side if place is not None)])
        bands, magnitude = type(self).loops(self.rotary_dim, 100.0, length, *self.arguments)

        def turned(x: Tensor, places: list[Any]) -> Tensor:
            rows = [[0.0 if place is None else place[0] * w for w in bands] for place in places]
            wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
            angles = torch.tensor(rows, dtype=torch.float64).to(wide.dtype)[None, None]
            return oracle.rotate(wide, angles, "half", torch.full_like(angles, magnitude)).to(x.dtype)

        return oracle.attention(turned(q, sides[0]), turned(k, sides[1]), v, allowed=allowed)[0]


class TestLinear(Scaling):
    alike = True
    scaling = LinearScaling
    loops = linear
    arguments = (2.5,)
    preset = "rotary_linear"


class TestNTK(Scaling):
    alike = True
    scaling = NTKScaling
    loops = ntk
    arguments = (2.5,)
    preset = "rotary_ntk"


class TestDynamicNTK(Scaling):
    """Some cases are longer than 6 places, some not."""

    scaling = DynamicNTK
    loops = dynamic
    arguments = (2.0, 6)
    preset = "rotary_dynamic_ntk"
    every = 2


class TestYaRN(Scaling):
    alike = True
    scaling = YaRN
    loops = yarn
    arguments = (4.0, 64)
    preset = "rotary_yarn"
    every = 4


class TestYaRNPartial(Scaling):
    """The magnitude is for what turns."""

    alike = True
    scaling = YaRN
    loops = yarn
    arguments = (4.0, 64)
    rotary_dim = 2
    axes = (1,)
    every = 4
    row = "rotary_yarn (partial)"


class TestLongRoPE(Scaling):
    scaling = LongRoPE
    loops = longrope
    arguments = ((1.0, 1.5), (2.0, 7.0), 6, 3.0)
    row = "LongRoPE"
    every = 2


class TestLlama3(Scaling):
    """Of 2 pairs the first turns 3 times in 18 places and is in between."""

    alike = True
    scaling = Llama3Scaling
    loops = llama3
    arguments = (8.0, 18, 1.0, 4.0)
    preset = "rotary_llama3"


# frequencies


BASES = (10000.0, 500000.0)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("d", [2, 4, 16, 64, 128])
def test_frequencies_by_loops(d: int, base: float) -> None:
    """To float64's last places, at lengths on both sides of every edge."""
    short, long = tuple(1 + p / d for p in range(d // 2)), tuple(1.0 + p for p in range(d // 2))
    for s in (1.0, 1.5, 4.0, 32.0):
        for trained in (16, 2048, 8192):
            for length in (1, trained - 1, trained, trained + 1, 7 * trained):
                for ours, wanted in (
                    (LinearScaling(s), linear(d, base, length, s)),
                    (NTKScaling(s), ntk(d, base, length, s)),
                    (DynamicNTK(s, trained), dynamic(d, base, length, s, trained)),
                    (YaRN(s, trained), yarn(d, base, length, s, trained)),
                    (YaRN(s, trained, 16.0, 2.0), yarn(d, base, length, s, trained, 16, 2)),
                    (LongRoPE(short, long, trained, s), longrope(d, base, length, short, long, trained, s)),
                    (Llama3Scaling(s, trained), llama3(d, base, length, s, trained, 1, 4)),
                    (Llama3Scaling(s, trained, 2.0, 32.0), llama3(d, base, length, s, trained, 2, 32)),
                ):
                    bands, magnitude = ours(base, d // 2, length)
                    assert bands == pytest.approx(wanted[0], rel=1e-13), (ours, length)
                    assert magnitude == pytest.approx(wanted[1], rel=1e-15), ours


def published(kind: str, head_dim: int, partial: float, trained: int, **rope: Any) -> tuple[Any, Any]:
    """transformers' function for a type of scaling, and a configuration for it."""
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    parameters = {"rope_type": kind, "partial_rotary_factor": partial, **rope}
    longest = trained if kind == "dynamic" else 8 * trained
    settings = config(
        "llama",
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters=parameters,
    )
    return functions[kind], settings


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("trained", [128, 4096])
def test_frequencies_as_published(trained: int, base: float, partial: float) -> None:
    """Theirs in float64: to 13 digits, but where they keep a float32 tensor of factors (none in float64).
    As they are, in float32: 7 digits, and a power of the base costs some."""
    d = int(64 * partial)
    short, long = [1 + p / d for p in range(d // 2)], [1.0 + p for p in range(d // 2)]
    original = {"original_max_position_embeddings": trained}
    for s in (1.0, 2.0, 4.0, 8.0, 40.0):
        rows: list[tuple[Any, str, dict[str, Any]]] = [
            (LinearScaling(s), "linear", {}),
            (DynamicNTK(s, trained), "dynamic", {}),
            (YaRN(s, trained), "yarn", original),
            (YaRN(s, trained, truncate=False), "yarn", {**original, "truncate": False}),
            (YaRN(s, trained, 48.0, 3.0), "yarn", {**original, "beta_fast": 48.0, "beta_slow": 3.0}),
            (YaRN(s, trained, magnitude=1.25), "yarn", {**original, "attention_factor": 1.25}),
            (
                LongRoPE(tuple(short), tuple(long), trained, s),
                "longrope",
                {**original, "short_factor": short, "long_factor": long},
            ),
            (
                Llama3Scaling(s, trained, 1.0, 4.0),
                "llama3",
                {**original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            ),
        ]
        for ours, kind, rope in rows:
            function, settings = published(kind, 64, partial, trained, rope_theta=base, factor=s, **rope)
            for length in (None, 1, trained, trained + 1, 5 * trained):
                bands, magnitude = ours(base, d // 2, trained if length is None else length)
                for wide, slack in ((True, 1e-13), (False, 5e-6)):
                    with in_float64() if wide else nullcontext():
                        theirs, factor = function(settings, seq_len=length)
                    assert theirs.dtype == (torch.float64 if wide else torch.float32)
                    assert list(bands) == pytest.approx(theirs.tolist(), rel=slack), (ours, length)
                    assert magnitude == pytest.approx(factor, rel=1e-15), ours


@pytest.mark.usefixtures("timm")
def test_deepseeks_magnitude() -> None:
    """The ratio that YaRN's docstring gives for mscale and mscale_all_dim."""
    rope = {"original_max_position_embeddings": 4096, "mscale": 0.9, "mscale_all_dim": 0.7}
    function, settings = published("yarn", 64, 1.0, 4096, rope_theta=10000.0, factor=40.0, **rope)
    wanted = (0.1 * 0.9 * math.log(40) + 1) / (0.1 * 0.7 * math.log(40) + 1)
    assert function(settings)[1] == pytest.approx(wanted, rel=1e-15)
    assert YaRN(40.0, 4096, magnitude=wanted)(10000.0, 32, 1)[1] == wanted


def test_ntk_is_dynamic_ntk_at_the_length_that_it_is_for() -> None:
    assert NTKScaling(4.0)(10000.0, 32, 1) == DynamicNTK(1.0, 2048)(10000.0, 32, 8192)


def test_what_each_does_to_the_fastest_and_the_slowest_pair() -> None:
    """Trained on 2,048 and stretched by 4: pair 0 turns by a radian a place, the last by base^(-31/32)."""
    fast, slow = 1.0, 10000.0 ** (-31 / 32)
    for scaling, first, last in (
        (LinearScaling(4.0), fast / 4, slow / 4),
        (NTKScaling(4.0), fast, slow / 4),
        (YaRN(4.0, 2048), fast, slow / 4),
        (Llama3Scaling(4.0, 2048), fast, slow / 4),
    ):
        bands, _ = scaling(10000.0, 32, 1)
        assert (bands[0], bands[-1]) == pytest.approx((first, last), rel=1e-12), scaling


def test_yarn_where_its_ramp_has_no_width() -> None:
    """In contexts of a few tokens no pair turns once, and published code, whose ramp then runs backwards, keeps every
    pair. Here the first is kept and all others are interpolated."""
    assert YaRN(4.0, 3)(100.0, 3, 1)[0] == pytest.approx([1.0, *(100 ** (-p / 3) / 4 for p in (1, 2))])
    assert YaRN(4.0, 10**9)(100.0, 3, 1)[0] == pytest.approx([100 ** (-p / 3) for p in range(3)]), "all turn often"


# published attention


LONG = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "linear": (LinearScaling(4.0), {"factor": 4.0}, "rotary_linear"),
    "ntk": (NTKScaling(4.0), {}, "rotary_ntk"),
    "dynamic": (DynamicNTK(2.0, 16), {"factor": 2.0}, "rotary_dynamic_ntk"),
    "yarn": (YaRN(4.0, 16), {"factor": 4.0, "original_max_position_embeddings": 16}, "rotary_yarn"),
    "longrope": (
        LongRoPE(tuple(LONG["short_factor"]), tuple(LONG["long_factor"]), 16, 4.0),
        {"factor": 4.0, "original_max_position_embeddings": 16, **LONG},
        "LongRoPE",
    ),
    "llama3": (
        Llama3Scaling(8.0, 16, 1.0, 4.0),
        {"factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "rotary_llama3",
    ),
}


def layer(kind: str, n: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Llama's attention and rotation under a scaling, of 3 heads and one key head, in the dtype throughout."""
    scaling, rope, _ = KINDS[kind]
    base = 100.0
    if kind == "ntk":
        base, kind = base * 4.0 ** (8 / 6), "default"
    settings = config(
        "llama",
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
        rope_parameters={"rope_type": kind, "rope_theta": base, **rope},
    )
    settings._attn_implementation = "eager"
    block = model("llama").LlamaAttention(settings, 0).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return block, model("llama").LlamaRotaryEmbedding(settings), scaling


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("n", [12, 40], ids=["within the trained length", "beyond it"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_llamas_attention(kind: str, dtype: torch.dtype, n: int) -> None:
    """The whole layer under a causal mask: output, and the gradients of tokens and projections.

    In float64 their angles are float64 too. In float32 theirs are products of float32 numbers, up to 39 radians here
    and so off by a few 1e-6, where ours are rounded once: the usual limit of 2e-5 has room for that.
    """
    wide = dtype == torch.float64
    with in_float64() if wide else nullcontext():
        block, rotary, scaling = layer(kind, n, dtype)
        x = torch.randn(2, n, 24, dtype=dtype, requires_grad=True)
        future = torch.full((n, n), float("-inf"), dtype=dtype).triu(1)[None, None]
        theirs = block(x, rotary(x, torch.arange(n)[None]), future)[0]
    leaves = {"x": x, **dict(block.named_parameters())}
    upstream = torch.randn_like(theirs)
    wanted = parity.with_gradients(theirs, leaves, upstream)

    q, k, v = (heads(x @ w.weight.T, count) for w, count in ((block.q_proj, 3), (block.k_proj, 1), (block.v_proj, 1)))
    own = RotaryEmbedding(8, base=100.0, scaling=scaling)
    attended = attention(q, k, v, position=own, queries=Sequence(n), mask=Mask.causal())
    assert isinstance(attended, Tensor)
    output = attended.transpose(1, 2).flatten(2) @ block.o_proj.weight.T
    found = parity.with_gradients(output, leaves, upstream)
    parity.agree(KINDS[kind][2], "transformers LlamaAttention", found, wanted, dtype=dtype)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("n", [12, 40], ids=["within the trained length", "beyond it"])
def test_phi_3s_attention_turns_a_part(n: int) -> None:
    """LongRoPE on half of each head: its magnitude is for the half that turns."""
    rope = {**KINDS["longrope"][1], "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    settings = config(
        "phi3",
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        pad_token_id=0,
        rope_parameters=rope,
    )
    settings._attn_implementation = "eager"
    with in_float64():
        block = model("phi3").Phi3Attention(settings, 0).double()
        rotary = model("phi3").Phi3RotaryEmbedding(settings)
        x = torch.randn(2, n, 48, dtype=torch.float64, requires_grad=True)
        future = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        theirs = block(x, rotary(x, torch.arange(n)[None]), future)[0]
    q, k, v = (heads(part, 3) for part in (x @ block.qkv_proj.weight.T).chunk(3, dim=-1))
    own = RotaryEmbedding(16, base=100.0, rotary_dim=8, scaling=KINDS["longrope"][0])
    attended = attention(q, k, v, position=own, queries=Sequence(n), mask=Mask.causal())
    assert isinstance(attended, Tensor)
    output = attended.transpose(1, 2).flatten(2) @ block.o_proj.weight.T
    leaves = {"x": x, **dict(block.named_parameters())}
    upstream = torch.randn_like(theirs)
    found, wanted = (parity.with_gradients(out, leaves, upstream) for out in (output, theirs))
    parity.agree("LongRoPE", "transformers Phi3Attention", found, wanted)


@pytest.mark.usefixtures("timm")
def test_gpt_neox_turns_a_part_under_yarn() -> None:
    """The quarter that turns is multiplied on both sides, the rest is not."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    settings = config("gpt_neox", hidden_size=48, num_attention_heads=3, rope_parameters=rope)
    q, k = torch.randn(2, 2, 3, 40, 16, dtype=torch.float64)
    with in_float64():
        cos, sin = model("gpt_neox").GPTNeoXRotaryEmbedding(settings)(q, torch.arange(40)[None])
        theirs = model("gpt_neox").apply_rotary_pos_emb(q, k, cos, sin)
    rotation = RotaryEmbedding(16, rotary_dim=4, scaling=YaRN(4.0, 16)).terms(Sequence(40)).one(Rotation)
    assert rotation is not None
    assert rotation.key is not None
    for mine, angles, other in ((q, rotation.query, theirs[0]), (k, rotation.key, theirs[1])):
        turned = rotate(mine, angles, layout="half", magnitude=rotation.magnitude)
        torch.testing.assert_close(turned, other, rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_published_modules_from_one_text_to_the_next(kind: str) -> None:
    """One module that sees texts of many lengths turns as ours, which has no memory. But theirs for dynamic NTK keeps
    the frequencies of the longest text so far, until a text is shorter than the trained length."""
    with in_float64():
        _, rotary, scaling = layer(kind, 1, torch.float64)
    own = RotaryEmbedding(8, base=100.0, scaling=scaling)
    longest = 0
    for n in (5, 16, 17, 40, 29, 12, 18):
        with in_float64():
            cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(n)[None])
        longest = max(longest, n) if n >= 16 else 0
        length = longest if kind == "dynamic" and longest else n
        magnitude = own.bands(length)[1]
        angles = own.angles(Sequence(n), length)[0, 0]
        torch.testing.assert_close(cos[0, :, :4], angles.cos() * magnitude, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sin[0, :, :4], angles.sin() * magnitude, rtol=1e-12, atol=1e-12)
        if n == 29 and kind == "dynamic":
            assert own.bands(n) != own.bands(length), "where the two differ"


# the length at hand


@pytest.mark.parametrize("scaling", [DynamicNTK(2.0, 4), KINDS["longrope"][0]], ids=["dynamic NTK", "LongRoPE"])
def test_decoding_with_unrotated_keys(scaling: Any) -> None:
    """Each step is the last row of the full pass over the tokens so far, and no row of the pass over more of them."""
    own, n = RotaryEmbedding(8, base=100.0, scaling=scaling), 20
    q, k, v = torch.randn(3, 2, 3, n, 8, dtype=torch.float64)
    over_all = attention(q, k, v, position=own, queries=Sequence(n), mask=Mask.causal())
    assert isinstance(over_all, Tensor)
    for t in range(n):
        so_far = [x[:, :, : t + 1] for x in (q, k, v)]
        step = attention(
            so_far[0][:, :, t:], *so_far[1:], position=own, queries=Sequence(1, start=t), keys=Sequence(t + 1)
        )
        full = attention(*so_far, position=own, queries=Sequence(t + 1), mask=Mask.causal())
        assert isinstance(step, Tensor)
        assert isinstance(full, Tensor)
        torch.testing.assert_close(step, full[:, :, t:], rtol=1e-12, atol=1e-12)
        if 0 < t < 16 and own.bands(t + 1) != own.bands(n):
            assert (step - over_all[:, :, t : t + 1]).abs().max() > 1e-4


def test_keys_that_were_cached_rotated_are_off() -> None:
    """What transformers issue 25104 is about; below the trained length they are right."""
    own = RotaryEmbedding(8, base=100.0, scaling=DynamicNTK(2.0, 4))
    k = torch.randn(1, 1, 20, 8, dtype=torch.float64)
    for t, same in ((2, True), (3, True), (9, False)):
        written = rotate(k[:, :, :1], own.angles(Sequence(1, start=1)), layout="half")
        (rotation,) = own.terms(Sequence(1, start=t), Positions(torch.tensor([1]), low=1, high=1)).of(Rotation)
        assert rotation.key is not None
        now = rotate(k[:, :, :1], rotation.key, layout="half")
        assert torch.equal(written, now) == same


def test_length_is_the_largest_place_of_both_sides() -> None:
    def seen(queries: Coordinates, keys: Coordinates | None) -> set[int]:
        lengths = []

        def scaling(base: float, pairs: int, length: int) -> tuple[tuple[float, ...], float]:
            lengths.append(length)
            return (1.0,) * pairs, 1.0

        own = RotaryEmbedding(8, scaling=scaling)
        lengths.clear()
        own.terms(queries, keys)
        return set(lengths)

    far = Positions(torch.tensor([3, 1]), low=0, high=11)
    assert seen(Sequence(5), None) == {5}
    assert seen(Sequence(1, start=6), Sequence(7)) == {7}
    assert seen(Sequence(2), Sequence(9, prefix=2)) == {9}
    assert seen(Sequence(2, start=-7), None) == {1}
    assert seen(far, Sequence(5)) == {12}, "plain numbers: no tensor is read"


def test_several_axes_have_it_each() -> None:
    """A grid squeezed into half of its places, as EVA does with its reference size."""
    half = RotaryEmbedding(8, axes=2, base=100.0, scaling=LinearScaling(2.0))
    whole = RotaryEmbedding(8, axes=2, base=100.0)
    torch.testing.assert_close(half.angles(Grid(4, 6)), whole.angles(Grid(4, 6)) / 2)
