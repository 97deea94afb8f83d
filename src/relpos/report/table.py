"""The comparison as a table: a row for each mechanism by its best growth rule, and one for each of its other rules.

Plain data, from which the terminal and the page make their tables. Rows are sorted by the largest shift, or the longest
text, then by the plain test, best first. A quick run keeps the requested order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from relpos.report.advice import first_of, relative, step_cost
from relpos.report.measure import measure_of
from relpos.report.standings import (
    Contender,
    best_rules,
    contenders,
    far_probe,
    grown_probe,
    outcomes,
    reasons,
    without_runs,
)
from relpos.results import Cost, ProbeRecord, Results

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
FITTED = 3
"""How many sizes the fit of an exponent needs, at least."""


@dataclass(frozen=True)
class Cell:
    """A figure, its interval in small print, its sort key, half the interval's width (its ends if it stops at 0 or
    100%), and the reason if there is no figure."""

    text: str
    small: str = ""
    sort: float | None = None
    half: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Column:
    """A narrow terminal drops columns with a low `keep` first; 0 is only on the page, -1 only in the full table."""

    title: str
    note: str
    keep: int
    cell: Callable[[Contender], Cell]


@dataclass(frozen=True)
class Row:
    """One mechanism by one rule. `main` says that it is the best rule; `rule` is its name if there are others."""

    contender: Contender
    main: bool
    rule: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Columns in reading order, rows best first."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def build_table(results: Results, *, every: bool = False) -> Table:
    """The table; with `every`, the columns of all probes and no costs."""
    columns = _probe_columns(results)
    if every:
        return _filled(results, columns)
    columns = [column for column in columns if column.keep >= 0]
    if results.settings.what == "position":
        first = [Column("position parameters", "Parameters that describe position.", 3, _parameters(results))]
        return _filled(results, [*first, *columns, *_plain_columns(results), *_cost_columns(results)])
    return _filled(results, [*columns, *_choice_columns(results)])


def _filled(results: Results, columns: list[Column]) -> Table:
    best = best_rules(results)
    rules: dict[str, dict[str | None, None]] = {name: {best.get(name): None} for name in results.names}
    for probe in results.task.probes:
        for contender in contenders(results, probe):
            if contender.growth is not None:
                rules[contender.name][contender.growth] = None
    order = list(results.names)
    if not results.settings.quick:
        asked = [probe for probe in (far_probe(results), results.task.probes[0]) if probe is not None]
        reached = {name: tuple(_rank(results, name, best.get(name), probe) for probe in asked) for name in order}
        order.sort(key=reached.__getitem__)
    rows = []
    for name in order:
        for rule in rules[name]:
            contender, main = Contender(name, rule), rule == best.get(name)
            named = (rule or "") if len(rules[name]) > 1 else ""
            rows.append(Row(contender, main, named, tuple(column.cell(contender) for column in columns)))
    return Table(tuple(columns), tuple(rows))


def _rank(results: Results, name: str, rule: str | None, probe: ProbeRecord) -> float:
    measure = measure_of(results)
    scored = outcomes(results, Contender(name, rule if probe.group in ("canvas", "length") else None), probe)
    return measure.rank(measure.interval(scored).mean if scored else None)


def _probe_columns(results: Results) -> list[Column]:
    """One column per probe; the page shows only the largest canvas and the last rotation."""
    grown, last = grown_probe(results), results.task.probes[-1]
    test, far = results.task.probes[0], far_probe(results)
    shown: list[Column] = []
    for probe in results.task.probes:
        if results.settings.what != "position" and probe is not test:
            continue
        keep = {"test": 9, "shift": 2, "length": 4, "canvas": 6}.get(probe.group, 3)
        keep = 8 if far is not None and probe.id == far.id else keep
        if (probe.group == "canvas" and probe is not grown) or (probe.group == "rotation" and probe is not last):
            keep = -1
        shown.append(Column(_title(probe), probe.description, keep, _figures(results, probe, "recipe")))
    return shown


def _title(probe: ProbeRecord) -> str:
    """A probe as a column title."""
    return f"+{probe.x:g} px" if probe.group == "shift" and "px" in probe.label else probe.label


def _plain_columns(results: Results) -> list[Column]:
    times = results.settings.recipe.position_learning_rate_multiplier
    if all(run.variant != "x1" for run in results.records):
        return []
    probes = [results.task.probes[0], *filter(None, [far_probe(results)])]
    note = "with position parameters at the learning rate of the rest"
    return [
        Column(f"{_title(probe)} without {times:g}x rate", f"{probe.label}, {note}.", 0, _figures(results, probe, "x1"))
        for probe in probes
    ]


def _figures(results: Results, probe: ProbeRecord, variant: str) -> Callable[[Contender], Cell]:
    measure, missing, best = measure_of(results), reasons(results, probe), best_rules(results)
    by_rule = any(one.growth is not None for one in contenders(results, probe))

    def cell(contender: Contender) -> Cell:
        if not by_rule and contender.growth != best.get(contender.name):
            return Cell("")  # at the trained size all rules give the same figure
        scored = outcomes(results, contender if by_rule else Contender(contender.name), probe, variant)
        if not scored:
            lost = without_runs(results, contender.name, variant)
            return Cell(lost or NOTHING, reason=lost or missing.get(contender.name, "trained with the recipe only"))
        interval = measure.interval(scored)
        half = f"\N{PLUS-MINUS SIGN}{measure.size((interval.high - interval.low) / 2)}"
        if interval.low == 0.0 or (measure.is_share and interval.high == 1.0):  # clipped, so not symmetric
            half = f"({measure.bounds(interval)})"
        return Cell(measure.number(interval.mean), measure.bounds(interval), interval.mean, half)

    return cell


def _parameters(results: Results, what: str = "position") -> Callable[[Contender], Cell]:
    def cell(contender: Contender) -> Cell:
        runs = [run for run in results.records if run.name == contender.name]
        if not runs:
            return Cell(NOTHING, reason="not finished")
        count = int(getattr(runs[0].parameters, what))
        return Cell(f"{count:,}", sort=float(count))

    return _of_mechanism(results, cell)


def _of_mechanism(results: Results, cell: Callable[[Contender], Cell]) -> Callable[[Contender], Cell]:
    """Show values that do not depend on the rule only in the row of the best rule."""
    best = best_rules(results)
    return lambda contender: cell(contender) if contender.growth == best.get(contender.name) else Cell("")


def _cost_columns(results: Results) -> list[Column]:
    first = first_of(results)
    unit = f"{TIMES} {first}" if relative(results) else "ms"
    note = f"Time of a training step as a multiple of {first}'s" if relative(results) else "Milliseconds of a step"
    columns = []
    for tokens in results.token_counts:
        text = f"{note}, at {tokens:,} tokens."
        form = "{:.2f}" if relative(results) else "{:,.1f}"
        step = _cost(results, tokens, form, lambda entry: step_cost(results, entry.name, entry.tokens))
        columns.append(Column(f"step {unit}, {tokens:,} tokens", text, 5, step))
    weighed = [entry.tokens for entry in results.costs if entry.peak_memory_mib is not None]
    if weighed:
        most = max(weighed)
        note = f"Peak memory of a training step at {most:,} tokens, above the level before the model was built."
        columns.append(Column(f"MiB, {most:,} tokens", note, 1, _cost(results, most, "{:,.0f}", _memory)))
    return columns


def _memory(entry: Cost) -> float | None:
    return entry.peak_memory_mib


def _cost(results: Results, tokens: int, form: str, of: Callable[[Cost], float | None]) -> Callable[[Contender], Cell]:
    def cell(contender: Contender) -> Cell:
        entry = results.cost(contender.name, tokens)
        value = None if entry is None else of(entry)
        if value is None:
            return Cell(NOTHING, reason=(entry and entry.reason) or "not measured")
        return Cell(form.format(value), sort=value)

    return _of_mechanism(results, cell)


def _choice_columns(results: Results) -> list[Column]:
    """Columns for attention, norms and optimizers: the difference to the first of the kind, and cost growth with N."""
    first, measure, test = results.names[0], measure_of(results), results.task.probes[0]

    def ahead(contender: Contender) -> Cell:
        outcome, of_first = outcomes(results, contender, test), outcomes(results, Contender(first), test)
        if contender.name == first or not set(outcome) & set(of_first):
            return Cell(NOTHING)
        interval = measure.ahead(outcome, of_first)
        half = f"\N{PLUS-MINUS SIGN}{measure.size((interval.high - interval.low) / 2)}"
        bounds = f"{measure.size(interval.low)} to {measure.size(interval.high)}"
        return Cell(measure.size(interval.mean), bounds, interval.mean, half)

    def state(contender: Contender) -> Cell:
        numbers = [entry.state_per_parameter for entry in results.costs if entry.name == contender.name]
        return Cell(f"{numbers[0]:.2f}", sort=numbers[0]) if numbers and numbers[0] is not None else Cell(NOTHING)

    def grows(of: Callable[[Cost], float | None]) -> Callable[[Contender], Cell]:
        def cell(contender: Contender) -> Cell:
            power = growth(results, contender.name, of)
            return Cell(NOTHING) if power is None else Cell(f"{power:.2f}", sort=power)

        return cell

    columns = [
        Column(f"ahead of {first}", "Paired difference, unit by unit and seed by seed.", 7, ahead),
        Column("parameters", "Of the model.", 0, _parameters(results, "total")),
    ]
    if results.settings.what == "optimizer":
        columns.append(Column("state per parameter", "Numbers that the optimizer stores for each parameter.", 0, state))
    columns += _cost_columns(results)
    if len(grown_sizes(results)) >= FITTED:
        sizes = listed_sizes(results)
        columns.append(Column("time ~ N^", f"Exponent of the time over {sizes} tokens.", 4, grows(_time)))
        columns.append(Column("memory ~ N^", f"Exponent of the memory over {sizes} tokens.", 2, grows(_memory)))
    return columns


def listed_sizes(results: Results) -> str:
    """ "1,024, 2,048, 4,096"."""
    return ", ".join(f"{tokens:,}" for tokens in grown_sizes(results))


def grown_sizes(results: Results) -> list[int]:
    """The token counts with the most common batch and depth, ascending, so that only N differs."""
    by_shape: dict[tuple[int, int | None], set[int]] = {}
    for entry in results.costs:
        by_shape.setdefault((entry.batch_size, entry.depth), set()).add(entry.tokens)
    return max((sorted(sizes) for sizes in by_shape.values()), key=len, default=[])


def _time(entry: Cost) -> float | None:
    return None if entry.step_ms is None else entry.step_ms.median


def growth(results: Results, name: str, of: Callable[[Cost], float | None]) -> float | None:
    """The exponent p of cost = c * N^p: least squares on logarithms of three sizes or more."""
    entries = {n: results.cost(name, n) for n in grown_sizes(results)}
    points = [(n, value) for n, entry in entries.items() if entry is not None and (value := of(entry))]
    if len(points) < FITTED:
        return None
    x, y = np.log(np.asarray(points, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])
