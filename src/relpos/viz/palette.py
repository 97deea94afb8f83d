"""How a mechanism looks, the same in every figure: a colour, a dash and a marker, so that colour is never needed.

The hue tells the family: greys for none, oranges for absolute, blues for biases, greens for rotations, teals for
vectors, reds and purples for sums. Each colour has a darker and a lighter version, for a light and a dark page.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Style:
    """`dash` is on, off, on, off in line widths, empty for a whole line; `marker` is matplotlib's."""

    colour: str
    dash: tuple[float, ...]
    marker: str


def styles(families: Mapping[str, str]) -> dict[str, Style]:
    """The looks of the mechanisms of one comparison, from the family of each, in its order."""
    found: dict[str, Style] = {}
    seen: Counter[str] = Counter()
    for index, (name, family) in enumerate(families.items()):
        shades = COLOURS.get(family, COLOURS["other"])
        colour, _ = shades[seen[family] % len(shades)]
        found[name] = Style(colour, DASHES[seen[family] % len(DASHES)], MARKERS[index % len(MARKERS)])
        seen[family] += 1
    return found


def variable(colour: str) -> str:
    """The page's name of a colour, which follows light and dark."""
    return f"var(--c{colour[1:]})"


def pairs() -> list[tuple[str, str]]:
    """Every colour with its lighter version."""
    return [pair for shades in COLOURS.values() for pair in shades]


def stylesheet() -> str:
    """CSS that gives every colour its value on a light and on a dark page."""
    light, dark = (";".join(f"--c{pair[0][1:]}:{pair[index]}" for pair in pairs()) for index in (0, 1))
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
