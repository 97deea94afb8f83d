"""A model of what kernels and calls cost on an H200, how far it is from what was measured, and the borders it gives.

    python benchmarks/gpu_costs.py

`benchmarks/results/costs-cuda.json` has what was measured, with dates: kernels and calls before (2026-11-26) and after
(2026-11-27) the kernels became faster, and retrofitted models (2026-11-26). On a CPU this takes a second.

A kernel is programs of pairs, two at a time on a processor, in the order in which the GPU starts them:

    time of a kernel   = (fixed + width * slope) * pairs of the processor that is busiest
    time of a call     = the larger of Python's time and the sum of its kernels

`fixed` and `slope` are fitted for each kernel and date to two rows, 2 x 8 heads x 8,192 tokens of widths 64 and 128
without a mask. All other rows are held out: masks, lengths, batches, whole calls.

A retrofitted layer is slower than the published one as long as Python takes longer than the GPU. So a border is where
the published attention *alone* takes longer on the GPU than all of Python for a layer, ours included, times the
largest ratio by which a retrofitted model exceeded that sum. Both are measured; neither is of the faster kernels, or of
calls that are planned once, since no model has been timed with those.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MEASURED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "results" / "costs-cuda.json").read_text(encoding="utf-8")
)
RESIDENT = 2
"""Programs at a time on a processor, by their registers."""
ROWS = 64
"""Queries or keys of a program; cells of the table's kernel have as many."""
STEP = "forward", "queries", "keys", "table"
HEADS = 12
"""Of the layers that borders are for, of batch 1: a larger batch moves work to the GPU, where relpos is faster."""
Row = dict[str, Any]


class Compared(NamedTuple):
    """What a row is, what the model says and what was measured, in milliseconds."""

    what: str
    said: float
    measured: float

    @property
    def error(self) -> float:
        return self.said / self.measured - 1


def work(kind: str, row: Row) -> Iterator[int]:
    """The pairs of each program, in the order in which programs start."""
    tiles, size = row["tokens"] // ROWS, ROWS * ROWS
    if kind == "table":  # a program has all tiles of one difference of cells, of all elements of the batch
        for _ in range(row["heads"]):
            for apart in range(1 - tiles, tiles):
                yield row["batch"] * (tiles - abs(apart)) * size if apart >= 0 or not row["causal"] else 0
        return
    for _ in range(row["batch"] * row["heads"]):
        for tile in range(tiles, 0, -1):  # under a causal mask the longest first
            yield (tile if row["causal"] else tiles) * size


def busiest(kind: str, row: Row) -> float:
    """The pairs that the busiest processor computes, times processors: all pairs, if work were spread evenly."""
    places = RESIDENT * MEASURED["processors"]
    ends = [0] * places
    for pairs in work(kind, row):
        heapq.heapreplace(ends, ends[0] + pairs)
    return max(ends) * places


def fitted(date: str) -> dict[str, tuple[float, float]]:
    """Milliseconds a pair, fixed and for each number of the width, by kernel."""
    found = {}
    for kind in STEP:
        rows = {row["width"]: row for row in MEASURED["kernels"] if row["measured"] == date and is_fitted(row, kind)}
        narrow, wide = (rows[width]["ms"] / busiest(kind, rows[width]) for width in (64, 128))
        slope = (wide - narrow) / 64
        found[kind] = narrow - 64 * slope, slope
    return found


def is_fitted(row: Row, kind: str) -> bool:
    """Whether a row of a kernel is one of the two that it is fitted to."""
    return row["kind"] == kind and row["tokens"] == 8192 and not row["causal"]


def milliseconds(kind: str, row: Row, rates: dict[str, tuple[float, float]]) -> float:
    """What a kernel takes."""
    fixed, slope = rates[kind]
    return (fixed + slope * row["width"]) * busiest(kind, row)


def kernels() -> list[Compared]:
    """All rows of kernels that are held out."""
    found = []
    for row in MEASURED["kernels"]:
        if not is_fitted(row, row["kind"]):
            said = milliseconds(row["kind"], row, fitted(row["measured"]))
            found.append(Compared(f"{row['measured']} {row['kind']:8} {_words(row)}", said, row["ms"]))
    return found


