"""`python -m tests.mutation --out FILE.jsonl`: which errors, put into the code on purpose, a suite of tests finds.

Mutants of the core, the mechanisms and the engines are taken in an order that the seed decides, nobody picks them
(`fuzz/mutating.py` says what is none). For each, the tests run on a copy of the source until one fails: those of the
changed module first, then those of its neighbours, then the rest. Two suites are compared on the same mutants by
running both on one source:

    python -m tests.mutation --source src --tests tests --out new.jsonl
    python -m tests.mutation --source src --tests ../before/tests --out old.jsonl

A file that is there is continued. `--only FILE.jsonl` takes the mutants alone that survived there: after a quick round
(`--reach 1`), those that a reader finds to change nothing need no longer one.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.mutating import Mutant, mutants  # noqa: E402

TARGETS = ("core", "position", "engines")
NEIGHBOURS = ("core", "engines", "position", "patterns", "fuzz", "layers", "models")
"""Folders of tests, nearest to the targets first; the others follow."""


def stages(mutant: Mutant, tests: Path) -> list[list[Path]]:
    """The files of tests in the order in which they may find a mutant: no file twice."""
    stem, every = Path(mutant.path).stem, sorted(tests.rglob("test_*.py"))
    own = [path for path in every if stem.strip("_") in path.stem and path.parent.name in NEIGHBOURS]
    if "streaming" in mutant.path:
        own += [path for path in every if path.stem in ("test_streaming", "test_layouts", "test_unseen")]
    near = [path for name in NEIGHBOURS for path in every if path.parent.name == name]
    found: list[list[Path]] = []
    for stage in (own, near, every):
        seen = {path for before in found for path in before}
        found.append([path for path in dict.fromkeys(stage) if path not in seen])
    return [stage for stage in found if stage]


def judge(mutant: Mutant, source: Path, tests: Path, limit: float, reach: int) -> dict[str, Any]:
    """What became of a mutant: killed, by which test and in which stage, or survived."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        path = Path(folder) / mutant.path
        text = path.read_text()
        path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        found: dict[str, Any] = {"verdict": "survived"}
        for number, files in enumerate(stages(mutant, tests)[:reach]):
            command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", *map(str, files)]
            try:
                run = subprocess.run(
                    command,
                    cwd=tests.parent,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                found = {"verdict": "killed", "stage": number, "by": f"hangs for {limit:.0f} s"}
                break
            if run.returncode not in (0, 5):  # 5: none was collected
                failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                found = {"verdict": "killed", "stage": number, "by": (failed or ["the process ends"])[0][:200]}
                break
    return {"mutant": str(mutant), **found, "seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the frozen source")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the suite")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are taken")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for a stage of one")
    parser.add_argument("--reach", type=int, default=3, help="1: the module's own tests alone, 2: its neighbours' too")
    parser.add_argument("--only", type=Path, help="what another suite left: the survivors of its file")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each")
    given = parser.parse_args()
    every = mutants(given.source.resolve(), TARGETS)
    taken = random.Random(given.seed).sample(every, given.count)
    if given.only:
        known = [json.loads(line) for line in given.only.read_text().splitlines()]
        left = {one["mutant"] for one in known if one["verdict"] == "survived"}
        taken = [mutant for mutant in taken if str(mutant) in left]
    verdicts = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {one["mutant"] for one in verdicts}
    print(f"{len(every):,} mutants, {len(taken)} of them taken, {len(done)} judged before", flush=True)
    with ThreadPoolExecutor(given.jobs) as pool, given.out.open("a") as file:
        rest = [mutant for mutant in taken if str(mutant) not in done]
        for one in pool.map(
            lambda mutant: judge(mutant, given.source.resolve(), given.tests.resolve(), given.limit, given.reach), rest
        ):
            verdicts.append(one)
            print(json.dumps(one), file=file, flush=True)
            print(f"{one['verdict']:9} {one['mutant']}  {one.get('by', '')}", flush=True)
    print(f"{sum(one['verdict'] == 'killed' for one in verdicts)} of {len(verdicts)} killed")


if __name__ == "__main__":
    main()
