"""Context scalings of rotary positions: how a model that was trained on short contexts rotates in long ones.

A scaling takes the base, the number of pairs P and the length of the context, and gives P frequencies and a magnitude.
The magnitude multiplies the rotated dimensions of queries and keys: their scores grow by its square. The rest of a
partial rotation is unchanged. With w[p] = base ** (-p / P), factor s and trained length L:

    LinearScaling    w[p] / s                                       Chen et al. 2023 (position interpolation)
    NTKScaling       the base times s ** (P / (P - 1))              bloc97 2023 ("NTK-aware")
    DynamicNTK       NTKScaling by s * length / L - (s - 1)         emozilla 2023, as in transformers
    YaRN             w[p] / s for slow pairs, w[p] for fast ones, a ramp between; magnitude 0.1 ln s + 1
                                                                    Peng et al. 2023, section 3
    LongRoPE         w[p] / f[p], searched f, one list up to L and one beyond it; magnitude sqrt(1 + ln s / ln L)
                                                                    Ding et al. 2024
    Llama3Scaling    w[p] / s for long waves, w[p] for short ones, smooth between      Llama 3.1
    ProportionalScaling    w[p] / s for the first pairs, 0 for the others              Barbero et al. 2025, Gemma 4

`position.resonance` and `position.clipped_rotary` change the frequencies of any of these.

The length is the largest position among the given queries and keys, plus 1 (for `Positions`, their `high`). Only
`DynamicNTK` and `LongRoPE` depend on it. With these, a key that is rotated before it is cached keeps the frequencies of
the length at that time, and later queries use others: scores then depend on more than the offset (transformers issues
25104 and 33129). Keys that are cached unrotated, as in relpos, are right: a decoding step equals the last row of the
full pass over the tokens so far. It does not equal a row of the pass over a longer text, which uses the frequencies of
that text. transformers' dynamic NTK uses the longest text it has seen until one within L comes; here every call uses
its own length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from relpos.core.checks import fail, require_flag, require_int, require_number, shape_of
from relpos.position.base.angles import frequencies

Scaled = tuple[tuple[float, ...], float]
"""The frequency of each pair, and the magnitude."""


RotaryScaling = Callable[[float, int, int], Scaled]
"""A scaling: a function of the base, the number of pairs and the length of the context."""


def _require_factor(x: object) -> None:
    require_number(x, "factor", "above 0", "It is the longer context divided by the trained one, for example 4.0.")


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`: the longer context squeezed into the trained one (position interpolation).

    Source: Chen et al. 2023, section 2.

    Args:
        factor: the longer context over the trained one.

    Raises:
        ValueError: no number above 0.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(64, scaling=relpos.LinearScaling(4.0))
        >>> rotary.bands(1)[0][0]  # without it the fastest pair rotates by 1 radian a token
        0.25
    """

    factor: float

    def __post_init__(self) -> None:
        _require_factor(self.factor)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        return tuple(w / self.factor for w in frequencies(pairs, base)), 1.0


def _larger(base: float, pairs: int, by: float) -> float:
    """The base with which the slowest pair rotates `by` times slower, and the fastest, or a single one, as before."""
    return base * by ** (pairs / (pairs - 1)) if pairs > 1 else base


@dataclass(frozen=True)
class NTKScaling:
    """A larger base: the slowest pair is interpolated by `factor`, the fastest not at all ("NTK-aware").

    Source: bloc97 2023; Peng et al. 2023, section 3.1.

    Args:
        factor: the longer context over the trained one.

    Raises:
        ValueError: no number above 0.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(64, scaling=relpos.NTKScaling(4.0))
        >>> fast, *_, slow = rotary.bands(1)[0]
        >>> plain = relpos.RotaryEmbedding(64).bands(1)[0]
        >>> round(plain[0] / fast, 6), round(plain[-1] / slow, 6)
        (1.0, 4.0)
    """

    factor: float

    def __post_init__(self) -> None:
        _require_factor(self.factor)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        return frequencies(pairs, _larger(base, pairs, self.factor)), 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """NTK scaling that begins where the context exceeds `trained_length` and grows with it, `factor` times as fast.

    It does not support keys that are cached rotated; relpos caches them unrotated.

    Source: emozilla 2023, as in transformers.

    Args:
        factor: how fast it grows; 1 for as fast as the context.
        trained_length: up to here frequencies are as trained.

    Raises:
        ValueError: no number above 0, or no length of at least 1.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(64, scaling=relpos.DynamicNTK(1.0, trained_length=2048))
        >>> slowest = [rotary.bands(length)[0][-1] for length in (1024, 2048, 4096)]
        >>> [round(slowest[0] / band, 3) for band in slowest]  # as trained up to there
        [1.0, 1.0, 2.0]
    """

    factor: float
    trained_length: int

    def __post_init__(self) -> None:
        require_number(self.factor, "factor", "above 0", "1.0 stretches as much as the context grows.")
        require_int(self.trained_length, "trained_length", at_least=1)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        return frequencies(pairs, self.larger_base(base, pairs, length)), 1.0

    def larger_base(self, base: float, pairs: int, length: int) -> float:
        """The base in a context of `length` tokens."""
        over = max(length, self.trained_length) / self.trained_length
        return abs(_larger(base, pairs, self.factor * over - (self.factor - 1)))  # a symbol is not known to be


