"""Every Triton kernel on small calls, for tools that watch memory. A script, not a test:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/engines/smallest_kernels.py

With --half in bfloat16 alone, which compiles in a third of the time. Without a GPU, under TRITON_INTERPRET=1, it shows
that the calls themselves are sound. Its exit status is the number of kernels that have not run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

import relpos
from relpos import Grid, LineBias, LineVectors, LowRank, Mask, RotaryEmbedding, Sequence, Sinks, attention, lines

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
limits = importlib.import_module("relpos.engines.triton.limits")
kernels = importlib.import_module("relpos.engines.triton.kernels")
table_kernels = importlib.import_module("relpos.engines.triton.table_kernels")
prefix_kernels = importlib.import_module("relpos.engines.triton.prefix_kernels")
window_kernels = importlib.import_module("relpos.engines.triton.window_kernels")
vector_kernels = importlib.import_module("relpos.engines.triton.vector_kernels")
plans = importlib.import_module("relpos.engines.plan").PLANS
KERNELS = {
    kernels: ("forward", "backward_rows", "backward_keys", "backward_queries", "turn"),
    table_kernels: ("padded", "backward_table", "backward_pairs", "sum_of_pairs"),
    vector_kernels: ("weights", "sum_by_column"),
    prefix_kernels: ("backward_prefix",),
    window_kernels: ("backward_windows",),
}
"""By the module that has them."""


class Counted:
    """A kernel, and how often it was launched."""

    def __init__(self, module: Any, name: str) -> None:
        self.kernel, self.launches = getattr(module, name), 0
        setattr(module, name, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


def calls() -> Iterator[tuple[str, relpos.Terms, Mask | None, int, int, int]]:
    """A name, what the position says, the mask, tokens, query heads and key heads."""
    for name, where in (("odd length", Sequence(33, prefix=1)), ("grid", Grid(3, 11, prefix=1))):
        line = lines(where, device=DEVICE)
        values = torch.randn(2, line.length, device=DEVICE, requires_grad=True)
        turned = RotaryEmbedding(24, rotary_dim=20).to(DEVICE).terms(Sequence(34))
        yield f"{name}, turned", LineBias(values, line) + turned, None, 34, 2, 2
        sinks = Sinks(torch.randn(2, device=DEVICE, requires_grad=True))
        yield f"{name}, causal, a sink, grouped keys", LineBias(values, line) + sinks, Mask.causal(), 34, 2, 1
        sides = torch.randn(2, 2, 34, 3, device=DEVICE, requires_grad=True)
        yield f"{name}, low rank, causal", LineBias(values, line) + LowRank(*sides), Mask.causal(), 34, 2, 1
        packed = Mask.packed(torch.arange(34, device=DEVICE) // 9) & Mask.causal()
        yield f"{name}, packed", relpos.Terms(LineBias(values, line)), packed, 34, 2, 2
    line = lines(Sequence(34), device=DEVICE)
    clipped = (torch.arange(line.length, device=DEVICE) - 33).clamp(-4, 4) + 4
    few, every = (torch.randn(2, count, 24, device=DEVICE, requires_grad=True) for count in (9, line.length))
    sides = (LineVectors(few, clipped, line, side) for side in ("query", "key", "value"))
    yield "vectors, causal", relpos.Terms(*sides, LineVectors(every, None, line, "query")), Mask.causal(), 34, 2, 1
    window = lines(Grid(5, 5), device=DEVICE)
    values = torch.randn(2, window.length, device=DEVICE, requires_grad=True)
    yield "windows of one tile", relpos.Terms(LineBias(values, window)), None, 25, 2, 2


def main() -> int:
    torch.manual_seed(0)
    counted = {name: Counted(module, name) for module, names in KERNELS.items() for name in names}
    wide = torch.bfloat16 if "--half" in sys.argv else torch.float32
    for few, dtype in dict.fromkeys([(0, wide), (0, torch.bfloat16), (256, wide)]):
        limits.FEW = few
        plans.clear()  # they were made with another limit
        for name, terms, mask, tokens, heads, groups in calls():
            q, k, v = (
                torch.randn(1, count, tokens, 24, device=DEVICE, dtype=dtype, requires_grad=True)
                for count in (heads, groups, groups)
            )
            output = attention(q, k, v, position=terms, mask=mask, dropout=0.1, backend="triton")
            assert isinstance(output, torch.Tensor)
            output.float().square().sum().backward()
            assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
            print(f"ok      {name}, {dtype}{', by pairs' if few else ''}", flush=True)
    left = [name for name, one in counted.items() if not one.launches]
    print(f"not run: {', '.join(left)}" if left else "every kernel has run")
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
