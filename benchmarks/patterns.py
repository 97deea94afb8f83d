"""How time and memory of attention under each pattern grow with the tokens, to `benchmarks/results/patterns-cpu.json`.

    python benchmarks/patterns.py [--threads 2] [--repeats 5] [--lengths 2048,4096,8192,16384] [--only local,windows]
                                  [--into DIR] [--force]

A step is a forward and a backward of `relpos.attention(backend="auto")`, 8 heads of 64 in float32, the position's terms
made anew in each. Every pattern is first compared with the reference engine at 512 tokens, output and all gradients,
and is not timed where they differ. Each pattern and length then has a process of its own, which runs it in turn with
PyTorch's dense attention without mask or position, so that the ratio compares neighbours in time. The exponent is the
slope of a straight line through the logarithms, of median times, of peak memory above the inputs, and of the pairs that
the pattern allows: a pattern whose cost follows its pairs has the same slope for all, and 1 is linear.

It took eleven minutes on two cores, which it wants for itself. Dense attention is run up to 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import relpos
from relpos.bench.measure import interleaved, quartiles
from relpos.bench.run import fingerprint
from relpos.comparison.memory import PeakMemory
from relpos.comparison.settings import environment
from relpos.core import Coordinates, Mask
from relpos.patterns import big_bird, block_sparse, dilated, fixed, local, longformer, windows
from relpos.position import Mechanism

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 4096, 8192, 16384)
HEADS, WIDTH = 8, 64
CHECKED, TINY = 512, 256
LONG = 8192
"""Tokens from which fewer rounds count, and up to which dense attention is run beside."""


def grid(n: int) -> relpos.Grid:
    """The most square grid of a power of two."""
    rows = 2 ** ((n.bit_length() - 1) // 2)
    return relpos.Grid(rows, n // rows)


def band(n: int) -> Mask:
    """Blocks of 64 and their two neighbours on either side."""
    numbers = torch.arange(-(-n // 64))
    return block_sparse((numbers[:, None] - numbers).abs() <= 2, 64)


def table(n: int) -> Mechanism:
    """A learned bias of every offset on a grid."""
    return relpos.RelativePositionBias(HEADS, grid(n).sizes)  # type: ignore[arg-type]


def t5(n: int) -> Mechanism:
    """T5's buckets."""
    return relpos.T5Bias(HEADS)


Pattern = tuple[Callable[[int], Mask], Callable[[int], Mechanism] | None, Callable[[int], Coordinates]]
PATTERNS: dict[str, Pattern] = {
    "local 257": (lambda n: local(257), None, relpos.Sequence),
    "local 257, T5": (lambda n: local(257), t5, relpos.Sequence),
    "local 256, causal": (lambda n: local(256, causal=True), None, relpos.Sequence),
    "local 256, causal, T5": (lambda n: local(256, causal=True), t5, relpos.Sequence),
    "dilated 65 by 4, T5": (lambda n: dilated(n, 65, 4), t5, relpos.Sequence),
    "fixed 128, causal, T5": (lambda n: fixed(n, 128, causal=True), t5, relpos.Sequence),
    "Longformer 257 and 16, T5": (lambda n: longformer(n, 257, list(range(16))), t5, relpos.Sequence),
    "blocks of 64, a band, T5": (band, t5, relpos.Sequence),
    "BigBird 64, a head, T5": (lambda n: big_bird(n, 64, heads=HEADS), t5, relpos.Sequence),
    "windows 8, table": (lambda n: windows(grid(n), 8), table, grid),
    "shifted windows 8, table": (lambda n: windows(grid(n), 8, 4), table, grid),
}


