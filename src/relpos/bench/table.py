"""The results in a terminal: one line per case and peer, then the targets and the figures reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BenchResults = Mapping[str, Any]
_NAME = 40
"""The width of a case's name in letters."""


def render(results: BenchResults) -> Group:
    """All tables, for `console.print`."""
    parts: list[RenderableType] = [entries_tables(results)]
    if results["targets"]:
        parts.append(targets_table(results))
    for peer, fit in results["memory_fits"].items():
        if not peer.startswith("relpos-"):
            continue
        parts.append(
            Text(
                f"Memory of {peer}: {fit['mib_at_0']:g} MiB + {fit['kib_a_token']:g} KiB per token, "
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
    return f"{ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})"


def _table(*headings: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for heading, justify in headings:
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def entries_tables(results: BenchResults) -> Group:
    """The peers of each case: median time, ratio with quartiles, extra memory; below, reasons for missing figures."""
    parts: list[RenderableType] = []
    for case in dict.fromkeys(entry["case"] for entry in results["entries"]):
        table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=True, header_style="dim")
        table.add_column(Text(f"{case:<{_NAME}}", style="bold"), min_width=_NAME, no_wrap=True)
        for heading, width in (("ms", 6), ("ratio (quartiles)", 19), ("extra MiB", 9)):
            table.add_column(heading, justify="right", min_width=width, no_wrap=True)
        reasons = []
        for entry in results["entries"]:
            if entry["case"] != case:
                continue
            if entry["reason"]:
                reasons.append(Text(f"  {entry['title']}: {entry['reason']}", style="yellow"))
            if entry["reason"] and entry["ms"] is None:
                continue
            takes = "" if entry["backend"] is None or entry["backend"] in entry["peer"] else f" ({entry['backend']})"
            extra = "" if entry["extra_mib"] is None else f"{entry['extra_mib']:,.1f}"
            ms = "" if entry["ms"] is None else _milliseconds(entry["ms"]["median"])
            table.add_row(Text(f"  {entry['title']}{takes}"), ms, _ratio(entry), extra)
        parts += [table, *reasons, Text()]
    parts.append(
        Text("Ratios are relative to bias-free attention in the same round; for a layer with vectors, to DeBERTa-v2.")
    )
    return Group(*parts)


def targets_table(results: BenchResults) -> Table:
    """For each target: the goal, the figure, and whether it is met."""
    table = _table(("target", "left"), ("against", "left"), ("at most", "right"), ("reached", "right"), ("met", "left"))
    for row in results["targets"]:
        met = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text(row["reason"] or "")}
        reached = "" if row["reached"] is None else f"{row['reached']:.3f}"
        table.add_row(Text(row["what"]), Text(row["against"]), f"{row['asked']:.2f}", reached, met[row["met"]])
    return table
