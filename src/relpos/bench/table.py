"""The results in a terminal: a line a case and peer, then what was asked and what was reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Results = Mapping[str, Any]


def render(results: Results) -> Group:
    """All tables, for `console.print`."""
    parts: list[RenderableType] = [entries_table(results)]
    if results["targets"]:
        parts.append(targets_table(results))
    for peer, fit in results["memory_fits"].items():
        if not peer.startswith("relpos-"):
            continue
        parts.append(
            Text(
                f"Memory of {peer}: {fit['mib_at_0']:g} MiB + {fit['kib_a_token']:g} KiB a token, "
                f"at most {fit['largest_relative_residual']:.0%} off, over N = {fit['points'][0][0]:,} "
                f"to {fit['points'][-1][0]:,}."
            )
        )
    return Group(*parts)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(entry: Mapping[str, Any]) -> str:
    ratio = entry["ratio"]
    if ratio is None:
        return ""
    if len(entry["rounds_ms"]) == 1 or entry["peer"] == entry["against"]:
        return f"{ratio['median']:.3f}"
    return f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})"


def _table(*headings: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading, side in headings:
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    return table


def entries_table(results: Results) -> Table:
    """Median times, ratios with quartiles over the rounds, extra memory, and why a figure is missing."""
    table = _table(("case", "left"), ("ms", "right"), ("ratio", "right"), ("extra MiB", "right"), ("", "left"))
    last = None
    for entry in results["entries"]:
        if entry["case"] != last:
            last = entry["case"]
            table.add_section()
            table.add_row(Text(last, style="bold"))
        extra = entry["extra_mib"]
        note = entry["reason"] or ("" if entry["backend"] is None else f"takes {entry['backend']}")
        table.add_row(
            Text(f"  {entry['title']}"),
            Text("" if entry["ms"] is None else _milliseconds(entry["ms"]["median"])),
            Text(_ratio(entry)),
            Text("" if extra is None else f"{extra:,.1f}"),
            Text(note),
        )
    table.caption = (
        "Medians, and quartiles of ratios. A ratio is to bias-free attention in the\n"
        "same round; of a layer with vectors, to transformers' DeBERTa-v2."
    )
    table.caption_justify = "left"
    return table


def targets_table(results: Results) -> Table:
    """Asked, reached, yes or no."""
    table = _table(("target", "left"), ("against", "left"), ("asked", "right"), ("reached", "right"), ("met", "left"))
    for row in results["targets"]:
        met = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text(row["reason"] or "")}
        reached = "" if row["reached"] is None else f"{row['reached']:.3f}"
        table.add_row(Text(row["what"]), Text(row["against"]), f"{row['asked']:.2f}", reached, met[row["met"]])
    return table
