"""The pictures of docs/examples.md: the same numbers as maps. Drawn by what `relpos show` draws with."""

from __future__ import annotations

from pathlib import Path

import computed
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from relpos.report.drawing.mechanism_picture import Axis, Maps, picture, save_picture


def counted(count: int, label: str) -> Axis:
    """An axis with a tick at every cell."""
    return Axis(label, 0, tuple((at, str(at)) for at in range(count)))


def maps(
    title: str,
    parts: dict[str, Tensor],
    rows: str,
    columns: str,
    *,
    own_scales: bool = False,
    marked: bool = False,
    shares: tuple[int, ...] = (),
) -> Maps:
    """Named matrices side by side."""
    values = np.stack([part.numpy() for part in parts.values()])
    _, high, wide = values.shape
    return Maps(
        title,
        tuple(parts),
        values,
        counted(high, rows),
        counted(wide, columns),
        "score",
        own_scales=own_scales,
        marked=(1, 1) if marked else None,
        shares=shares,
    )


def figures() -> dict[str, Figure]:
    """Every picture by the name of its file."""
    image = {
        "no position": computed.without_position(),
        "absolute": computed.absolute(),
        "relative": computed.relative(),
    }
    four = {
        "additive bias": computed.additive(),
        "Shaw": computed.shaw(),
        "RoPE": computed.rope(),
        "ALiBi, |i \N{MINUS SIGN} j|": computed.alibi(both_ways=True),
    }
    heads = {f"head {head}: {name}": one for head, (name, one) in enumerate(computed.head_biases().items())}
    parts = computed.override()
    override = {
        "content scores": parts["content"],
        "bias": parts["bias"],
        "their sum": parts["sum"],
        "attention weights": parts["weights"],
    }
    return {
        "image": picture(
            "One image, three ways to know where patches are",
            "Scores of the 2 x 2 image of section 6. Every row is a query, every column a key.",
            [maps("Scores before the softmax", image, "query", "key")],
        ),
        "heads": picture(
            "Four heads, four directions",
            "The tables of section 9.4 as the middle patch (outlined) of a 3 x 3 image meets them.",
            [maps("Bias of the middle patch and every key", heads, "row of the key", "column of the key", marked=True)],
        ),
        "override": picture(
            "Content overrides a negative bias",
            "The middle patch (outlined) and all nine patches as keys. Its right neighbour has a bias of "
            f"{parts['bias'][1, 2]:.1f} and still gets {parts['weights'][1, 2]:.0%} of the attention. "
            "Each map has its own scale.".replace("-", "\N{MINUS SIGN}"),
            [
                maps(
                    "From scores to weights",
                    override,
                    "row of the key",
                    "column of the key",
                    own_scales=True,
                    marked=True,
                    shares=(3,),
                )
            ],
        ),
        "clipped": picture(
            "Clipped at two places",
            "The bias of section 12: beyond two places every offset reads the last entry of the table. Below the "
            "diagonal the key lies in the past of the query, above it in the future.",
            [maps("Bias of every query and key", {"": computed.clipped()}, "query", "key")],
        ),
        "four": picture(
            "Three tokens, four mechanisms",
            "Scores of the sequence of section 14. Only RoPE and |i \N{MINUS SIGN} j| are symmetric here.",
            [maps("Scores before the softmax", four, "query", "key")],
        ),
    }


def draw(folder: Path) -> list[Path]:
    """Write all pictures into a folder."""
    written = []
    for name, figure in figures().items():
        written.append(folder / f"{name}.png")
        save_picture(figure, written[-1])
    return written
