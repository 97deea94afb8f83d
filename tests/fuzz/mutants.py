"""`python -m tests.fuzz.mutants --seed 0`: what the fuzzer finds of errors that are put into the code on purpose.

Mutants of streaming's and the masks' code are taken in an order that the seed decides, nobody picks them. Of each, the
fuzzer runs up to 2,000 calls on a copy of the source, until one fails.

What is no mutant, by rule and not by hand:

    lines that no one of the fuzzer's first calls runs
    docstrings, annotations, decorators, default arguments, module constants, assertions
    whatever stands inside `raise`, `fail(...)` or `require_...(...)` or asks whether to do so, and functions that only
    check arguments, choose between engines or say how fast a product is: they decide about messages and speed, and
    have tests of their own
    a change after which the text says the same

A survivor is printed for a reader: many cut the work otherwise, or change what nothing depends on.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src"
sys.path[:0] = [str(ROOT / "tests"), str(SOURCE)]

from fuzz.mutating import Mutant, mutants  # noqa: E402

COVERING = 300
"""Seeds that tell which lines are run."""
MEMORY = 12 * 2**30


def lines_run(files: set[str]) -> set[tuple[str, int]]:
    """File and number of each of their lines that the first calls run in streaming."""
    from fuzz.drawing import draw
    from fuzz.running import check

    found = set()

    def within(frame: FrameType, event: str, arg: object) -> Any:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return within

    def called(frame: FrameType, event: str, arg: object) -> Any:
        return within if frame.f_code.co_filename in files else None

    sys.settrace(called)
    for seed in range(COVERING):
        check(draw(seed), ("streaming",))
    sys.settrace(None)
    return found


def failing(source: pathlib.Path, calls: int, limit: float) -> str:
    """How the fuzzer's calls fail on a source; "" where none does."""
    command = [sys.executable, "-m", "tests.fuzz", "--seeds", f"0:{calls}", "--stop", "1", "--no-shrink"]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"hangs for {limit:.0f} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(("seed", "  "))]
    return "" if done.returncode == 0 else " ".join([*said[:2], *done.stderr.splitlines()[-1:]])[:200]


def judged(mutant: Mutant, calls: int, limit: float) -> str:
    """How the calls fail on a copy of the source with the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        path = pathlib.Path(folder) / mutant.path
        text = path.read_text()
        path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
        return failing(pathlib.Path(folder), calls, limit)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are taken")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--calls", type=int, default=2000, help="calls of the fuzzer for each at most")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each at most")
    parser.add_argument("--list", action="store_true", help="say only which they are")
    given = parser.parse_args()
    every = mutants(SOURCE)
    run = lines_run({str(SOURCE / mutant.path) for mutant in every})
    reached = [mutant for mutant in every if (str(SOURCE / mutant.path), mutant.line) in run]
    print(f"{len(every):,} mutants, {len(reached):,} of them on lines that {COVERING} calls run", flush=True)
    taken = random.Random(given.seed).sample(reached, given.count)
    if given.list:
        print(*taken, sep="\n")
        return 0
    unchanged = failing(SOURCE, given.calls, given.limit)
    if unchanged:
        sys.exit(f"unchanged, the code fails: {unchanged}")
    survived = 0
    for mutant in taken:
        why = judged(mutant, given.calls, given.limit)
        survived += not why
        print(f"{'killed' if why else 'survived':9} {mutant}\n          {why or 'no call shows it'}", flush=True)
    print(f"{given.count - survived} of {given.count} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
