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

Two kinds of survivors are set apart by what the functions of the mutated modules return, call by call, beside the same
functions unchanged. They are printed with the first function that differed, and do not count among the 20:

    speed    some function returned other stretches, shapes or whole numbers, or another function was called, and every
             result was right: the work is cut otherwise, and what is computed is the same. Or results are rounded
             otherwise although the mutated function returned the same numbers: they lie elsewhere in memory
    idle     some function returned other numbers with fractions, and every result was the same bit for bit: nothing
             depends on them, such as the shift of a row that sees nothing
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.mutating import Mutant, files_of, mutants  # noqa: E402
from fuzz.watching import NOTHING, Watch, digest  # noqa: E402

COVERING = 300
"""Seeds that tell which lines are run."""

# the processes


def _work(given: argparse.Namespace) -> None:
    """In a process of its own, on the source that PYTHONPATH names: a line of JSON for each seed."""
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
    import torch

    torch.set_num_threads(1)
    import relpos
    from fuzz import running
    from fuzz.drawing import draw
    from fuzz.running import ENGINES, check

    results: list[str] = []
    true = running.run

    def run(*given: Any) -> Any:
        out, lse, gradients = found = true(*given)
        results.extend(digest(x) for x in (out, lse, *gradients.values()) if x is not None)
        return found

    running.run = run

    files = files_of(pathlib.Path(relpos.__file__).parent.parent)
    first, last = (int(x) for x in given.work.split(":"))
    watch = Watch(files, lines=given.lines)
    if given.watch:  # memory that nothing was written into holds the same every time
        torch.use_deterministic_algorithms(True, warn_only=True)
    skipped = {int(seed) for seed in given.skip.split(",") if seed}
    for seed in range(first, last):
        if seed in skipped:
            continue
        call = draw(seed)
        told: dict[str, Any] = {"seed": seed}
        if given.watch or given.lines:
            with watch:
                outcome = check(call, ("streaming",))
            told["returned"], watch.returned = watch.returned, []
            told["fractions"], watch.fractions = watch.fractions, []
            told["results"] = results.copy()
            results.clear()
        else:
            outcome = check(call, ENGINES)
        told["failures"] = {engine: wrong[-200:] for engine, wrong in outcome.failures.items()}
        print(json.dumps(told), flush=True)
        if outcome.failures and not given.keep_on:
            return
    print(json.dumps({"lines": sorted(watch.lines)}), flush=True)


def _process(source: pathlib.Path, *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.mutants", *options], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _told(source: pathlib.Path, *options: str, limit: float) -> Iterator[dict[str, Any]]:
    """What a process says, line by line; the last is {"timeout": ...} where it took too long."""
    process = _process(source, *options)
    until = time.monotonic() + limit
    assert process.stdout is not None
    import select

    try:
        while True:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                yield {"timeout": limit}
                return
            line = process.stdout.readline()
            if not line:
                if process.wait() != 0:
                    yield {"crash": process.returncode}
                return
            yield json.loads(line)
    finally:
        process.kill()
        process.wait()


def _copy(source: pathlib.Path, mutant: Mutant, into: pathlib.Path) -> pathlib.Path:
    shutil.copytree(source / "relpos", into / "relpos", ignore=shutil.ignore_patterns("__pycache__"))
    path = into / mutant.path
    text = path.read_text()
    path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
    return into


def _judge(source: pathlib.Path, mutant: Mutant, calls: int, limit: float, skip: str) -> tuple[str, str]:
    """What became of a mutant, and why."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(source, mutant, pathlib.Path(folder))
        seed = -1
        for told in _told(copy, "--work", f"0:{calls}", "--skip", skip, limit=limit):
            if "timeout" in told:
                return "killed", f"hangs at seed {seed + 1}"
            if "crash" in told:
                return "killed", f"ends the process at seed {seed + 1}"
            seed = told.get("seed", seed)
            if told.get("failures"):
                engine, wrong = next(iter(told["failures"].items()))
                return "killed", f"seed {seed}, {engine}: {wrong.strip().splitlines()[-1][:90]}"
        both = (
            _told(each, "--work", f"0:{calls // 4}", "--watch", "--keep-on", "--skip", skip, limit=2 * limit)
            for each in (source, copy)
        )
        idle, rounded, alike, says = "", -1, True, False
        for mine, theirs in zip(*both, strict=False):
            where = _first_other(mine, theirs, "returned")
            if where:
                return "speed", f"cuts the work otherwise from seed {mine['seed']} on ({where})"
            if rounded < 0 and mine.get("results") != theirs.get("results"):
                rounded = mine["seed"]
            idle = idle or _first_other(mine, theirs, "fractions")
            own = [x for x in mine.get("fractions", []) if x.split()[0] == mutant.function]
            alike = alike and own == [x for x in theirs.get("fractions", []) if x.split()[0] == mutant.function]
            says = says or any(x.split()[1] != NOTHING for x in own)
        if rounded >= 0 and alike and says:
            return "speed", f"{mutant.function} returns the same numbers, which lie elsewhere from seed {rounded} on"
        if rounded >= 0:
            return "survived", f"seed {rounded} rounds otherwise, and no call shows an error"
        if idle:
            return "idle", f"every result is the same bit for bit, though {idle} returns other numbers"
    return "survived", "no call shows it"


def _first_other(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> str:
    """The first function that returned something else; "" where none did."""
    a, b = mine.get(name, []), theirs.get(name, [])
    if a == b:
        return ""
    return next((x.split()[0] for x, y in zip(a, b, strict=False) if x != y), "another number of calls")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are taken")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--calls", type=int, default=2000, help="calls of the fuzzer for each at most")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each at most")
    parser.add_argument("--list", action="store_true", help="say only which they are")
    for hidden in ("--work", "--skip"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    for hidden in ("--watch", "--lines", "--keep-on"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        _work(given)
        return 0
    source = ROOT / "src"
    *_, last = _told(source, "--work", f"0:{COVERING}", "--lines", "--keep-on", limit=given.limit)
    run = {(str(pathlib.Path(path).relative_to(source)), line) for path, line in last["lines"]}
    every = mutants(source)
    reached = [mutant for mutant in every if (mutant.path, mutant.line) in run]
    print(f"{len(every):,} mutants, {len(reached):,} of them on lines that {COVERING} calls run")
    failing = ""
    if not given.list:
        unchanged = _told(source, "--work", f"0:{given.calls}", "--keep-on", limit=given.limit)
        failing = ",".join(str(told["seed"]) for told in unchanged if told.get("failures"))
        print(
            f"unchanged, the code fails on {len(failing.split(',')) if failing else 'none'} of {given.calls:,} calls",
            flush=True,
        )
    random.Random(given.seed).shuffle(reached)
    verdicts = {"killed": 0, "survived": 0, "speed": 0, "idle": 0}
    for mutant in reached:
        if verdicts["killed"] + verdicts["survived"] == given.count:
            break
        if given.list:
            print(mutant)
            verdicts["killed"] += 1
            continue
        verdict, why = _judge(source, mutant, given.calls, given.limit, failing)
        verdicts[verdict] += 1
        print(f"{verdict:9} {mutant}\n          {why}", flush=True)
    if not given.list:
        besides = f"{verdicts['speed']} change speed alone, {verdicts['idle']} change nothing"
        print(f"{verdicts['killed']} of {verdicts['killed'] + verdicts['survived']} killed; besides, {besides}")
    return 0 if verdicts["survived"] <= given.count // 20 else 1


if __name__ == "__main__":
    sys.exit(main())
