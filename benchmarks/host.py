"""What Python costs around a call on a GPU, without one: kernels return at once, everything else is done.

    python benchmarks/host.py [--rounds 7]

A call of 8 x 8 heads x 64 tokens through `backend="triton"`, its terms ready and through T5Bias, beside a floor: a bare
`torch.autograd.Function` that saves as many tensors, makes the same outputs and asks as many kernels. Tensors lie on
the CPU. Writes `benchmarks/results/host.json`. On a machine with a GPU `on_gpu.py --parts short` times the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the engine then takes tensors on the CPU

import torch
from torch import Tensor

from relpos import LineBias, Sequence, T5Bias, attention, lines
from relpos.bench.run import surroundings

RESULT = Path(__file__).parent / "results" / "host.json"
BATCH, HEADS, TOKENS, WIDTH = 8, 8, 64, 64
LAUNCHES = {"forward": 1, "backward": 4}
"""Kernels of a call without a mask: the forward; rows, queries, keys and pairs of the table."""


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        pass


class Floor(torch.autograd.Function):
    """What the least call does: its outputs, what it saves, its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        Idle()[0](q, k, v, values)
        ctx.save_for_backward(q, k, v, values, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        *tensors, _, _ = ctx.saved_tensors
        for _ in range(LAUNCHES["backward"]):
            Idle()[0](*tensors)
        return tuple(torch.empty_like(x) for x in tensors)


def microseconds(work: Callable[[], object], rounds: int, count: int = 100) -> float:
    """The least of several rounds, a call."""
    for _ in range(20):
        work()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            work()
        found.append((time.perf_counter() - began) / count * 1e6)
    return min(found)


def works() -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Forms of the call, and whose gradients a step wants."""
    where = Sequence(TOKENS)
    line, mechanism = lines(where), T5Bias(HEADS)
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    values = torch.randn(HEADS, line.length, requires_grad=True)
    given: dict[str, Any] = {"backend": "triton"}
    return {
        "floor": (lambda: Floor.apply(q, k, v, values)[0], [q, k, v, values]),
        "terms ready": (lambda: _out(attention(q, k, v, position=LineBias(values, line), **given)), [q, k, v, values]),
        "T5Bias": (
            lambda: _out(attention(q, k, v, position=mechanism, queries=where, **given)),
            [q, k, v, *mechanism.parameters()],
        ),
    }


def _out(output: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def main() -> None:
    """Time every form, forward and step, in turns."""
    parser = argparse.ArgumentParser(description="what Python costs around a call on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    from relpos.engines.triton import kernels

    for name in ("forward", "backward_rows", "backward_queries", "backward_keys", "backward_table", "backward_pairs"):
        setattr(kernels, name, Idle())
    upstream = torch.ones(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    found: dict[str, dict[str, float]] = {}
    for name, (forward, leaves) in works().items():

        def step(forward: Callable[[], Tensor] = forward, leaves: list[Tensor] = leaves) -> object:
            return torch.autograd.grad(forward(), leaves, upstream)

        with torch.no_grad():
            alone = microseconds(forward, asked.rounds)
        found[name] = {"forward_us": round(alone, 1), "step_us": round(microseconds(step, asked.rounds), 1)}
    for name, times in found.items():
        ratios = {what: round(time / found["floor"][what], 2) for what, time in times.items()}
        print(f"{name:12} forward {times['forward_us']:7.1f} us ({ratios['forward_us']} of the floor), "
              f"step {times['step_us']:7.1f} us ({ratios['step_us']})")  # fmt: skip
    RESULT.write_text(json.dumps({"environment": surroundings("cpu"), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
