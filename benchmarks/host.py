"""What Python costs around a call on a GPU, without one: kernels return at once, everything else is done.

    python benchmarks/host.py [--rounds 100] [--profile FORM]

A call of 8 x 8 heads x 64 tokens through `backend="triton"`, its terms ready and through T5Bias, beside a floor: a bare
`torch.autograd.Function` that saves the same tensors, makes the same ones and asks as many kernels. Tensors lie on the
CPU. Writes `benchmarks/results/host.json`. On a machine with a GPU `on_gpu.py --parts short` times the calls.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the engine then takes tensors on the CPU

import torch
from torch import Tensor

from relpos import LineBias, Sequence, T5Bias, Terms, attention, lines
from relpos.bench.run import surroundings

RESULT = Path(__file__).parent / "results" / "host.json"
BATCH, HEADS, TOKENS, WIDTH = 8, 8, 64, 64
LAUNCHES = {"forward": 1, "backward": 5}
"""Kernels of a call without a mask: the forward; rows, queries, keys, pairs of the table, and their sum."""
PADDING = 768
"""Numbers beside a head's table, so that no kernel reads outside."""


class Idle:
    """A kernel that does nothing, and is compiled at once: later calls launch it by the handle that a first one gets.

    Args:
        arg_names: the names of its arguments.
    """

    def __init__(self, arg_names: tuple[str, ...] = ()) -> None:
        self.arg_names = arg_names

    def __getitem__(self, grid: Any) -> Callable[..., Idle]:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> Idle:
        return self


class Floor(torch.autograd.Function):
    """What the least call does: its outputs, what it saves, its gradients, and the numbers in between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, values: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        table = values.new_zeros(HEADS, values.shape[1] + PADDING)
        torch.div(values, 0.125, out=table[:, PADDING // 2 : -PADDING // 2])
        for _ in range(LAUNCHES["forward"]):
            Idle()[0](out, lse, q, k, v, table)
        ctx.save_for_backward(q, k, v, values, line, out, lse)
        ctx.table = table
        return out, lse

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, values, _, _, lse = ctx.saved_tensors
        between = lse.new_empty(2, BATCH, HEADS, 2 * TOKENS), lse.new_empty(BATCH, HEADS, TOKENS, TOKENS)
        found = tuple(torch.empty_like(x) for x in (q, k, v, values))
        for _ in range(LAUNCHES["backward"]):
            Idle()[0](*found, *between, ctx.table)
        return *found, None


def replace_kernels() -> None:
    """Put idle kernels where those are that a call without a mask launches."""
    from relpos.engines.triton import handles, kernels, table_kernels

    handles.CompiledKernel = Idle  # type: ignore[assignment,misc]
    for name in ("forward", "backward_rows", "backward_queries", "backward_keys"):
        setattr(kernels, name, Idle(getattr(kernels, name).arg_names))
    for name in ("padded", "backward_pairs", "sum_of_pairs"):
        setattr(table_kernels, name, Idle(getattr(table_kernels, name).arg_names))


def microseconds(works: dict[str, Callable[[], object]], rounds: int, count: int = 20) -> dict[str, float]:
    """Of the processor, a call of each, the least of many short rounds in turns: what else a machine does falls on all
    alike, and passes over some rounds of each."""
    least = dict.fromkeys(works, float("inf"))
    for _ in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            for _ in range(count):
                work()
            least[name] = min(least[name], (time.process_time() - began) / count * 1e6)
    return least


def works() -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Forms of the call, and whose gradients a step wants."""
    where = Sequence(TOKENS)
    line, mechanism = lines(where), T5Bias(HEADS)
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    values = torch.randn(HEADS, line.length, requires_grad=True)
    terms = Terms(LineBias(values, line))
    given: dict[str, Any] = {"backend": "triton"}
    return {
        "floor": (lambda: Floor.apply(q, k, v, values, line.query)[0], [q, k, v, values]),
        "terms ready": (lambda: _out(attention(q, k, v, position=terms, **given)), [q, k, v, values]),
        "T5Bias": (
            lambda: _out(attention(q, k, v, position=mechanism, queries=where, **given)),
            [q, k, v, *mechanism.parameters()],
        ),
    }


def print_profile(work: Callable[[], object], count: int = 2000) -> None:
    """Python's functions by the time that a number of calls spend in each."""
    for _ in range(20):
        work()
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [work() for _ in range(count)])
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def _out(output: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def main() -> None:
    """Time every form, forward and step, in turns."""
    parser = argparse.ArgumentParser(description="what Python costs around a call on a GPU")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--profile",
        choices=("floor", "terms ready", "T5Bias"),
        help="print where a step of this form spends its time, and no more",
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    replace_kernels()
    upstream = torch.ones(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    forms = works()

    def step_of(name: str) -> Callable[[], object]:
        forward, leaves = forms[name]
        return lambda: torch.autograd.grad(forward(), leaves, upstream)

    if asked.profile is not None:
        print_profile(step_of(asked.profile))
        return
    with torch.no_grad():
        alone = microseconds({name: forward for name, (forward, _) in forms.items()}, asked.rounds)
    steps = microseconds({name: step_of(name) for name in forms}, asked.rounds)
    found = {name: {"forward_us": round(alone[name], 1), "step_us": round(steps[name], 1)} for name in forms}
    for name, times in found.items():
        ratios = {what: round(time / found["floor"][what], 2) for what, time in times.items()}
        print(f"{name:12} forward {times['forward_us']:7.1f} us ({ratios['forward_us']} of the floor), "
              f"step {times['step_us']:7.1f} us ({ratios['step_us']})")  # fmt: skip
    RESULT.write_text(json.dumps({"environment": surroundings("cpu"), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
