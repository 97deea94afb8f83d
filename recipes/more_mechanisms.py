"""The mechanisms that the comparisons of docs/results-digits.md and docs/results-text.md leave out, in tables there.

    relpos compare --data digits --seeds 2 --positions none,alibi_manhattan,... --out runs/digits
    relpos compare --data text --seeds 2 --positions none,cope,... --out runs/text
    python recipes/more_mechanisms.py runs/digits runs/text
    relpos compare --data text --seeds 3 --positions none,t5,fox,inkling,... --out runs/content
    python recipes/more_mechanisms.py content=runs/content

The whole commands stand on those pages. The tables have the columns of the first ones, without their costs, which
`benchmarks/mechanisms.py` measures of every mechanism.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from relpos.report.measure import measure_of
from relpos.report.standings import contenders, outcomes
from relpos.results import Results, load_results

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = {
    "digits": {
        "test": "test", "+1 px": "shift/1", "+2 px": "shift/2", "+3 px": "shift/3",
        "24 x 24, anywhere": "canvas/24/anywhere",
    },
    "text": {"256, trained": "test", "512": "length/512", "1,024": "length/1024", "2,048": "length/2048"},
}  # fmt: skip
"""The heads of a page's first table, and the probes of `results.json`."""
WITH_INTERVAL = ("shift/3", "length/2048")


def seeds(results: Results) -> set[int]:
    """Those that every mechanism has finished."""
    return set.intersection(*({run.seed for run in results.runs(name)} for name in results.names))


def cell(results: Results, name: str, probe_id: str) -> tuple[float, str]:
    """What a mechanism reaches, to sort by, and in words: by each of its rules, the best first.

    One that is named after a rule of rotations, by that one alone: they differ in nothing else.
    """
    (probe,) = (one for one in results.task.probes if one.id == probe_id)
    measure, shared = measure_of(results), seeds(results)
    reached = [
        (measure.interval({seed: x for seed, x in outcomes(results, one, probe).items() if seed in shared}), one.growth)
        for one in contenders(results, probe)
        if one.name == name
    ]
    named = name.removeprefix("rotary_")
    reached = [one for one in reached if one[1] == named] or reached
    reached.sort(key=lambda one: measure.rank(one[0].mean))
    words: list[str] = []
    unit, places, coarse = (100, 1, 0) if results.task.name == "digits" else (1, 3, 2)
    for interval, growth in reached:
        mean, low, high = (unit * x for x in (interval.mean, interval.low, interval.high))
        text = f"{mean:.{places}f}"
        if probe_id in WITH_INTERVAL and not words:
            text += f" ({low:.{coarse}f} to {high:.{coarse}f})"
        rule = growth if growth != "as is" or probe_id.startswith("canvas") else None
        words.append(f"{text} {rule}" if rule else text)
    return measure.rank(reached[0][0].mean), ", ".join(words)


def table(results: Results) -> str:
    """The rows of a page, those that are best far from training first."""
    columns = COLUMNS[results.task.name]
    far = next(one for one in reversed(columns.values()) if one in WITH_INTERVAL)
    names = sorted(results.names, key=lambda name: cell(results, name, far)[0])
    what = "accuracy %" if results.task.name == "digits" else "bits per byte"
    lines = [f"| {' | '.join([what, 'position parameters', *columns])} |", f"|{'---|' * (len(columns) + 2)}"]
    for name in names:
        parameters = results.runs(name)[0].parameters.position
        cells = [cell(results, name, probe)[1] for probe in columns.values()]
        lines.append(f"| {' | '.join([f'`{name}`', f'{parameters:,}', *cells])} |")
    return "\n".join(lines)


def write(run: Path, place: str = "others") -> None:
    """Write a run's table into its page, between the marks of that place."""
    results = load_results(run)
    path = DOCS / f"results-{results.task.name}.md"
    text = path.read_text(encoding="utf-8")
    made = f"<!-- {place} -->\n\n{table(results)}\n\n<!-- end of {place} -->"
    found, count = re.subn(rf"<!-- {place} -->.*?<!-- end of {place} -->", lambda _: made, text, flags=re.DOTALL)
    if not count:
        raise SystemExit(f"{path} has no place for {place}")
    path.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        place, _, folder = given.rpartition("=")
        write(Path(folder), place or "others")
