"""The whole benchmark of the attention engines, to `benchmarks/results/attention-cpu.json` and two pictures beside it.

    python benchmarks/attention.py [--threads 2] [--repeats 7] [--force]
    python benchmarks/attention.py --device cuda        to attention-cuda.json

It takes an hour on two cores and wants them for itself. Cut short, the same command continues, as long as the source is
the same. Results that are there already are overwritten with --force alone. `benchmarks/readme.py` then writes the
README's table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from relpos.bench.cases import EVERY, EVERY_GPU, find_cases
from relpos.bench.run import Bench, BenchSettings
from relpos.cli.bench_verb import default_folder, measure

RESULTS = Path(__file__).parent / "results"
NAMES = {"results.json": "attention-{}.json", "step.png": "attention-{}.png", "forward.png": "attention-{}-forward.png"}
"""What a run writes, and what it is called here."""


def main() -> None:
    """Run all cases, then copy what they gave."""
    parser = argparse.ArgumentParser(description="the whole benchmark of the attention engines")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where, unless --cases says it")
    parser.add_argument("--cases", default=None, help="cases or families, joined by commas; all of the device")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; PyTorch's own choice where left out")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument("--force", action="store_true", help="overwrite the results that are there")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder that the results are copied to")
    asked = parser.parse_args()
    cases = find_cases(asked.cases or {"cpu": EVERY, "cuda": EVERY_GPU}[asked.device])
    names = {made: name.format(cases[0].device) for made, name in NAMES.items()}
    there = [asked.into / name for name in names.values() if (asked.into / name).exists()]
    if there and not asked.force:
        print(f"expected no results at {there[0]}; got some. Move them, or pass --force.", file=sys.stderr)
        raise SystemExit(2)
    settings = BenchSettings.make(cases, repeats=asked.repeats, threads=asked.threads)
    folder = default_folder(settings)
    measure(Bench(settings, folder), Console())
    asked.into.mkdir(parents=True, exist_ok=True)
    for made, name in names.items():
        if (folder / made).exists():
            shutil.copyfile(folder / made, asked.into / name)


if __name__ == "__main__":  # worker processes import this file
    main()
