"""What a run of `on_gpu.py` says: failures, tiles, short calls, borders; and the results that the README's table is of.

    python benchmarks/gpu_report.py FOLDER/measured.jsonl [--write]

--write makes `benchmarks/results/attention-cuda.json` of the part on attention, in place of what is there;
`benchmarks/readme.py` then writes the README's table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from relpos.bench.cases import GPU_LENGTHS, find_cases
from relpos.bench.targets import judge, memory_fits

RESULT = Path(__file__).parent / "results" / "attention-cuda.json"
Line = Mapping[str, Any]


def whole(text: str) -> Iterator[Line]:
    """The results of a run. One that was cut off may end within a line, which is left out."""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            print(f"not read: {line[:60]}")


def results(lines: Sequence[Line]) -> dict[str, Any]:
    """The part on attention as `relpos bench` writes it."""
    lines = [line for line in lines if line["part"] == "attention"]
    around = [line["surroundings"] for line in lines if "surroundings" in line]
    entries = [{name: value for name, value in line.items() if name != "part"} for line in lines if "peer" in line]
    names = list(dict.fromkeys(entry["case"] for entry in entries))
    return {
        "schema_version": 2,
        "settings": {"engines": None, "repeats": len(entries[0]["rounds_ms"]) // 3, "cases": names},
        "environment": around[-1],
        "cases": {name: asdict(find_cases(name)[0]) for name in names},
        "entries": entries,
        "ceilings": None,
        "targets": judge(entries),
        "memory_fits": memory_fits(entries, list(GPU_LENGTHS)),
    }


def said(lines: Sequence[Line]) -> Iterator[str]:
    """The other parts, a line each."""
    of_tests = [line for line in lines if line["part"] == "tests"]
    ended = [line for line in of_tests if "test" in line]
    if ended:
        seconds = "".join(f", {line['seconds']:.0f} s" for line in of_tests if "status" in line)
        yield f"tests: {sum(line['outcome'] == 'passed' for line in ended)} of {len(ended)} passed{seconds}"
        for line in ended:
            if line["outcome"] == "failed":
                why = next((x[2:].strip() for x in line["said"].splitlines() if x.startswith("E ")), "")
                yield f"  failed: {line['test']}: {why}"
        for line in sorted(ended, key=lambda line: -line["seconds"])[:5]:
            yield f"  {line['seconds']:.0f} s: {line['test']}"
    timed = [line for line in lines if line["part"] == "tiles" and "ms" in line]
    for (kind, width), group in groupby(timed, key=lambda line: (line["kind"], line["width"])):
        best = sorted(group, key=lambda line: line["ms"])[:5]
        yield f"tiles: {kind}, width {width}: " + "; ".join(f"{line['tile']} {line['ms']:.3f} ms" for line in best)
        shape = ", ".join(map(str, best[0]["tile"]))
        yield f'    ("{kind}", "half", {width}): _shape({shape}),'
    for line in lines:
        if line["part"] == "short":
            yield "short: {batch} x 8 x {tokens}, {form}: {forward_us} us, a step {step_us} us".format(**line)


def said_of_models(lines: Sequence[Line]) -> Iterator[str]:
    """Retrofitted models, a line for each size, and the border of each; then FlexAttention."""
    for line in lines:
        if line["part"] == "retrofits" and "ratio" in line:
            what = "step" if line["train"] else "forward"
            yield (
                f"retrofits: {line['model']}, {line['batch']} x {line['tokens']}, {what}: "
                f"{line['published_ms']:.2f} to {line['retrofit_ms']:.2f} ms, {line['ratio']:.2f} times as fast"
            )
    found: dict[str, dict[bool, int | None]] = {}
    for line in lines:
        if "border" in line:
            found.setdefault(line["model"], {})[line["train"]] = line["border"]
    for model, borders in found.items():
        forward, training = ("NEVER" if borders.get(train) is None else borders[train] for train in (False, True))
        yield f"border: {model}: Borders({forward}, {training})"
    for line in lines:
        if line["part"] == "flex" and "ms" in line:
            what = ", ".join(name for name in ("causal", "learned", "train") if line[name])
            yield f"flex: {what}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in line["ms"].items())


def said_of_faults(lines: Sequence[Line]) -> Iterator[str]:
    """Kinds of calls in which an engine differs, and whatever failed or was cut off."""
    checked = [line for line in lines if line["part"] == "check" and "call" in line]
    if checked:
        wrong = [line for line in checked if line["fault"]]
        served = sum(line["lack"] is None for line in checked)
        yield f"check: {len(checked)} calls, {served} of them served, {len(wrong)} wrong"
        yield from (f"  wrong: {line['call']}: {line['fault']}" for line in wrong)
    for line in lines:
        if line["part"] != "tiles" and (why := line.get("ended") or line.get("failed")):
            yield f"{line['part']}: {line.get('model', 'the part')}: {why}"


def main() -> None:
    """Print it, and write it if asked."""
    parser = argparse.ArgumentParser(description="what a run on a GPU says")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    asked = parser.parse_args()
    lines = list(whole(asked.lines.read_text(encoding="utf-8")))
    print(*said(lines), *said_of_models(lines), *said_of_faults(lines), sep="\n")
    if any("peer" in line for line in lines):
        found = results(lines)
        for target in found["targets"]:
            print("target: {case}, of {against}: {reached}, asked {asked}".format(**target))
        if asked.write:
            RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
