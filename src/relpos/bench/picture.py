"""The results in one picture: time relative to bias-free SDPA, and extra memory, over N, one line per peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.bench.peers import FREE, FREE_CUDNN, FREE_OURS, OF_SMALL_CASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22262b"
DOTS_PER_INCH = 130
LOOKS = {
    FREE: ("#7a848e", (5, 2), "s"),
    FREE_CUDNN: ("#3d454d", (2, 1), "s"),
    FREE_OURS: ("#7fb2e0", (5, 2), "o"),
    "relpos-auto": ("#0f6cbf", (), "o"),
    "relpos-streaming": ("#11826b", (8, 2), "o"),
    "relpos-sdpa": ("#5b4fc4", (4, 1, 1, 1), "v"),
    "relpos-reference": ("#6b4f3a", (2, 2), "P"),
    "sdpa-dense": ("#c2570c", (), "D"),
    "flex": ("#a63a8c", (), "^"),
    "matmul": ("#b9a44c", (1, 2), "X"),
}
"""Colour, dash and marker of each peer, so that colour alone is never needed."""
Points = list[tuple[int, float]]
_FEWEST = 2
USUAL = {"cpu": "float32", "cuda": "bfloat16"}
"""The dtype to draw, by device."""


def curves(results: Mapping[str, Any], what: str) -> tuple[dict[str, Points], dict[str, Points]]:
    """Ratio and extra MiB over N, by peer, for a line bias, not causal, float32 on CPU and bfloat16 on a GPU."""
    ratios: dict[str, Points] = {}
    extra: dict[str, Points] = {}
    for entry in results["entries"]:
        case = results["cases"][entry["case"]]
        usual = case["dtype"] == USUAL[case.get("device", "cpu")] and not case["causal"] and case["batch"] == 1
        usual = usual and case["heads"] == 8 and case["head_dim"] == 64
        if entry["peer"] in OF_SMALL_CASES:  # they have too few lengths, and hide others
            continue
        if not usual or case["layer"] or case["prefix"] or case["position"] != "line" or case["what"] != what:
            continue
        n = case["sizes"][0]
        if entry["ratio"] is not None:
            ratios.setdefault(entry["peer"], []).append((n, entry["ratio"]["median"]))
        if entry["extra_mib"] is not None:
            extra.setdefault(entry["peer"], []).append((n, max(entry["extra_mib"], 0.1)))
    return tuple({peer: sorted(points) for peer, points in found.items()} for found in (ratios, extra))  # type: ignore[return-value]


def drawable(results: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of "step" and "forward" with two lengths or more."""
    return tuple(
        what
        for what in ("step", "forward")
        if max((len(points) for points in curves(results, what)[0].values()), default=0) >= _FEWEST
    )


def save_picture(results: Mapping[str, Any], path: Path, what: str = "step") -> None:
    """Write the picture as PNG."""
    from relpos.report.drawing.canvas import to_png

    to_png(picture(results, what), path, dots_per_inch=DOTS_PER_INCH)


def picture(results: Mapping[str, Any], what: str) -> Figure:
    """Two panels side by side, both axes logarithmic, curves named at their ends."""
    from matplotlib.figure import Figure

    from relpos.report.drawing.canvas import drawing

    titles = {entry["peer"]: entry["title"] for entry in results["entries"]}
    titles["relpos-auto"] = "relpos"
    ratios, extra = curves(results, what)
    with drawing(ink=INK, size=10.0):
        figure = Figure(figsize=(11.5, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _panel(left, ratios, titles, "time relative to bias-free SDPA", (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        _panel(right, extra, titles, "extra memory, MiB", (1.0,))
        left.set_title("Relative time", loc="left", weight="bold")
        right.set_title("Memory in addition to the inputs", loc="left", weight="bold")
        words = {"step": "training step", "forward": "forward"}[what]
        figure.supxlabel(
            f"tokens N   (attention with a learned line bias, {words}, {USUAL[_device(results)]}, 8 heads of 64, "
            f"batch 1; {where(results)})",
            fontsize=8.5,
        )
    return figure


def _device(results: Mapping[str, Any]) -> str:
    return str(next(iter(results["cases"].values())).get("device", "cpu"))


def where(results: Mapping[str, Any]) -> str:
    """The hardware and PyTorch version of a run, in one line."""
    environment = results["environment"]
    if _device(results) == "cuda":
        return f"{environment['device']}, driver {environment['driver']}, PyTorch {environment['torch']}"
    return f"{environment['processor']}, {results['settings']['threads']} threads, PyTorch {environment['torch']}"


def _panel(
    axes: Axes, lines: Mapping[str, Points], titles: Mapping[str, str], label: str, marks: tuple[float, ...]
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for peer, points in lines.items():
        colour, dash, marker = LOOKS.get(peer, ("#444444", (), "o"))
        thick = 2.4 if peer == "relpos-auto" else 1.5
        drawn = axes.plot(*zip(*points, strict=True), color=colour, linewidth=thick, marker=marker, markersize=4.5)
        if dash:
            drawn[0].set_dashes([float(length) for length in dash])
    ticks = sorted({n for points in lines.values() for n, _ in points})
    axes.set_xticks(ticks, labels=[f"{n:,}" for n in ticks], fontsize=7.5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=marks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(label)
    axes.grid(True, which="major", axis="y", linewidth=0.4, alpha=0.4)
    if ticks:
        _name_ends(axes, lines, titles, ticks)


def _name_ends(axes: Axes, lines: Mapping[str, Points], titles: Mapping[str, str], ticks: Sequence[int]) -> None:
    """Write every curve's name at its last point; names that would touch are moved apart."""
    import numpy as np

    low, high = np.log(axes.get_ylim())
    axes.set_xlim(ticks[0] * 0.85, ticks[-1] * (ticks[-1] / ticks[0]) ** 0.52)
    axes.set_ylim(*np.exp([low, high]))
    apart = (high - low) * 0.06
    ends = sorted((np.log(points[-1][1]), peer) for peer, points in lines.items())
    heights: list[float] = []
    for end, _ in ends:
        heights.append(max(end, heights[-1] + apart) if heights else end)
    over = max(0.0, heights[-1] - high) if heights else 0.0
    for height, (_, peer) in zip(heights, ends, strict=True):
        n, value = lines[peer][-1]
        colour = LOOKS.get(peer, ("#444444",))[0]
        axes.annotate(
            titles.get(peer, peer),
            (n, value),
            (ticks[-1] * 1.18, float(np.exp(height - over))),
            color=colour,
            fontsize=9,
            weight="bold" if peer == "relpos-auto" else "normal",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 3,
            },
        )
