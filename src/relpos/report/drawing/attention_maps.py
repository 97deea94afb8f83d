"""Attention maps: the attention of one patch over an image, heads in columns, layers in rows.

Each panel shows the image in grey under the attention in orange. The scale ends at the panel's own maximum, which is
printed: one scale could not show both a head that attends everywhere and one that attends to a single patch. The query
patch is outlined.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from relpos.report.drawing.canvas import drawing, to_svg
from relpos.results import Attention

GLOW = np.array([1.0, 0.55, 0.05])
"""The colour of full attention."""
IMAGES_AT_MOST = 3


def attention_svgs(attention: Attention, *, name: str, mechanism: str) -> list[str]:
    """One SVG for each of the first few images."""
    svgs = []
    for index in range(min(IMAGES_AT_MOST, len(attention.image))):
        label, predicted = attention.label[index], attention.predicted[index]
        title = f"Attention of {mechanism} over an image of {label}, predicted {predicted}"
        svgs.append(to_svg(attention_figure(attention, index), name=f"{name}-{index}", title=title))
    return svgs


def attention_figure(attention: Attention, index: int) -> Figure:
    """One image: one row of panels per layer, one column per head.

    All panels are one bitmap in one `Axes`, in the image's own pixels: a page has hundreds of panels, and an `Axes` for
    each would take most of its time.
    """
    image = np.asarray(attention.image[index], dtype=np.float64)
    maps = np.asarray(attention.maps[index], dtype=np.float64)
    layers, heads = maps.shape[:2]
    high, wide = image.shape
    down, across = high + max(3, round(0.25 * high)), wide + max(1, round(0.05 * wide))
    sheet = np.zeros((layers * down, heads * across, 4))
    cell_high, cell_wide = high / attention.grid[0], wide / attention.grid[1]
    row, column = attention.query
    inch = 0.88 / wide
    left, top = 0.2 / inch, 0.42 / inch
    size = ((left + heads * across) * inch, (top + layers * down) * inch)
    with drawing(size=8.0):
        figure = Figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for layer in range(layers):
            axes.text(-0.1 / inch, layer * down + high / 2, f"layer {layer}", rotation=90, ha="center", va="center")
            for head in range(heads):
                y, x = layer * down, head * across
                sheet[y : y + high, x : x + wide, :3] = overlay(image, maps[layer, head])
                sheet[y : y + high, x : x + wide, 3] = 1.0
                corner = (x + column * cell_wide - 0.5, y + row * cell_high - 0.5)
                look: dict[str, Any] = {"fill": False, "edgecolor": "#5fd0ff", "linewidth": 1.3}
                axes.add_patch(Rectangle(corner, cell_wide, cell_high, **look))
                most = f"max {100 * maps[layer, head].max():.0f}%"
                axes.text(x + wide / 2, y + high, most, fontsize=6.5, ha="center", va="top")
        for head in range(heads):
            axes.text(head * across + wide / 2, -1.2, f"head {head}", ha="center", va="bottom")
        axes.imshow(sheet, interpolation="none")
        axes.set_xlim(-left, heads * across)
        axes.set_ylim(layers * down, -top)
        label, predicted = attention.label[index], attention.predicted[index]
        verdict = "right" if label == predicted else f"taken for {predicted}"
        figure.suptitle(f"{label}, {verdict}", fontsize=9, y=0.995, va="top")
    return figure


def overlay(image: NDArray[np.float64], attention: NDArray[np.float64]) -> NDArray[np.float64]:
    """`image` `[H, W]`, 0 to 1, under `attention` `[rows, columns]`: `[H, W, 3]`. Cells divide the image evenly."""
    repeats = (image.shape[0] // attention.shape[0], image.shape[1] // attention.shape[1])
    strength = np.kron(attention / max(float(attention.max()), 1e-12), np.ones(repeats))[..., None]
    grey = (0.14 + 0.72 * np.clip(image, 0.0, 1.0))[..., None] * np.ones(3)
    mixed: NDArray[np.float64] = grey * (1.0 - 0.72 * strength) + 0.72 * strength * GLOW
    return np.clip(mixed, 0.0, 1.0)
