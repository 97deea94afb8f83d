"""Two trees of relpos against each other: is the change slower, and how sure is that?

    git worktree add ../before COMMIT
    python benchmarks/paired.py ../before [.] [--cases target] [--pairs 6] [--seconds 10] [--threads 2] [--into FILE]

Each tree has a process, which holds a case's inputs. The two compute in turn, a short call as often as makes twenty
milliseconds, the order turning from round to round, so that both sides of a ratio meet the same machine. A process may
be fast or slow for as long as it lives, so several pairs of them do the same, one after the other. Printed are the
median of the pairs' medians of after / before and its 95% bounds, from the order of these alone (no assumption on how
times are distributed; of six pairs the least and the largest); and each side's peak memory above its inputs, of a
process for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

SHORTEST_MS, FEWEST = 20.0, 8
FEWEST_PAIRS = 6


def worker() -> None:
    """Answer lines of JSON: `build` a case, `run` it some times, `peak` memory of a run."""
    import torch

    from relpos.bench.cases import Case
    from relpos.bench.inputs import make
    from relpos.bench.modules import peers_of

    memory_py = Path(__file__).parents[1] / "src/relpos/comparison/memory.py"  # ours, for both trees
    peak_memory = runpy.run_path(str(memory_py))["PeakMemory"]
    work: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: object = None
        match asked["do"]:
            case "threads":
                torch.set_num_threads(asked["threads"])
            case "build":
                case_of = Case(**(asked["case"] | {"sizes": tuple(asked["case"]["sizes"])}))
                (peer,) = (peer for peer in peers_of(case_of, ("auto",)) if peer.name == "relpos-auto")
                work = peer.build(make(case_of))
            case "run":
                started = time.perf_counter()
                for _ in range(asked["times"]):
                    work()
                answer = (time.perf_counter() - started) * 1e3
            case "peak":
                memory = peak_memory(torch.device("cpu"))
                work()
                answer = memory.mib()
        print(json.dumps(answer), flush=True)


class Side:
    """A tree's process."""

    def __init__(self, tree: Path, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.ask(do="threads", threads=threads)

    def ask(self, **what: object) -> Any:
        """Send a line and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with {self.process.wait()} at {what}")
        return json.loads(answer)

    def end(self) -> None:
        """Let the process go."""
        self.process.kill()
        self.process.communicate()


def bounds(ratios: list[float]) -> tuple[float, float]:
    """95% bounds of the median: the order statistics that binomial signs put it between."""
    from scipy.stats import binom

    ordered = sorted(ratios)
    low = int(binom.ppf(0.025, len(ordered), 0.5))
    return ordered[max(0, low - 1)], ordered[min(len(ordered) - 1, len(ordered) - low)]


def compare(trees: list[Path], case: dict[str, Any], threads: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Ratios of one case, of so many pairs of processes."""
    medians, rounds = list[float](), 0
    for _ in range(pairs):
        sides = Side(trees[0], threads), Side(trees[1], threads)
        try:
            ratios = of_pair(sides, case, seconds)
        finally:
            for side in sides:
                side.end()
        medians.append(statistics.median(ratios))
        rounds += len(ratios)
    low, high = bounds(medians)
    return {"pairs": medians, "rounds": rounds, "ratio": statistics.median(medians), "low": low, "high": high}


def of_pair(sides: tuple[Side, Side], case: dict[str, Any], seconds: float) -> list[float]:
    """The ratios of two processes."""
    for side in sides:
        side.ask(do="build", case=case)
        once = [side.ask(do="run", times=1) for _ in range(3)][-1]
    times = max(1, round(SHORTEST_MS / once))
    ratios: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(ratios) < FEWEST:
        order = (0, 1) if len(ratios) % 2 else (1, 0)
        took = {number: sides[number].ask(do="run", times=times) for number in order}
        ratios.append(took[1] / took[0])
    return ratios


def peaks(trees: list[Path], case: dict[str, Any], threads: int) -> list[float]:
    """MiB of one run in a fresh process, after a run on few tokens."""
    found = []
    for tree in trees:
        side = Side(tree, threads)
        side.ask(do="build", case=case | {"sizes": [min(8, size) for size in case["sizes"]], "batch": 1})
        side.ask(do="run", times=1)
        side.ask(do="build", case=case)
        found.append(side.ask(do="peak"))
        side.end()
    return found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="a tree of relpos, such as a git worktree")
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--cases", default="target", help="names and families of relpos bench, of the tree after")
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS, help="of processes, for each case")
    parser.add_argument("--seconds", type=float, default=10, help="for each pair")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--into", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs {args.pairs} have no 95% bounds; give {FEWEST_PAIRS} or more")
    trees = [args.before.resolve(), args.after.resolve()]
    from relpos.bench.cases import find_cases
    from relpos.bench.run import surroundings

    rows = []
    for case in find_cases(args.cases):
        usual = {field.name: field.default for field in fields(case)}
        own = {name: x for name, x in asdict(case).items() if x != usual[name]}  # the other tree may know no more
        row = {"case": case.name, **compare(trees, own, args.threads, args.pairs, args.seconds)}
        row["peak_mib"] = peaks(trees, own, args.threads)
        rows.append(row)
        peak = " -> ".join(f"{mib:.0f}" for mib in row["peak_mib"])
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        counts = f"{args.pairs} pairs, {row['rounds']} rounds"
        print(f"{case.name:42} {ratio}  {counts}, peak MiB {peak}", flush=True)
        if args.into is not None:
            names = [subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                                    check=False).stdout.strip() for tree in trees]  # fmt: skip
            made = {"before": names[0], "after": names[1], "threads": args.threads, "machine": surroundings("cpu")}
            args.into.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
