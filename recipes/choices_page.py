"""Write `docs/choices.md`: what was measured of attention, norms and optimizers, and of two rows of positions.

    relpos compare --what attention --task text --steps 240 --seeds 3 --out runs/attention-text      and so on
    python recipes/choices_page.py runs/*

Each folder is one finished comparison. Nothing is computed here that its own page has not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from relpos.report.choice_claims import TABLE, judge_choices
from relpos.report.choices import Row, amount, rows
from relpos.report.claims import Outcome, judge_claims
from relpos.report.results import positions, what

from relpos.report.measure import measure_of
from relpos.report.statistics import Interval

PAGE = Path(__file__).parents[1] / "docs" / "choices.md"
HEAD = """# What attention, norms and optimizers cost and give

One of the documents that relpos started from has a table of techniques with "memory low", "speed fast", "quality
good" that nobody measured. These are figures of `relpos compare`, {seeds} seeds each, {machine}. Text is {steps}
steps of training on 256 bytes at a time, digits the whole recipe. In brackets are 95% intervals, those of a
difference paired. Step is a training step as models are trained. `time x` and `memory x` are a step of one block at
4,096 tokens beside the first's, `~ N^` is the exponent of its time from 1,024 to 4,096 tokens. Full attention is
fused here and stores no N x N numbers either, so little can save memory beside it. Written by `python
recipes/choices_page.py`.

"""
NOTES = """## What else the document says

- **"Linear attention reduces quadratic complexity to linear."** Held: see the exponents of its time.
- **"Different attention mechanisms trade off quality for efficiency."** Held in part: on text linear attention is
  quicker and behind; local attention is quicker and ahead of full attention after so short a training.
- **"RoPE and ALiBi improve generalization."** Beyond the trained length: claims on the page of `relpos compare
  --task text`.
- **"Flash attention reduces memory usage and improves speed."** Not to be told from this table: full attention here
  is such a kernel. The paper's algorithm in plain PyTorch (`flash`), for reading, is slower than it.
- **"Prefer BF16; use FP16 with care (loss scaling)."** `--precision bf16-mixed` and `fp16-mixed` are there, the
  second with scaled losses; which is more stable was not measured.
- **Use cases** ("long sequences", "production") are advice and were not measured.

Rates of Lion and Sophia were searched over five to seven values on validation data (`recipes/optimizer_search.py`);
AdamW's are the recipe's, found by other searches. A few hundred steps are short for all of them. On grids `local`
is the rows above and below, so that its pairs grow with N to the 1.5. Sophia-H differentiates twice, which takes
dense attention: hence its memory.
"""


def bracketed(interval: Interval, digits: int, unit: float) -> str:
    """A mean with its bounds."""
    mean, low, high = (format(unit * x, f".{digits}f") for x in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})"


def table(results: dict[str, Any]) -> str:
    """The rows of a comparison of choices."""
    share = measure_of(results).is_share
    digits, unit = (1, 100.0) if share else (3, 1.0)
    first, name = positions(results)[0], "accuracy, %" if share else "bits a byte"

    def line(row: Row) -> str:
        step, memory = amount(row.trained, "time"), amount(row.trained, "memory")
        figures = (
            "-" if row.reached is None else bracketed(row.reached, digits, unit),
            "-" if row.ahead is None else bracketed(row.ahead, digits, unit),
            *("-" if x is None else format(x, form) for x, form in ((step, ".1f"), (memory, ".0f"))),
            *("-" if x is None else f"{x:.2f}" for x in (row.ratio, row.memory_ratio, row.time_growth)),
        )
        return f"| `{row.name}` | {' | '.join(figures)} |"

    heading = f"| {what(results)} | {name} | ahead of {first} | step, ms | MiB | time x | memory x | ~ N^ |"
    return "\n".join([heading, "|---|---|---|---|---|---|---|---|", *map(line, rows(results))])


def claims(outcomes: list[Outcome]) -> str:
    """A line a claim: the word, the quote, the figures."""
    return "\n".join(
        f'- **{one.word}**: "{one.claim.quote}" '
        + "; ".join(f"{found.who} {found.figure}" for found in one.findings)
        + ("." if one.findings else "")
        for one in outcomes
    )


def section(results: dict[str, Any]) -> str:
    """One comparison."""
    kind, task = what(results), results["settings"]["task"]
    if kind == "position":
        rows_of_table = [one for one in judge_claims(results) if TABLE.lower() in one.claim.section]
        return f"## Position, {task}\n\n{claims(rows_of_table)}\n"
    return f"## {kind.capitalize()}, {task}\n\n{table(results)}\n\n{claims(judge_choices(results))}\n"


def main() -> None:
    """Read the folders and write the page."""
    parser = argparse.ArgumentParser(description="the page on attention, norms and optimizers")
    parser.add_argument("folders", nargs="+", type=Path, help="finished comparisons")
    found = [json.loads((folder / "results.json").read_text()) for folder in parser.parse_args().folders]
    order = ["attention", "norm", "optimizer", "position"]
    found.sort(key=lambda results: (order.index(what(results)), results["settings"]["task"]))
    first = found[0]
    own = first["environment"]
    machine = f"{own['cores']} cores of {own['processor']}, PyTorch {own['torch']}"
    steps = {str(one["settings"]["recipe"]["steps"]) for one in found if one["settings"]["task"] == "text"}
    head = HEAD.format(seeds=first["settings"]["seeds"], machine=machine, steps=" or ".join(sorted(steps)) or "no")
    PAGE.write_text(head + "\n".join(map(section, found)) + "\n" + NOTES)
    print(PAGE)


if __name__ == "__main__":
    main()
