"""How a mechanism looks, the same in every figure: a colour, a dash and a marker, so that colour is never needed.

Colours are told apart with the common kinds of colour blindness and have a darker and a lighter version, for a light
and a dark page. Dash and marker change with every mechanism: no pair of them comes twice among the first thirty-five.
"""

from dataclasses import dataclass

COLOURS = (
    ("#0f6cbf", "#6cb2f5"),
    ("#c2570c", "#f59a55"),
    ("#11826b", "#4fcbad"),
    ("#a63a8c", "#e58ccb"),
    ("#7a6a00", "#d3bd45"),
    ("#5b4fc4", "#a9a1f7"),
    ("#b3263a", "#f58490"),
    ("#5c6670", "#aab4be"),
)
DASHES: tuple[tuple[int, ...], ...] = ((), (8, 4), (2, 3), (10, 3, 2, 3), (5, 2))
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "down")
MATPLOTLIB_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "X",
    "plus": "P",
    "down": "v",
}


@dataclass(frozen=True)
class SeriesStyle:
    """`dash` is on, off, on, off in pixels, empty for a whole line."""

    light: str
    dark: str
    dash: tuple[int, ...]
    marker: str


def style(index: int) -> SeriesStyle:
    """The looks of the mechanism that stands at `index` in the comparison."""
    light, dark = COLOURS[index % len(COLOURS)]
    return SeriesStyle(light, dark, DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


def dash_of_rule(index: int) -> tuple[int, ...]:
    """On larger canvases a mechanism keeps colour and marker, and its growth rules differ by dash."""
    return DASHES[index % len(DASHES)]