class Step:
    """Forward and backward of one pattern at one length."""

    def __init__(self, name: str, n: int, backend: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        make, position, coordinates = PATTERNS[name]
        self.mask, self.coordinates, self.backend = make(n), coordinates(n), backend
        self.position = None if position is None else position(n).to(dtype)
        self.qkv = [torch.randn(1, HEADS, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
        self.upstream = torch.randn(1, HEADS, n, WIDTH, dtype=dtype)

    @property
    def given(self) -> dict[str, Any]:
        """What the call takes beside q, k and v."""
        if self.position is None:
            return {"mask": self.mask}
        return {"mask": self.mask, "position": self.position, "queries": self.coordinates}

    def results(self) -> list[Tensor]:
        """The output and all gradients."""
        out = relpos.attention(*self.qkv, backend=self.backend, **self.given)
        assert isinstance(out, Tensor)
        leaves = [*self.qkv, *(() if self.position is None else self.position.parameters())]
        return [out, *torch.autograd.grad(out, leaves, self.upstream)]

    def __call__(self) -> None:
        """One step."""
        self.results()

    def dense(self) -> None:
        """One of PyTorch's attention to all, which has no position."""
        q, k, v = self.qkv
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, self.qkv, self.upstream)


def check(name: str) -> str | None:
    """What is wrong with `streaming` and `auto` at a few tokens, or None: against the reference in float64."""
    exact = Step(name, CHECKED, "reference", torch.float64).results()
    for backend in ("streaming", "auto"):
        found = Step(name, CHECKED, backend, torch.float64).results()
        for number, (mine, wanted) in enumerate(zip(found, exact, strict=True)):
            if not torch.allclose(mine, wanted, rtol=1e-9, atol=1e-9):
                return f"{backend}: result {number} is {float((mine - wanted).abs().max()):.2g} off"
    return None


def pairs(mask: Mask, n: int) -> int:
    """The pairs that are allowed, in the mean of the heads."""
    at_once = 256
    blocks = (mask.pairs(torch.arange(start, min(start + at_once, n)), slice(0, n)) for start in range(0, n, at_once))
    return int(sum(float(block.sum()) / block.shape[1] for block in blocks))


def measure(name: str, n: int, threads: int, repeats: int) -> dict[str, Any]:
    """One pattern at one length. Memory comes first, in a process that did nothing bigger before."""
    torch.set_num_threads(threads)
    Step(name, TINY, "streaming")()
    step = Step(name, n, "auto")
    backend = relpos.explain(*step.qkv, **step.given).backend
    memory = PeakMemory(torch.device("cpu"))
    step()
    extra = memory.mib()
    rounds = min(repeats, 3) if n >= LONG else repeats
    works: dict[str, Any] = {"pattern": step, **({"dense": step.dense} if n <= LONG else {})}
    times, failed = interleaved(works, 1, rounds)
    if failed:
        raise RuntimeError(f"{name} at {n}: {failed}")
    dense = times.get("dense")
    ratios = None if dense is None else [a / b for a, b in zip(times["pattern"], dense, strict=True)]
    return {
        "pattern": name,
        "tokens": n,
        "backend": backend,
        "pairs": pairs(step.mask, n),
        "ms": quartiles(times["pattern"], 2),
        "rounds_ms": [round(x, 3) for x in times["pattern"]],
        "dense_ms": None if dense is None else quartiles(dense, 2),
        "ratio": None if ratios is None else quartiles(ratios, 4),
        "extra_mib": round(extra, 1),
    }


def slope(entries: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float | None:
    """The exponent of the tokens with which something grows."""
    if len(entries) < 2 or not all(of(entry) > 0 for entry in entries):
        return None
    x = torch.tensor([math.log(entry["tokens"]) for entry in entries], dtype=torch.float64)
    y = torch.tensor([math.log(of(entry)) for entry in entries], dtype=torch.float64)
    x = x - x.mean()
    return round(float((x * y).sum() / x.square().sum()), 3)


def fits(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The exponents of each pattern."""
    of: dict[str, Callable[[dict[str, Any]], float]] = {
        "time": lambda entry: entry["ms"]["median"],
        "memory": lambda entry: entry["extra_mib"],
        "pairs": lambda entry: entry["pairs"],
    }
    names = dict.fromkeys(entry["pattern"] for entry in entries)
    own = {name: [entry for entry in entries if entry["pattern"] == name] for name in names}
    found = {name: {what: slope(some, get) for what, get in of.items()} for name, some in own.items()}
    for name, some in own.items():
        beside = [entry for entry in some if entry["dense_ms"] is not None]
        found[name]["dense time"] = slope(beside, lambda entry: float(entry["dense_ms"]["median"]))
    return found


def alone(name: str, n: int, threads: int, repeats: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    call = [sys.executable, __file__, "--one", name, str(n), "--threads", str(threads), "--repeats", str(repeats)]
    found: dict[str, Any] = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    """Check, measure, fit, write and print."""
    parser = argparse.ArgumentParser(description="how attention under each pattern grows with the tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, at most 3 of long calls")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="powers of two, joined by commas")
    parser.add_argument("--only", default="", help="beginnings of patterns' names, joined by commas; all")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--force", action="store_true", help="overwrite the results that are there")
    parser.add_argument("--one", nargs=2, metavar=("PATTERN", "N"), help="measure this alone and print it as JSON")
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measure(asked.one[0], int(asked.one[1]), asked.threads, asked.repeats)))
        return
    path = asked.into / "patterns-cpu.json"
    if path.exists() and not asked.force:
        print(f"expected no results at {path}; got some. Move them, or pass --force.", file=sys.stderr)
        raise SystemExit(2)
    names = [name for name in PATTERNS if name.startswith(tuple(asked.only.split(",")))]
    entries, wrong = [], {}
    for name in names:
        fault = check(name)
        if fault is not None:
            wrong[name] = fault
            print(f"{name}: not timed, {fault}")
            continue
        for n in map(int, asked.lengths.split(",")):
            entry = alone(name, n, asked.threads, asked.repeats)
            entries.append(entry)
            print(
                f"{name:28}{n:7} tokens {entry['ms']['median']:10.1f} ms {entry['extra_mib']:8.1f} MiB, "
                f"{format(entry['ratio']['median'], '.3f') if entry['ratio'] else '-':>6} of dense, {entry['backend']}",
                flush=True,
            )
    found = fits(entries)
    print(f"\n{'exponent of the tokens':28}{'time':>8}{'memory':>8}{'pairs':>8}{'dense':>8}")
    for name, exponents in found.items():
        print(f"{name:28}" + "".join(f"{'-' if x is None else format(x, '.2f'):>8}" for x in exponents.values()))
    settings = {"threads": asked.threads, "repeats": asked.repeats, "heads": HEADS, "width": WIDTH, "dtype": "float32"}
    result = {
        "environment": environment("cpu"), "settings": settings, "source": fingerprint(), "wrong": wrong,
        "exponents": found, "entries": entries,
    }  # fmt: skip
    asked.into.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
