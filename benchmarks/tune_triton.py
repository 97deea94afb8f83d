"""Which tiles suit a GPU: the time of every kernel of the `triton` engine at every size of tile that fits.

    python benchmarks/tune_triton.py [--dtype bfloat16] [--width 64]

It prints a line a kernel that can take the place of one in `SHAPES` of `relpos/engines/triton/launch.py`, with the
time of the tiles that stand there now over the best's. The choice is made here and not at run time, since the size of a
tile decides the order of sums: two runs of one version must agree bit for bit. It compiles several hundred kernels. A
GPU with less shared memory than Hopper's takes the tiles of wider heads and has nothing to choose.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from relpos import LineBias, Sequence, Terms, lines
from relpos.bench.measure import interleaved
from relpos.bench.peers import Workload as Timed
from relpos.engines.call import Call
from relpos.engines.operators import Gradients

TOKENS, HEADS = 8192, 8
KINDS = ("forward", "queries", "keys", "table")
_SIZES, _WARPS, _STAGES = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)


def candidates(kind: str) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns, warps and stages; the table's tiles are square."""
    for rows, columns, warps, stages in itertools.product(_SIZES, _SIZES, _WARPS, _STAGES):
        if kind != "table" or rows == columns:
            yield rows, columns, warps, stages


def kernel_of(kind: str, call: Call) -> Callable[[], list[Tensor]]:
    """What runs one kernel: the forward, or the backward of what that kernel gives."""
    from relpos.engines.triton import passes

    out, lse = passes.forward(call)
    d_out, d_lse = torch.randn_like(out), torch.zeros_like(lse)
    (term,) = call.terms.of(LineBias)
    needed = {"queries": [call.q], "keys": [call.k, call.v], "table": [term.values]}.get(kind)
    if needed is None:
        return lambda: list(passes.forward(call))

    def run() -> list[Tensor]:
        gradients = Gradients(needed)
        passes.backward(call, out, lse, d_out, d_lse, gradients)
        return gradients.finished()

    return run


def tune(kind: str, call: Call, key: tuple[str, str, int], launch: Any) -> str:
    """The line of the best tiles."""
    run, now = kernel_of(kind, call), launch.SHAPES[key]
    exact = [x.double() for x in run()]

    def under(shape: dict[str, int]) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            launch.SHAPES[key] = shape
            return run()[0]

        return forward

    works: dict[str, Timed] = {}
    for numbers in candidates(kind):
        shape = launch._shape(*numbers)
        launch.SHAPES[key] = shape
        try:
            found = [x.double() for x in run()]
        except Exception:  # more shared memory or registers than there are
            continue
        errors = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
        if max(errors) <= 0.02:
            works[", ".join(map(str, numbers))] = Timed(under(shape))
    works["now"] = Timed(under(now))
    milliseconds, _ = interleaved(works, 2, 9, "cuda")
    launch.SHAPES[key] = now
    medians = {name: statistics.median(values) for name, values in milliseconds.items() if values}
    best = min(medians, key=lambda name: medians[name])
    numbers_now = ", ".join(str(now[name]) for name in ("ROWS", "COLUMNS", "num_warps", "num_stages"))
    words = f"  # {medians['now'] / medians[best]:.2f} times as fast as ({numbers_now})"
    return f"    {key!r}: _shape({numbers_now if best == 'now' else best}),{words}"


def main() -> int:
    """Every kernel of the dtypes and widths asked for."""
    parser = argparse.ArgumentParser(description="tiles of the triton engine for this GPU")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--width", type=int, default=None, choices=(64, 128, 256), help="head width; all")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device; got none. Tiles are measured on the GPU that they are for.", file=sys.stderr)
        return 2
    from relpos.engines.triton import launch
    from relpos.engines.triton.limits import HOPPERS, shared_memory

    if shared_memory(torch.device("cuda")) < HOPPERS:
        came = f"{shared_memory(torch.device('cuda')) // 1024} KiB"
        print(f"expected a GPU with 227 KiB of shared memory; got {came}. Use a Hopper.", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), flush=True)
    dtype, precision = getattr(torch, asked.dtype), "full" if asked.dtype == "float32" else "half"
    for width in (64, 128, 256) if asked.width is None else (asked.width,):
        line = lines(Sequence(TOKENS), device=torch.device("cuda"))
        q, k, v = (torch.randn(1, HEADS, TOKENS, width, device="cuda", dtype=dtype) for _ in range(3))
        terms = Terms(LineBias(torch.randn(HEADS, line.length, device="cuda"), line))
        call = Call(q, k, v, terms, None, width**-0.5)
        for kind in KINDS:
            print(tune(kind, call, (kind, precision, width), launch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
