"""Context scalings of rotary positions: frequencies and magnitudes by loops and as published, and whole attentions."""

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from parity import layers_agree
from position.published import DTYPES, before, config, heads, model, random, running_in, tokens
from position.rotations import RotationSuite
from relpos import (
    DynamicNTK,
    Grid,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    Mask,
    NTKScaling,
    Positions,
    ProportionalScaling,
    RotaryEmbedding,
    Sequence,
    YaRN,
    attention,
)
from relpos.core import Coordinates
from relpos.testing import oracle

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


def yarn(d: int, base: float, length: int, s: float, trained: int) -> Scaled:
    """The published ramp: over pairs, between those that turn 32 times and once, rounded outwards."""

    def pair(turns: float) -> float:
        return d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), d - 1)
    bands = []
    for p, theta in enumerate(plain(d, base)):
        kept = 1.0 if p <= low else 0.0 if p >= high else 1 - (p - low) / (high - low)
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


def proportional(d: int, base: float, length: int, share: float, s: float) -> Scaled:
    return [theta / s if p < math.floor(share * d / 2) else 0.0 for p, theta in enumerate(plain(d, base))], 1.0


# the suite: attention by loops with those


class Scaling(RotationSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    declared = (("sdpa", torch.float32), ("reference", torch.bfloat16), ("reference", torch.float32))
    sampled = 2
    scaling: ClassVar[Any]
    loops: ClassVar[Callable[..., Scaled]]
    arguments: ClassVar[tuple[Any, ...]]
    rotary_dim: ClassVar[int] = 4
    every: ClassVar[int] = 6

    def build(self, site: Any) -> RotaryEmbedding:
        return RotaryEmbedding(
            site.head_dim, base=100.0, rotary_dim=self.rotary_dim, scaling=self.scaling(*self.arguments)
        )

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        top = [one.high[0] for one in (side, other) if isinstance(one, Positions)]
        length = 1 + max([0, *top, *(place[0] for one in (side, other) for place in oracle.raster(one) if place)])
        bands, magnitude = type(self).loops(self.rotary_dim, 100.0, length, *self.arguments)
        rows = [[0.0 if place is None else place[0] * w for w in bands] for place in oracle.raster(side)]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        angles = torch.tensor(rows, dtype=torch.float64).to(wide.dtype)[None, None]
        return oracle.rotate(wide, angles, "half", torch.full_like(angles, magnitude)).to(x.dtype)


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


class TestProportional(Scaling):
    """Of 2 pairs the first turns."""

    alike = True
    scaling = ProportionalScaling
    loops = proportional
    arguments = (0.75, 2.0)
    row = "ProportionalScaling"


# frequencies


def test_longrope2_is_longrope_with_its_factors() -> None:
    """Up to the trained length plain frequencies; beyond, 1 for the first pairs and a stretch for the others."""
    factors = (1.0, 1.0, 4.2, 4.4)
    own = LongRoPE((1.0,) * 4, factors, 16, 4.0)
    assert list(own(1e4, 4, 16)[0]) == pytest.approx(plain(8, 1e4), rel=1e-15)
    assert list(own(1e4, 4, 17)[0]) == pytest.approx([t / f for t, f in zip(plain(8, 1e4), factors, strict=True)])


def test_ntk_is_dynamic_ntk_at_the_length_that_it_is_for() -> None:
    for pairs in (1, 2, 32):
        assert NTKScaling(4.0)(10000.0, pairs, 1) == DynamicNTK(1.0, 2048)(10000.0, pairs, 8192)
    assert NTKScaling(4.0)(10000.0, 1, 1) == ((1.0,), 1.0), "a single pair turns by 1 whatever the base"


def published(kind: str, head_dim: int, partial: float, trained: int, **rope: Any) -> tuple[Any, Any]:
    """transformers' function for a type of scaling, and a configuration for it."""
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    longest = trained if kind == "dynamic" else 8 * trained
    parameters = {"rope_type": kind, "partial_rotary_factor": partial, **rope}
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": longest}
    return functions[kind], config("llama", **sizes, rope_parameters=parameters)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(("trained", "base", "partial"), [(128, 10000.0, 1.0), (4096, 500000.0, 0.25)])
def test_frequencies_as_published(trained: int, base: float, partial: float) -> None:
    """Theirs in float64: to 13 digits, but where they keep a float32 tensor of factors (none in float64).
    As they are, in float32: 7 digits, and a power of the base costs some."""
    d = int(64 * partial)
    short, long = [1 + p / d for p in range(d // 2)], [1.0 + p for p in range(d // 2)]
    original = {"original_max_position_embeddings": trained}
    lists = {**original, "short_factor": short, "long_factor": long}
    for s in (1.0, 2.0, 40.0):
        rows: list[tuple[Any, str, dict[str, Any]]] = [
            (LinearScaling(s), "linear", {}),
            (DynamicNTK(s, trained), "dynamic", {}),
            (YaRN(s, trained), "yarn", original),
            (YaRN(s, trained, truncate=False), "yarn", {**original, "truncate": False}),
            (YaRN(s, trained, 48.0, 3.0), "yarn", {**original, "beta_fast": 48.0, "beta_slow": 3.0}),
            (YaRN(s, trained, magnitude=1.25), "yarn", {**original, "attention_factor": 1.25}),
            (LongRoPE(tuple(short), tuple(long), trained, s), "longrope", lists),
            (
                Llama3Scaling(s, trained, 2.0, 32.0),
                "llama3",
                {**original, "low_freq_factor": 2.0, "high_freq_factor": 32.0},
            ),
        ]
        for ours, kind, rope in rows:
            function, settings = published(kind, 64, partial, trained, rope_theta=base, factor=s, **rope)
            for length, (dtype, slack) in itertools.product(
                (None, 1, trained, trained + 1, 5 * trained), ((torch.float64, 1e-13), (torch.float32, 5e-6))
            ):
                bands, magnitude = ours(base, d // 2, trained if length is None else length)
                with running_in(dtype):
                    theirs, factor = function(settings, seq_len=length)
                assert theirs.dtype == dtype
                assert list(bands) == pytest.approx(theirs.tolist(), rel=slack), (ours, length)
                assert magnitude == pytest.approx(factor, rel=1e-15), ours


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("share", [0.25, 0.3, 1.0])
@pytest.mark.parametrize("head_dim", [6, 512])
def test_proportional_frequencies_as_published(head_dim: int, share: float) -> None:
    """Pairs are rounded down, and those that do not turn are exactly 0."""
    for factor, (dtype, slack) in itertools.product((1.0, 3.0), ((torch.float64, 1e-13), (torch.float32, 5e-6))):
        function, settings = published("proportional", head_dim, share, 128, rope_theta=1e6, factor=factor)
        with running_in(dtype):
            theirs, magnitude = function(settings)
        bands = ProportionalScaling(share, factor)(1e6, head_dim // 2, 1)
        assert list(bands[0]) == pytest.approx(theirs.tolist(), rel=slack, abs=0)
        assert bands[1] == magnitude == 1.0


@pytest.mark.usefixtures("timm")
def test_gemma_4s_waves() -> None:
    """The cosines and sines of its full attention, by its own configuration: a quarter of the pairs, base 1,000,000."""
    configs = importlib.import_module("transformers.models.gemma4.configuration_gemma4")
    settings = configs.Gemma4TextConfig(hidden_size=32, num_attention_heads=2, head_dim=16, global_head_dim=32)
    rope = settings.rope_parameters["full_attention"]
    assert rope == {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    with running_in(torch.float64):
        rotary = model("gemma4").Gemma4TextRotaryEmbedding(settings)
        theirs = rotary(torch.zeros(1, 9, 32, dtype=torch.float64), torch.arange(9)[None], "full_attention")
    own = RotaryEmbedding(32, base=1e6, scaling=ProportionalScaling(rope["partial_rotary_factor"]))
    angles = own.angles(Sequence(9))[0].repeat(1, 1, 2)
    for found, wanted in zip((angles.cos(), angles.sin()), theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("timm")
def test_deepseeks_magnitude() -> None:
    """The ratio that YaRN's docstring gives for mscale and mscale_all_dim."""
    rope = {"original_max_position_embeddings": 4096, "mscale": 0.9, "mscale_all_dim": 0.7}
    function, settings = published("yarn", 64, 1.0, 4096, rope_theta=10000.0, factor=40.0, **rope)
    wanted = (0.1 * 0.9 * math.log(40) + 1) / (0.1 * 0.7 * math.log(40) + 1)
    assert function(settings)[1] == pytest.approx(wanted, rel=1e-15)
    assert YaRN(40.0, 4096, magnitude=wanted)(10000.0, 32, 1)[1] == wanted


def test_yarn_where_its_ramp_has_no_width() -> None:
    """In contexts of a few tokens no pair turns once, and published code, whose ramp then runs backwards, keeps every
    pair. Here the first is kept and all others are interpolated."""
    assert YaRN(4.0, 3)(100.0, 3, 1)[0] == pytest.approx([1.0, *(100 ** (-p / 3) / 4 for p in (1, 2))])
    assert YaRN(4.0, 10**9)(100.0, 3, 1)[0] == pytest.approx([100 ** (-p / 3) for p in range(3)]), "all turn often"


# published attention


LONG = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
OF_16 = {"factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "linear": (LinearScaling(4.0), {"factor": 4.0}, "rotary_linear"),
    "ntk": (NTKScaling(4.0), {}, "rotary_ntk"),
    "dynamic": (DynamicNTK(2.0, 16), {"factor": 2.0}, "rotary_dynamic_ntk"),
    "yarn": (YaRN(4.0, 16), OF_16, "rotary_yarn"),
    "longrope": (
        LongRoPE(tuple(LONG["short_factor"]), tuple(LONG["long_factor"]), 16, 4.0), {**OF_16, **LONG}, "LongRoPE",
    ),
    "proportional": (
        ProportionalScaling(0.5, 2.0), {"partial_rotary_factor": 0.5, "factor": 2.0}, "ProportionalScaling",
    ),
    "llama3": (
        Llama3Scaling(8.0, 16, 1.0, 4.0), {**OF_16, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "rotary_llama3",
    ),
}  # fmt: skip


def layer(kind: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Llama's attention and rotation under a scaling, of 3 heads and one key head, in the dtype throughout."""
    scaling, rope, _ = KINDS[kind]
    base = 100.0
    if kind == "ntk":
        base, kind = base * 4.0 ** (8 / 6), "default"
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 16}
    settings = config("llama", **sizes, rope_parameters={"rope_type": kind, "rope_theta": base, **rope})
    settings._attn_implementation = "eager"
    return (
        random(model("llama").LlamaAttention(settings, 0), dtype),
        model("llama").LlamaRotaryEmbedding(settings),
        scaling,
    )


@pytest.mark.usefixtures("timm")
@DTYPES
@pytest.mark.parametrize(
    ("kind", "n"), [*((kind, 40) for kind in KINDS), *((kind, 12) for kind in ("dynamic", "yarn", "longrope"))]
)
def test_llamas_attention(kind: str, n: int, dtype: torch.dtype) -> None:
    """The whole layer under a causal mask, beyond the trained length of 16 and within it.

    In float64 their angles are float64 too. In float32 theirs are products of float32 numbers, up to 39 radians here
    and so off by a few 1e-6, where ours are rounded once: the usual limit of 2e-5 has room for that.
    """
    x = tokens(2, n, 24, dtype=dtype)
    with running_in(dtype):
        block, rotary, scaling = layer(kind, dtype)
        theirs = block(x, rotary(x, torch.arange(n)[None]), before(n, dtype))[0]
    qkv = (heads(part(x), count) for part, count in ((block.q_proj, 3), (block.k_proj, 1), (block.v_proj, 1)))
    own = RotaryEmbedding(8, base=100.0, scaling=scaling)
    attended = attention(*qkv, position=own, queries=Sequence(n), mask=Mask.causal())
    output = block.o_proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(KINDS[kind][2], "transformers LlamaAttention", output, theirs, leaves)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("n", [12, 40], ids=["within the trained length", "beyond it"])
def test_phi_3s_attention_turns_a_part(n: int) -> None:
    """LongRoPE on half of each head: its magnitude is for the half that turns."""
    rope = {**KINDS["longrope"][1], "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 64}
    settings = config("phi3", **sizes, original_max_position_embeddings=16, pad_token_id=0, rope_parameters=rope)
    settings._attn_implementation = "eager"
    x = tokens(2, n, 48, dtype=torch.float64)
    with running_in(torch.float64):
        block = random(model("phi3").Phi3Attention(settings, 0))
        waves = model("phi3").Phi3RotaryEmbedding(settings)(x, torch.arange(n)[None])
        theirs = block(x, waves, before(n, torch.float64))[0]
    qkv = (heads(part, 3) for part in block.qkv_proj(x).chunk(3, dim=-1))
    own = RotaryEmbedding(16, base=100.0, rotary_dim=8, scaling=KINDS["longrope"][0])
    attended = attention(*qkv, position=own, queries=Sequence(n), mask=Mask.causal())
    output = block.o_proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree("LongRoPE", "transformers Phi3Attention", output, theirs, leaves)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_published_modules_from_one_text_to_the_next(kind: str) -> None:
    """One module that sees texts of many lengths turns as ours, which has no memory. But theirs for dynamic NTK keeps
    the frequencies of the longest text so far, until a text is shorter than the trained length."""
    with running_in(torch.float64):
        _, rotary, scaling = layer(kind, torch.float64)
    own = RotaryEmbedding(8, base=100.0, scaling=scaling)
    longest = 0
    for n in (5, 16, 17, 40, 29, 12, 18):
        with running_in(torch.float64):
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
    for t in range(n):
        q_, k_, v_ = (x[:, :, : t + 1] for x in (q, k, v))
        step = attention(q_[:, :, t:], k_, v_, position=own, queries=Sequence(1, start=t), keys=Sequence(t + 1))
        full = attention(q_, k_, v_, position=own, queries=Sequence(t + 1), mask=Mask.causal())
        torch.testing.assert_close(step, full[:, :, t:], rtol=1e-12, atol=1e-12)
        if 0 < t < 16 and own.bands(t + 1) != own.bands(n):
            assert (step - over_all[:, :, t : t + 1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("queries", "keys", "length"),
    [
        (Sequence(5), None, 5),
        (Sequence(1, start=6), Sequence(7), 7),
        (Sequence(2), Sequence(9, prefix=2), 9),
        (Sequence(2, start=-7), None, 1),
        (Positions(torch.tensor([3, 1]), low=0, high=11), Sequence(5), 12),  # plain numbers: no tensor is read
    ],
    ids=repr,
)
def test_length_is_the_largest_place_of_both_sides(queries: Coordinates, keys: Coordinates | None, length: int) -> None:
    lengths = []

    def scaling(base: float, pairs: int, length: int) -> tuple[tuple[float, ...], float]:
        lengths.append(length)
        return (1.0,) * pairs, 1.0

    own = RotaryEmbedding(8, scaling=scaling)
    lengths.clear()
    own.terms(queries, keys)
    assert set(lengths) == {length}


def test_several_axes_have_it_each() -> None:
    """A grid squeezed into half of its places, as EVA does with its reference size."""
    half, whole = (RotaryEmbedding(8, axes=2, base=100.0, scaling=own) for own in (LinearScaling(2.0), None))
    torch.testing.assert_close(half.angles(Grid(4, 6)), whole.angles(Grid(4, 6)) / 2)
