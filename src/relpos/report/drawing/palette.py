"""The look of each mechanism, the same on every page: a colour, a dash and a marker, so that colour is never needed.

Each name that relpos knows has a number, which determines its look. Grey is `none`; nine hues follow, so that the
mechanisms compared by default all have their own. Each colour has a darker and a lighter version, for a light and a
dark page; both can be read as text there.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

GREY = ("#4d565e", "#c3cad1")
HUES = (
    ("#c2570c", "#f59a55"), ("#0f6cbf", "#6cb2f5"), ("#7a1f9e", "#d3a0f7"), ("#11826b", "#4fcbad"),
    ("#b3263a", "#f58490"), ("#5c4a00", "#dcc04a"), ("#c0237f", "#f58ac8"), ("#007f9e", "#66d3ea"),
    ("#4c7a12", "#a5d65c"),
)  # fmt: skip
"""Orange, blue, purple, green, red, ochre, pink, cyan, leaf green."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1.2, 1.6), (5, 1.5, 1, 1.5), (2.5, 1), (7, 1.5))
MARKERS = ("o", "s", "^", "D", "X", "P", "v", "*", "<", ">")
"""Filled, then hollow."""
LOOKS = math.lcm(len(DASHES), 2 * len(MARKERS))
"""How many numbers look different without colour."""
WELL_KNOWN = (
    "none", "learned", "relative_2d", "t5", "rotary_2d", "learned+relative_2d", "alibi", "sinusoidal_2d",
    "relative_1d", "rotary_1d", "rotary_2d+relative_2d", "kerple_log", "kerple_power", "sandwich", "xpos",
    "sinusoidal_1d", "rotary_1d+t5",
)  # fmt: skip
"""They come first, so that the usual comparisons differ in their markers."""
OTHERS = (
    "tupe", "fire", "log_cpb", "clipped", "alibi_learned", "alibi_axes", "alibi_manhattan", "factored_2d", "fox",
    "rotary_mixed", "rotary_ntk", "rotary_yarn", "rotary_linear", "rotary_llama3", "rotary_dynamic_ntk",
    "rotary_multimodal", "shaw", "transformer_xl", "deberta", "cope", "irpe_product", "irpe_euclidean", "decomposed",
    "inkling", "rotary_dinov3", "cable", "carope", "selective_rope", "pope",
    "rotary_resonance", "rotary_clipped", "rotary_randomized", "rerope", "self_extend", "dual_chunk", "graphormer",
)  # fmt: skip
CHOICES = (
    ("full", "local", "sparse", "linear", "flash", "multi-query", "grouped-query"),
    ("layernorm", "rmsnorm", "groupnorm", "qk-norm"),
    ("adamw", "lion", "sophia-g", "sophia-h"),
)
NUMBERS = {name: number for names in (WELL_KNOWN + OTHERS, *CHOICES) for number, name in enumerate(names)}
"""Numbers on one page differ. Append a new name at the end of its tuple, so that few looks change."""


@dataclass(frozen=True)
class Style:
    """`dash` is on, off, on, off in line widths, empty for a solid line; `marker` and `fill` are matplotlib's."""

    colour: str
    dash: tuple[float, ...]
    marker: str
    fill: str


def styles(compared: Iterable[str]) -> dict[str, Style]:
    """The looks of the mechanisms of one comparison, by their names.

    A name without a number gets one from its CRC-32, or the next free one in this comparison. So up to `LOOKS`
    mechanisms all look different.
    """
    names = list(compared)
    numbers = {name: NUMBERS[name] for name in names if name in NUMBERS}
    for name in sorted(set(names) - set(numbers)):
        first = crc32(name.encode()) % LOOKS
        every = [(first + step) % LOOKS for step in range(LOOKS)]
        numbers[name] = next((number for number in every if number not in numbers.values()), first)
    return {name: _style(numbers[name]) for name in names}


def _style(number: int) -> Style:
    colour, _ = HUES[(number - 1) % len(HUES)] if number else GREY
    turn, marker = divmod(number, len(MARKERS))
    return Style(colour, DASHES[number % len(DASHES)], MARKERS[marker], "none" if turn % 2 else colour)


def variable(colour: str) -> str:
    """The CSS variable of a colour, which changes between light and dark."""
    return f"var(--c{colour[1:]})"


def pairs() -> list[tuple[str, str]]:
    """Every colour with its lighter version."""
    return [GREY, *HUES]


def stylesheet(light: str = ":root", dark: str | None = None) -> str:
    """CSS that gives every colour its value on a light and on a dark page.

    Args:
        light: the selector of a light page.
        dark: the selector of a dark page; None to follow the reader's system.
    """
    on_light, on_dark = (";".join(f"--c{pair[0][1:]}:{pair[index]}" for pair in pairs()) for index in (0, 1))
    if dark is not None:
        return f"{light}{{{on_light}}}{dark}{{{on_dark}}}"
    return f"{light}{{{on_light}}}@media(prefers-color-scheme:dark){{{light}{{{on_dark}}}}}"
