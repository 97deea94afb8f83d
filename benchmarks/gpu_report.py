"""What a run of `on_gpu.py` says: tests that failed, tiles, short calls; and the results that the README's table is of.

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
    for line in lines:
        if line["part"] == "short":
            yield "short: {batch} x 8 x {tokens}, {form}: {forward_us} us, a step {step_us} us".format(**line)


def main() -> None:
    """Print it, and write it if asked."""
    parser = argparse.ArgumentParser(description="what a run on a GPU says")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.lines.read_text(encoding="utf-8").splitlines()]
    print(*said(lines), sep="\n")
    if any("peer" in line for line in lines):
        found = results(lines)
        for target in found["targets"]:
            print("target: {case}, of {against}: {reached}, asked {asked}".format(**target))
        if asked.write:
            RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
