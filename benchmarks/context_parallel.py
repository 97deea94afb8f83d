"""Attention of one long sequence over ranks, against one process: memory of a rank, and the time of a step.

    python benchmarks/context_parallel.py [--ranks 2] [--tokens 16384] [--method ring] [--layout zigzag] [--no-time]

A causal T5 bias that learns, 8 heads of 64, float32; forward and backward. Memory is the most bytes of tensors at once,
as PyTorch's profiler counts them, inputs, output and all gradients included: that of a rank, over one process's divided
by the ranks. Time: ranks of one thread each against one process of as many threads, in turns, the median of a few
rounds. `--out FILE.json` writes all figures.
Ranks are processes over gloo on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import relpos
from relpos.parallel import average_gradients, context_attention

HEADS, WIDTH = 8, 64


def make_step(tokens: int, method: str, layout: Any) -> Callable[[], None]:
    """A training step of attention, of one process or of this rank."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    bias, line = relpos.T5Bias(HEADS, bidirectional=False), relpos.Sequence(tokens)

    def step() -> None:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, tokens // size, WIDTH, requires_grad=True) for _ in range(3))
        options: dict[str, Any] = {"position": bias, "queries": line, "mask": "causal"}
        if size == 1:
            out: Tensor = relpos.attention(q, k, v, **options)
        else:
            mesh = dist.group.WORLD
            assert mesh is not None
            out = context_attention(q, k, v, mesh=mesh, method=method, layout=layout, **options)  # type: ignore[arg-type]
        out.backward(torch.randn_like(out))
        if size > 1:
            assert mesh is not None
            average_gradients(bias, mesh)

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes of tensors that a step holds at once."""
    step()  # what is cached on lines is made once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def serve(given: argparse.Namespace) -> None:
    """One process: answers each line of its input, `memory` or `time`, with a number."""
    torch.set_num_threads(given.threads)
    if given.world > 1:
        dist.init_process_group("gloo", init_method=given.at, rank=given.rank, world_size=given.world)
    step = make_step(given.tokens, given.method, given.layout)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(peak_bytes(step), flush=True)
            continue
        if given.world > 1:
            dist.barrier()
        begun = time.perf_counter()
        step()
        if given.world > 1:
            dist.barrier()
        print(time.perf_counter() - begun, flush=True)


def start(given: argparse.Namespace, world: int) -> list[subprocess.Popen[str]]:
    """The processes of a world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    threads = 1 if world > 1 else given.ranks
    command = [
        sys.executable, __file__, "--serve", "--at", at, "--world", str(world), "--threads", str(threads),
        "--tokens", str(given.tokens), "--method", given.method, "--layout", given.layout,
    ]  # fmt: skip
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        for rank in range(world)
    ]  # fmt: skip


def ask(world: list[subprocess.Popen[str]], what: str) -> list[float]:
    """The answer of each process."""
    for one in world:
        assert one.stdin is not None
        print(what, file=one.stdin, flush=True)
    answers = []
    for one in world:
        assert one.stdout is not None
        answers.append(float(one.stdout.readline()))
    return answers


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--method", default="ring")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--out", type=Path)
    for name in ("--rank", "--world", "--threads"):
        parser.add_argument(name, type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given)
        return
    one, many = start(given, 1), start(given, given.ranks)
    whole, share = ask(one, "memory")[0], max(ask(many, "memory"))
    ratio = share / (whole / given.ranks)
    found: dict[str, Any] = {
        "ranks": given.ranks, "tokens": given.tokens, "method": given.method, "layout": given.layout,
        "memory": {"one_mib": whole / 2**20, "rank_mib": share / 2**20, "ratio": round(ratio, 3)},
        "torch": torch.__version__,
    }  # fmt: skip
    print(f"memory: one process {whole / 2**20:.1f} MiB, a rank {share / 2**20:.1f} MiB, {ratio:.2f} of its part")
    if not given.no_time:
        rounds = [(ask(one, "time")[0], max(ask(many, "time"))) for _ in range(given.rounds)]
        ratios = sorted(theirs / own for own, theirs in rounds)
        found["time"] = {"rounds_s": rounds, "ratio": round(statistics.median(ratios), 3)}
        print(f"time of a step: {statistics.median(ratios):.2f} of one process's ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    for process in (*one, *many):
        process.communicate()
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
