"""Every Triton kernel once on a small call, for tools that watch memory. A script, not a test:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/attention/smallest_kernels.py

Without a GPU, under TRITON_INTERPRET=1, it shows that the calls themselves are sound.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import relpos
from relpos import Grid, LineBias, Mask, Sequence, Sinks, attention, lines

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def calls() -> Iterator[tuple[str, relpos.Terms, Mask | None, int, int]]:
    """A name, what the position says, the mask, query heads and key heads."""
    for name, where in (("odd length", Sequence(33, prefix=1)), ("grid", Grid(3, 11, prefix=1))):
        line = lines(where, device=DEVICE)
        values = torch.randn(2, line.length, device=DEVICE, requires_grad=True)
        yield name, relpos.Terms(LineBias(values, line)), None, 2, 2
        sinks = Sinks(torch.randn(2, device=DEVICE, requires_grad=True))
        yield f"{name}, causal, a sink, grouped keys", LineBias(values, line) + sinks, Mask.causal(), 2, 1
        packed = Mask.packed(torch.arange(34, device=DEVICE) // 9) & Mask.causal()
        yield f"{name}, packed", relpos.Terms(LineBias(values, line)), packed, 2, 2


def main() -> int:
    torch.manual_seed(0)
    for name, terms, mask, heads, groups in calls():
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (
                torch.randn(1, count, 34, 24, device=DEVICE, dtype=dtype, requires_grad=True)
                for count in (heads, groups, groups)
            )
            output = attention(q, k, v, position=terms, mask=mask, dropout=0.1, backend="triton")
            assert isinstance(output, torch.Tensor)
            output.float().square().sum().backward()
            assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
            print(f"ok      {name}, {dtype}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
