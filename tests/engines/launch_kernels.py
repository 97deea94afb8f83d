"""Launches of compiled kernels without a GPU: a driver that runs nothing tells what it was given. A script.

What a kernel of `handles.py` launches again without asking Triton must be what Triton itself would launch: the same
compiled code and the same arguments, for tensors wherever they begin and gradients with any strides.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from relpos import Grid, LineBias, LineVectors, LowRank, Mask, Sequence, Sinks, Terms, lines
from relpos.core import Rows
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.call import Call
from relpos.engines.operators import Gradients

launch = importlib.import_module("relpos.engines.triton.launch")
limits = importlib.import_module("relpos.engines.triton.limits")
passes = importlib.import_module("relpos.engines.triton.passes")
vector_sets = importlib.import_module("relpos.engines.triton.vector_sets")

Launch = tuple[str, tuple[int, ...], tuple[Any, ...]]
LAUNCHED: list[Launch] = []


class Utilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, *rest: Any) -> tuple[Any, ...]:
        return "module", name, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


class Launcher:
    """What Triton hands a kernel's launch to."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.code = f"{metadata.name} {metadata.hash}"

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        *_, _enter, _exit = rest[:4]
        LAUNCHED.append((self.code, (x, y, z, stream), tuple(map(plain, rest[4:]))))


def plain(x: Any) -> Any:
    """An argument as it can be compared: of a tensor shape, strides and whether 16 divides where it begins."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % 16 == 0
    return tuple(map(plain, x)) if isinstance(x, tuple) else str(x) if isinstance(x, triton.language.dtype) else x


class Driver:
    """A GPU that is none."""

    binary_ext = "cubin"

    def __init__(self) -> None:
        self.utils, self.launcher_cls, self.stream = Utilities(), Launcher, 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def moved(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, one further than where an allocation begins."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def run(launches: Any, call: Call, d_out: torch.Tensor) -> list[Launch]:
    """What is launched by the forward and the backward of a call."""
    LAUNCHED.clear()
    out, lse = passes.forward(call, launches)
    learned = [term.values for term in call.terms.of(LineBias)] + [term.key for term in call.terms.of(LowRank)]
    learned += [term.vectors for term in call.terms.of(LineVectors)]
    learned += [term.table for term in call.terms.of(TableLookup)]
    wanted = Gradients([call.q, call.k, call.v, *learned], "all")
    passes.backward(call, out, lse, d_out, torch.zeros_like(lse), wanted, launches)
    return list(LAUNCHED)


def unfinished(backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
    """In place of what compiles a kernel: nothing runs it, and what tells it from others is known before."""

    def binary(module: Any, metadata: dict[str, Any]) -> bytes:
        sizes = ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")
        metadata |= dict.fromkeys(sizes, 0) | {"global_scratch_align": 1, "profile_scratch_align": 1}
        metadata |= {"name": "kernel", "tensordesc_meta": None}
        return b""

    stages |= {"ttir": lambda module, metadata: module, "cubin": binary}


_WINDOW = Grid(5, 6)
"""One tile, of which one kernel computes the gradients."""


def main() -> int:
    CUDABackend.add_stages = unfinished
    with tempfile.TemporaryDirectory() as folder:  # no one else may find what is kept here
        os.environ["TRITON_CACHE_DIR"] = folder
        return compare()


def compare() -> int:
    torch.set_num_threads(1)
    stand_in = Driver()
    driver.set_active(stand_in)
    # The kernels were imported with what this machine has: nothing.
    launch.shared_memory = lambda device: 227 * 1024
    compared = 0
    cases = (
        (Sequence(33), None, 256, 2**29),
        (Grid(5, 7, prefix=1), Mask.causal(), 16, 2**29),
        (_WINDOW, None, 256, 2**29),
        (Sequence(40), Mask.causal(), 16, 2**15),  # vectors, by heads
    )
    for where, mask, few, workspace in cases:
        limits.FEW, vector_sets.WORKSPACE = few, workspace
        line = lines(where)
        shape = (2, 2, where.count, 24)
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
        low_rank = LowRank(torch.zeros(2, where.count, 3), torch.zeros(2, 1, where.count, 3))
        beside = () if where is _WINDOW else (low_rank, Sinks(torch.zeros(2)))
        bias: Any = LineBias(torch.zeros(2, line.length), line)
        if where is _WINDOW:
            bias = TableLookup(torch.zeros(9, 2), Rows(torch.arange(line.length) % 9, 9), line)
        terms = Terms(bias, *beside)
        if workspace < 2**29:
            few_vectors, index = torch.zeros(2, 2, 9, 24), torch.arange(line.length) % 9
            sides = zip(("query", "value"), few_vectors, strict=True)
            terms = Terms(*(LineVectors(x, index, line, side) for side, x in sides))
        kept = launch.Launches(Call(q, k, v, terms, mask, 0.1))
        tokens_first = torch.zeros(2, where.count, 2, 24, dtype=torch.bfloat16).transpose(1, 2)
        gradients = torch.zeros(shape, dtype=torch.bfloat16), tokens_first
        varied = [*itertools.product((0, 1), (lambda x: x, moved), gradients)]
        for stream, place, d_out in (varied[:1] if workspace < 2**29 else varied) * 2:
            stand_in.stream = stream
            call = Call(place(q), k, place(v), terms, mask, 0.1)
            mine, wanted = run(kept, call, d_out), run(launch.Launches(call), call, d_out)
            assert len(mine) == len(wanted) >= 4, (len(mine), len(wanted))
            for one, other in zip(mine, wanted, strict=True):
                assert one == other, f"{one}\n\n{other}"
            compared += len(mine)
        if workspace < 2**29:
            continue
        assert len(kept._made["forward"]._compiled) == 2  # where q and v begin
        of_queries = kept.backwards["all"].queries
        assert where is _WINDOW or len(of_queries._compiled) == 4  # and the strides of the gradient
    print(f"{compared} launches compared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