@dataclass(frozen=True)
class YaRN:
    """Slow pairs interpolated, fast ones kept, a ramp between, and larger scores.

    Source: Peng et al. 2023, section 3.

    Args:
        factor: the longer context over the trained one.
        trained_length: the trained one.
        beta_fast: pairs that make at least this many turns in the trained context are kept.
        beta_slow: pairs that make at most this many turns are interpolated.
        magnitude: factor on rotated dimensions; None for 0.1 ln(factor) + 1. (DeepSeek's mscale and mscale_all_dim m, n
            are the magnitude (0.1 m ln(factor) + 1) / (0.1 n ln(factor) + 1).)
        truncate: whether the ends of the ramp are rounded outwards to whole pairs, as published.

    Raises:
        ValueError: a number out of its range, or `beta_slow` that is not below `beta_fast`.

    Examples:
        >>> scaling = relpos.YaRN(factor=4.0, trained_length=2048)
        >>> rotary = relpos.RotaryEmbedding(128, scaling=scaling)
        >>> plain = relpos.RotaryEmbedding(128)
        >>> [round(plain.bands(1)[0][p] / rotary.bands(1)[0][p], 3) for p in (0, 40, 63)]  # kept, between, interpolated
        [1.0, 3.571, 4.0]
        >>> round(rotary.bands(1)[1], 4)  # 0.1 ln(4) + 1
        1.1386
    """

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        require_int(self.trained_length, "trained_length", at_least=1)
        for name in ("beta_fast", "beta_slow"):
            require_number(getattr(self, name), name, "above 0", "Use the checkpoint's value; published are 32 and 1.")
        if self.beta_slow >= self.beta_fast:
            came = f"{self.beta_slow} and {self.beta_fast}"
            fail("beta_slow below beta_fast", came, "Use the checkpoint's values; published are 1 and 32.")
        _require_magnitude(self.magnitude)
        require_flag(self.truncate, "truncate")

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        if base <= 1:
            fail("a base above 1 for YaRN", str(base), "The ramp assumes that later pairs rotate more slowly.")

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.trained_length / (times * 2 * math.pi)) / math.log(base)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low = max(low, 0)
        high = max(min(high, 2 * pairs - 1), low)  # 2 P - 1, not P - 1, as published
        width = high - low or 0.001
        slow = (min(max((p - low) / width, 0.0), 1.0) for p in range(pairs))
        bands = tuple(w / self.factor * t + w * (1 - t) for w, t in zip(frequencies(pairs, base), slow, strict=True))
        usual = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return bands, usual if self.magnitude is None else self.magnitude


def _require_magnitude(x: object) -> None:
    if x is not None:
        require_number(x, "magnitude", "above 0", "Leave it out for the published one.")