def calls() -> list[Compared]:
    """All calls of the engine, none of which was fitted to, as sums of kernels; Python's time from two rows."""
    found = []
    (python,) = (row for row in MEASURED["host"] if row["engine"].startswith("triton"))
    for row in MEASURED["calls"]:
        if row["engine"] != "triton":
            continue
        rates = fitted(row["measured"])
        parts = {"forward": ("forward",), "step": STEP}
        for name, kinds in parts.items():
            said = sum(milliseconds(kind, row, rates) for kind in kinds)
            if row["measured"] == python["measured"]:
                said = max(said, python[name])
            if row[name] is not None:
                found.append(Compared(f"{row['measured']} {name:8} {_words(row)}", said, row[name]))
    return found


def of_python(name: str) -> float:
    """Milliseconds of Python in a retrofitted layer, at most: those of the slowest published layer at few tokens, where
    the GPU waits, and of our call."""
    published = [row["published"][name] / row["layers"] for row in _retrofits() if row["tokens"] <= 512]
    (ours,) = (row[name] for row in MEASURED["host"] if row["engine"].startswith("triton"))
    return float(max(published) + ours)


def models() -> list[Compared]:
    """Retrofitted models in which the engine computed, as layers of Python, without time on the GPU."""
    return [
        Compared(f"{row['model']}, {row['batch']} x {row['tokens']}, {name}", row["layers"] * of_python(name), measured)
        for row in _retrofits()
        if row["tokens"] >= 512
        for name, measured in row["retrofit"].items()
    ]


def _retrofits() -> list[Row]:
    """The rows of models whose bias the kernels compute, one per layer."""
    return [row for row in MEASURED["models"] if row["model"] in ("T5 encoder", "BEiT")]


def published(name: str, family: str) -> float:
    """Milliseconds that the published attention takes on the GPU for each pair, at least."""
    if family == "sequence":  # between two T5 of equally many tokens, of which the shorter waited for Python
        short, long = (
            next(row for row in MEASURED["models"] if row["model"] == "T5 encoder" and row["tokens"] == tokens)
            for tokens in (512, 2048)
        )
        pairs = [row["layers"] * row["batch"] * row["heads"] * row["tokens"] ** 2 for row in (short, long)]
        return float((long["published"][name] - short["published"][name]) / (pairs[1] - pairs[0]))
    (row,) = (  # the newest of PyTorch's kernel with a table that is gathered
        row for row in MEASURED["calls"]
        if row["engine"] == "dense" and row["measured"] == "2026-11-27" and row["forward"] and row["width"] == 64
    )  # fmt: skip
    return float(row[name] / (row["batch"] * row["heads"] * row["tokens"] ** 2))


def gathered() -> list[Compared]:
    """The other rows of a gathered table without a mask, one element of the batch, as multiples of pairs."""
    return [
        Compared(f"{row['measured']} gathered {name:8} {_words(row)}", said, row[name])
        for row in MEASURED["calls"]
        if row["engine"] == "dense" and row["tokens"] == 4097 and row["measured"] == "2026-11-27"
        for name in ("forward", "step")
        if row[name] is not None
        for said in [published(name, "grid") * row["heads"] * row["tokens"] ** 2]
    ]


def borders() -> dict[str, int]:
    """By family, the power of two of tokens from which both a forward pass and a step are surely faster."""
    excess = max(one.measured / one.said for one in models())
    found = {}
    for family in ("sequence", "grid"):
        tokens = 512
        while any(
            published(name, family) * HEADS * tokens**2 < excess * of_python(name) for name in ("forward", "step")
        ):
            tokens *= 2
        found[family] = tokens
    return found


def _words(row: Row) -> str:
    mask = ", causal" if row["causal"] else ""
    return f"{row['batch']} x {row['heads']} x {row['tokens']:,}, width {row['width']}{mask}"


def _print(title: str, rows: Sequence[Compared]) -> None:
    close = sum(abs(one.error) <= 0.2 for one in rows)
    print(f"\n{title}: {close} of {len(rows)} within 20%")
    for one in rows:
        print(f"  {one.what:58} said {one.said:8.3f} ms, measured {one.measured:8.3f} ({one.error:+.0%})")


def main() -> None:
    """Print what is fitted, what is held out, and the borders."""
    for date in ("2026-11-26", "2026-11-27"):
        print(f"fitted, {date}: picoseconds a pair, fixed and for each number of the width")
        for kind, (fixed, slope) in fitted(date).items():
            print(f"  {kind:8} {fixed * 1e9:.3f} {slope * 1e9:.5f}")
    _print("kernels, held out", kernels())
    _print("calls, held out", calls())
    _print("a gathered table, held out", gathered())
    _print("retrofitted models, as layers of Python alone", models())
    print("\nborders: " + ", ".join(f"{family} {tokens:,}" for family, tokens in borders().items()))


if __name__ == "__main__":
    main()
