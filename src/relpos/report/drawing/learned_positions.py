"""The learned positions of a trained model, as strips: the bias of each head, and the similarity of position vectors.

Offsets are query - key: a head that is high at (row, column) = (1, 0) attends from each patch to the one above.
"""

import numpy as np

from relpos.report.drawing.canvas import to_svg
from relpos.report.drawing.mechanism_picture import (
    MINUS,
    Axis,
    Bars,
    Maps,
    alone,
    counted,
    heads_named,
    offsets_of,
    sheet,
)
from relpos.results import Learned

OFFSET = f"offset = query {MINUS} key"


def learned_svgs(entries: list[Learned], *, name: str, mechanism: str) -> list[tuple[str, str]]:
    """One (caption, SVG) per learned bias or embedding."""
    captioned = []
    for index, entry in enumerate(entries):
        strip = _bias(entry) if entry.kind == "bias" else _vectors(entry)
        title = f"{strip.title}, {mechanism}"
        captioned.append((strip.title, to_svg(alone(strip), name=f"{name}-{index}", title=title)))
    return captioned


def _bias(entry: Learned) -> Maps | Bars:
    values = np.asarray(entry.values, dtype=np.float64)
    where = "shared by all layers" if entry.layer == "shared" else f"layer {entry.layer}"
    title, names = f"Bias of each head, {where}", heads_named(len(values))
    axes = [
        Axis(OFFSET, low, offsets_of(low, high - low + 1) if low else counted(high + 1))
        for low, high in entry.offsets or []
    ]
    if len(axes) == 1:
        return Bars(title, names, values, axes[0], "added to the score")
    down, across = (
        Axis(f"{which} {OFFSET}", axis.first, axis.ticks) for which, axis in zip(("row", "column"), axes, strict=True)
    )
    return Maps(title, names, values, down, across, "added to the score", marked=(0, 0))


def _vectors(entry: Learned) -> Maps:
    similarity = np.asarray(entry.similarity, dtype=np.float64)
    grid, label = entry.grid or [], "cosine, mean subtracted"
    if len(grid) == 2:
        return sheet(similarity, grid[0], grid[1], "Similarity of position vectors: each patch with all patches", label)
    axis = Axis("position", 0, counted(len(similarity), entry.every or 1))
    return Maps("Similarity of the vectors of two positions", ("",), similarity[None], axis, axis, label, 1.0)