@dataclass(frozen=True)
class LongRoPE:
    """Searched factors, one per pair: one list up to `trained_length`, another beyond it.

    LongRoPE2 (Shang et al. 2025) has other factors, not another rotation: the short ones are 1, and the long ones are
    searched from a critical pair on, where they are at least `factor`. Pass them as they are.

    Source: Ding et al. 2024.

    Args:
        short_factor: one number per pair, as a checkpoint's configuration has them.
        long_factor: the same beyond `trained_length`.
        trained_length: the longest context that takes the short list.
        factor: the longer context over the trained one; only the magnitude depends on it.
        magnitude: factor on the rotated dimensions, in short contexts too; None for
            sqrt(1 + ln(factor) / ln(trained_length)).

    Raises:
        ValueError: lists of unequal length, or numbers out of their range; in use, not one per pair.

    Examples:
        >>> scaling = relpos.LongRoPE((1.0,) * 4, (4.0,) * 4, trained_length=2048, factor=4.0)
        >>> rotary = relpos.RotaryEmbedding(8, scaling=scaling)
        >>> rotary.bands(2048)[0][0], rotary.bands(2049)[0][0]  # the short list, the long one
        (1.0, 0.25)
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    trained_length: int
    factor: float
    magnitude: float | None = None

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        require_int(self.trained_length, "trained_length", at_least=2)
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, tuple | list) or not factors:
                fail(f"{name} to be numbers, one per pair", shape_of(factors), "Take them from the checkpoint.")
            for one in factors:
                require_number(one, f"each {name}", "above 0", "Take them from the checkpoint.")
            object.__setattr__(self, name, tuple(factors))
        short, long = len(self.short_factor), len(self.long_factor)
        if short != long:
            fail("as many short factors as long ones", f"{short} and {long}", "Give one per pair.")
        _require_magnitude(self.magnitude)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        factors = self.long_factor if length > self.trained_length else self.short_factor
        if len(factors) != pairs:
            fail(f"{pairs} factors, one per pair", str(len(factors)), "Give half as many as rotated dimensions.")
        bands = tuple(w / one for w, one in zip(frequencies(pairs, base), factors, strict=True))
        usual = math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length)) if self.factor > 1 else 1.0
        return bands, usual if self.magnitude is None else self.magnitude


@dataclass(frozen=True)
class Llama3Scaling:
    """Pairs by how many turns they make in the trained context: up to `low` interpolated, from `high` on kept.

    Source: Llama 3.1 (Dubey et al. 2024), frequencies as in its published code.

    Args:
        factor: the longer context over the trained one.
        trained_length: the trained one.
        low: `low_freq_factor` of Llama's configuration.
        high: `high_freq_factor` there.

    Raises:
        ValueError: a number out of its range, or `low` that is not below `high`.

    Examples:
        >>> scaling = relpos.Llama3Scaling(factor=8.0, trained_length=8192)
        >>> scaled = relpos.RotaryEmbedding(128, base=5e5, scaling=scaling).bands(1)[0]
        >>> plain = relpos.RotaryEmbedding(128, base=5e5).bands(1)[0]
        >>> plain[0] / scaled[0], plain[-1] / scaled[-1]  # fast pairs are kept, slow ones interpolated
        (1.0, 8.0)
    """

    factor: float = 8.0
    trained_length: int = 8192
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        require_int(self.trained_length, "trained_length", at_least=1)
        for name in ("low", "high"):
            require_number(getattr(self, name), name, "above 0", "Use the checkpoint's values; Llama 3.1 has 1 and 4.")
        if self.low >= self.high:
            fail("low below high", f"{self.low} and {self.high}", "Use the checkpoint's values; Llama 3.1 has 1 and 4.")

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""

        def scaled(w: float) -> float:
            turns = self.trained_length * w / (2 * math.pi)
            kept = min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
            return (1 - kept) * w / self.factor + kept * w

        return tuple(scaled(w) for w in frequencies(pairs, base)), 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """The fastest pairs rotate as in a whole head, the slowest do not rotate ("proportional").

    A partial rotation (`rotary_dim`) has frequencies and pairs of its own dimensions alone. Here both are those of the
    whole head: in the layout "half", the pairs that rotate have dimensions in both halves.

    Source: Barbero et al. 2025 (Round and Round We Go!), p-RoPE; rounded as in Gemma 4 (transformers' "proportional").

    Args:
        share: of the pairs that rotate, rounded down; `partial_rotary_factor` of a configuration.
        factor: the frequencies are divided by it; 1 in Gemma 4.

    Raises:
        ValueError: a number out of its range.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(16, base=1e6, scaling=relpos.ProportionalScaling(0.25))
        >>> [round(w, 4) for w in rotary.bands(1)[0]]
        [1.0, 0.1778, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_number(self.share, "share", "above 0", "Use the checkpoint's partial_rotary_factor; Gemma 4's is 0.25.")
        if self.share > 1:
            fail(
                "share of at most 1", str(self.share), "Use the checkpoint's partial_rotary_factor; Gemma 4's is 0.25."
            )
        _require_factor(self.factor)

    def __call__(self, base: float, pairs: int, length: int) -> Scaled:
        """The frequency of each pair, and the magnitude."""
        rotate = int(self.share * pairs)
        return tuple(w / self.factor if p < rotate else 0.0 for p, w in enumerate(frequencies(pairs, base))), 1.0


_OF_FEW_LISTS = (LinearScaling, NTKScaling, YaRN, LongRoPE, Llama3Scaling, ProportionalScaling)


def has_few_lists(scaling: RotaryScaling | None) -> bool:
    """Whether there is one list of frequencies, or two, for all lengths; a scaling of another's (`scaling`) has its."""
    inner = getattr(scaling, "scaling", scaling)
    if inner is not scaling:
        return has_few_lists(inner)
    return scaling is None or isinstance(scaling, _OF_FEW_LISTS)


def require_scaling(x: object) -> None:
    """Raise unless it is a scaling, or None."""
    if x is not None and not callable(x):
        fail("scaling to be one such as YaRN(4.0, 2048), or None", shape_of(x), "Import it from relpos.")
