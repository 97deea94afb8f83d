"""The look of each mechanism, the same on every page: a colour, a dash and a marker, so that colour is never needed.

Each name that relpos knows has a number, which determines its look. The hue shows the family: grey for none, orange for
absolute, blue for biases, green for rotations, teal for vectors, red and purple for sums. Each colour has a darker and
a lighter version, for a light and a dark page.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

COLOURS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (("#4d565e", "#c3cad1"),),
    "absolute": (("#c2570c", "#f59a55"), ("#8f5a00", "#dcae4a"), ("#a34a2a", "#ffb79a")),
    "bias": (("#0f6cbf", "#6cb2f5"), ("#16397a", "#9cb4ff"), ("#2391ad", "#66d3ea"), ("#5b4fc4", "#b5aefa")),
    "rotation": (("#11826b", "#4fcbad"), ("#4c7a12", "#a5d65c"), ("#00604f", "#8fe3c9")),
    "vectors": (("#0d6e74", "#63cfd3"), ("#2c5d63", "#9fd0d4"), ("#007f9e", "#7fd4ea"), ("#38546b", "#a9c3d9")),
    "sum": (("#a63a8c", "#e58ccb"), ("#b3263a", "#f58490"), ("#7a3fb0", "#cda3f5")),
    "other": (("#7a6a00", "#d3bd45"), ("#6b4f3a", "#cfae94"), ("#39655f", "#9cc7c1"), ("#6d4566", "#cfa6c8")),
}
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1.2, 1.6), (5, 1.5, 1, 1.5), (2.5, 1), (7, 1.5))
MARKERS = ("o", "s", "^", "D", "X", "P", "v")
LOOKS = math.lcm(len(DASHES), len(MARKERS))
"""How many numbers have a unique pair of dash and marker."""
WELL_KNOWN = (
    "none", "learned", "relative_2d", "t5", "rotary_2d", "learned+relative_2d", "alibi", "sinusoidal_2d",
    "relative_1d", "rotary_1d", "rotary_2d+relative_2d", "kerple_log", "kerple_power", "sandwich", "xpos",
    "sinusoidal_1d", "rotary_1d+t5",
)  # fmt: skip
"""They come first, so that the defaults of comparisons differ in their markers."""
MECHANISMS = (
    ("none",),
    ("learned", "sinusoidal_2d", "sinusoidal_1d", "tupe"),
    ("relative_2d", "t5", "alibi", "relative_1d", "kerple_log", "kerple_power", "sandwich", "fire", "log_cpb",
     "clipped", "alibi_learned", "alibi_axes", "alibi_manhattan", "factored_2d", "fox",
     "cable"),
    ("rotary_2d", "rotary_1d", "xpos", "rotary_mixed", "rotary_ntk", "rotary_yarn", "rotary_linear",
     "rotary_llama3", "rotary_dynamic_ntk", "rotary_multimodal", "rotary_dinov3", "carope", "selective_rope"),
    ("shaw", "transformer_xl", "deberta", "cope", "irpe_product", "irpe_euclidean", "decomposed",
     "inkling"),
    ("learned+relative_2d", "rotary_2d+relative_2d", "rotary_1d+t5"),
)  # fmt: skip
"""The names by family; this order assigns the family's colours."""
CHOICES = (
    ("full", "local", "sparse", "linear", "flash", "multi-query", "grouped-query"),
    ("layernorm", "rmsnorm", "groupnorm", "qk-norm"),
    ("adamw", "lion", "sophia-g", "sophia-h"),
)
NUMBERS = {
    name: number
    for names in (dict.fromkeys(sum(MECHANISMS, WELL_KNOWN)), *CHOICES)
    for number, name in enumerate(names)
}
"""Numbers on one page differ. Append a new name at the end of its tuple, so that few looks change."""
SHADES = {name: shade for names in (*MECHANISMS, *CHOICES) for shade, name in enumerate(names)}


@dataclass(frozen=True)
class Style:
    """`dash` is on, off, on, off in line widths, empty for a solid line; `marker` is matplotlib's."""

    colour: str
    dash: tuple[float, ...]
    marker: str


def styles(families: Mapping[str, str]) -> dict[str, Style]:
    """The looks of the mechanisms of one comparison, from their families.

    A name without a number gets one from its CRC-32, or the next free one in this comparison. So up to `LOOKS`
    mechanisms all look different.
    """
    numbers = {name: NUMBERS[name] for name in families if name in NUMBERS}
    for name in sorted(set(families) - set(numbers)):
        first = crc32(name.encode()) % LOOKS
        every = [(first + step) % LOOKS for step in range(LOOKS)]
        numbers[name] = next((number for number in every if number not in numbers.values()), first)
    looks = {}
    for name, family in families.items():
        number, shades = numbers[name], COLOURS.get(family, COLOURS["other"])
        colour, _ = shades[SHADES.get(name, number) % len(shades)]
        looks[name] = Style(colour, DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)])
    return looks


def variable(colour: str) -> str:
    """The CSS variable of a colour, which changes between light and dark."""
    return f"var(--c{colour[1:]})"


def pairs() -> list[tuple[str, str]]:
    """Every colour with its lighter version."""
    return [pair for shades in COLOURS.values() for pair in shades]


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
