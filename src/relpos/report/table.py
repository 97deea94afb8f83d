"""The comparison as a table: one row a mechanism, one cell a figure, or a figure for each growth rule.

Plain data, from which the terminal and the page make theirs. Accuracies are 0 to 1 in `number`, percent in `text`;
bits per byte are what they are.
Rows are sorted by the largest shift, or the longest text, then by the plain test, best first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from relpos.report.measure import measure_of
from relpos.report.results import (
    DIVERGED,
    Contender,
    Results,
    contenders,
    cost,
    diverged,
    far_probe,
    largest_shift,
    outcomes,
    positions,
    probes,
    runs,
    token_counts,
    unmeasured,
)

Group = str
"""A probe's group ("test", "shift", "canvas", "rotation", "length"),
or "name", "parameters", "x1", "step", "memory"."""
COLUMN_GROUPS = ("name", "parameters", "test", "shift", "canvas", "length", "x1", "step", "memory")
"""What every comparison can have. A task may have groups of probes beyond them."""
NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """`key` is a probe's id or a name like "step/1024"; `title` is its heading, `note` one sentence about it."""

    key: str
    title: str
    group: Group
    note: str


@dataclass(frozen=True)
class Value:
    """One figure. `rule` is its growth rule; `number` is None where nothing was measured, for `reason`."""

    text: str
    number: float | None = None
    low: float | None = None
    high: float | None = None
    rule: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Cell:
    """The figures of one mechanism in one column."""

    values: tuple[Value, ...]

    better: Literal["higher", "lower"] = "higher"

    @property
    def sort(self) -> float | None:
        """What the column is sorted by: the figure, or the best where growth rules differ."""
        best = max if self.better == "higher" else min
        return best((value.number for value in self.values if value.number is not None), default=None)


@dataclass(frozen=True)
class Row:
    """One mechanism; `cells` by column key."""

    position: str
    cells: dict[str, Cell]


@dataclass(frozen=True)
class ComparisonTable:
    """Columns in reading order, rows best first."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def others(self) -> list[Column]:
        """The columns of probes that only some tasks have."""
        return [column for column in self.columns if column.group not in COLUMN_GROUPS]

    def group(self, *groups: Group) -> list[Column]:
        """The columns of the named groups, in reading order."""
        return [column for column in self.columns if column.group in groups]


def build_table(results: Results) -> ComparisonTable:
    """The whole table; a reader chooses columns by group."""
    columns = tuple(_columns(results))
    rows = [Row(position, {c.key: _cell(results, position, c) for c in columns}) for position in positions(results)]
    far, test, measure = far_probe(results), next(iter(probes(results, "test")), None), measure_of(results)
    headline = [probe["id"] for probe in (far, test) if probe is not None]
    rows.sort(key=lambda row: [measure.rank(row.cells[key].sort) for key in headline])
    return ComparisonTable(columns, tuple(rows))


def _columns(results: Results) -> Iterable[Column]:
    yield Column("position", "mechanism", "name", "The position mechanism, the only thing that differs between models.")
    yield Column("parameters", "parameters on position", "parameters", "Learned numbers that describe position.")
    for probe in results["task"]["probes"]:
        title = f"+{probe['x']:g}" if probe["group"] == "shift" and "px" in probe["label"] else probe["label"]
        yield Column(probe["id"], title, probe["group"], probe["description"])
    if any(record["variant"] == "x1" for record in results["records"]):
        times = "\N{MULTIPLICATION SIGN}1"
        for probe in (next(iter(probes(results, "test")), None), largest_shift(results)):
            if probe is not None:
                title = probe["label"] if probe["group"] == "test" else f"+{probe['x']:g}"
                note = f"{probe['label']}, with the position parameters at the learning rate of the rest."
                yield Column(f"x1/{probe['id']}", f"{title} at {times}", "x1", note)
    counts = token_counts(results)
    unit, note = ("ms", "Milliseconds of a training step")
    if _relative(results):
        unit, note = ("\N{MULTIPLICATION SIGN}", "Time of a training step as a multiple of none's")
    for tokens in counts:
        yield Column(f"step/{tokens}", f"step {unit} at {tokens:,}", "step", f"{note}, at {tokens:,} tokens.")
    measured = [entry["tokens"] for entry in results["costs"] if entry.get("peak_memory_mib") is not None]
    if measured:
        most = max(measured)
        note = f"Peak memory of a training step at {most:,} tokens, less the process before the model was built."
        yield Column(f"memory/{most}", f"MiB at {most:,}", "memory", note)


def _cell(results: Results, position: str, column: Column) -> Cell:
    if column.group == "name":
        return Cell((Value(position),))
    if column.group == "parameters":
        finished = [*runs(results, position), *diverged(results, position)]
        if not finished:
            return Cell((Value(NOTHING, reason="no finished run"),))
        count = int(finished[0]["parameters"]["position"])
        return Cell((Value(f"{count:,}", float(count)),))
    if column.group == "step":
        return Cell((_step(results, position, int(column.key.removeprefix("step/"))),))
    if column.group == "memory":
        return Cell((_memory(results, position, int(column.key.removeprefix("memory/"))),))
    if column.group == "x1":
        return _figures(results, position, column.key.removeprefix("x1/"), "x1")
    return _figures(results, position, column.key, "recipe")


def _figures(results: Results, position: str, probe: str, variant: str) -> Cell:
    values = [
        _figure(results, contender, probe, variant)
        for contender in contenders(results, probe, variant)
        if contender.position == position
    ]
    if variant == "recipe":
        for contender, reason in unmeasured(results, probe).items():
            if contender.position == position:
                text = DIVERGED if reason == DIVERGED else NOTHING
                values.append(Value(text, rule=contender.growth, reason=reason))
    nothing = Value(NOTHING, reason="trained with the recipe only")
    if diverged(results, position, variant):
        nothing = Value(DIVERGED, reason=DIVERGED)
    return Cell(tuple(values) or (nothing,), measure_of(results).better)


def _figure(results: Results, contender: Contender, probe: str, variant: str) -> Value:
    measure = measure_of(results)
    interval = measure.interval(outcomes(results, contender, probe, variant))
    return Value(measure.number(interval.mean), interval.mean, interval.low, interval.high, contender.growth)


def _step(results: Results, position: str, tokens: int) -> Value:
    entry = cost(results, position, tokens)
    if entry is None or entry.get("step_ms") is None:
        return Value(NOTHING, reason=(entry or {}).get("reason") or "not measured")
    if _relative(results):
        ratio = entry.get("ratio")
        return Value(NOTHING, reason="none was not timed beside it") if ratio is None else Value(f"{ratio:.2f}", ratio)
    median = float(entry["step_ms"]["median"])
    return Value(f"{median:,.1f}", median)


def _memory(results: Results, position: str, tokens: int) -> Value:
    entry = cost(results, position, tokens)
    if entry is None or entry.get("peak_memory_mib") is None:
        return Value(NOTHING, reason=(entry or {}).get("reason") or "not measured")
    mebibytes = float(entry["peak_memory_mib"])
    return Value(f"{mebibytes:,.0f}", mebibytes)


def _relative(results: Results) -> bool:
    """Whether steps were timed beside `none`, so that ratios, which travel between machines better, can be shown."""
    return any(entry.get("ratio") is not None for entry in results["costs"])
