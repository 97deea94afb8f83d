"""Compile every Triton kernel for Hopper, or another kind of GPU, without one. A script, not a test:

    python tests/engines/compile_kernels.py [--all] [--arch 80] [--few 80]

The interpreter runs kernels as Python, so what the compiler refuses shows here alone. A line each is printed:
registers, bytes of the stack (registers that did not fit), shared memory, bytes of code. The exit status is the number
that failed, want more shared memory than there is, or spill registers, which no kernel may at widths 64 and 128 in half
precision (all that is compiled without --all).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relpos import Grid, LineBias, LineVectors, LowRank, Mask, QueryScale, Sequence, Sinks, Terms, lines
from relpos.core import Rows, after_content
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.call import Call
from relpos.engines.operators import Gradients

limits = importlib.import_module("relpos.engines.triton.limits")
launch = importlib.import_module("relpos.engines.triton.launch")
passes = importlib.import_module("relpos.engines.triton.passes")
rotation = importlib.import_module("relpos.engines.triton.rotation")
kernels = importlib.import_module("relpos.engines.triton.kernels")
table_kernels = importlib.import_module("relpos.engines.triton.table_kernels")
prefix_kernels = importlib.import_module("relpos.engines.triton.prefix_kernels")
window_kernels = importlib.import_module("relpos.engines.triton.window_kernels")
vector_kernels = importlib.import_module("relpos.engines.triton.vector_kernels")
ROOM = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, table 30)."""
_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def signature(x: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The type of an argument, as the launcher would find it."""
    if isinstance(x, tuple):
        parts = [signature(part, (*path, number), constants, attributes) for number, part in enumerate(x)]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return _TYPES[x.dtype]
    if x is None or (isinstance(x, int) and x == 1):
        constants[path] = x
        return "constexpr"
    if isinstance(x, tl.constexpr):
        constants[path] = x.value
        return "constexpr"
    if isinstance(x, float):
        return "fp32"
    if x % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if abs(x) < 2**31 else "i64"


def compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], arch: int) -> Any:
    """The kernel, compiled for a compute capability."""
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    types = {
        kernel.arg_names[number]: signature(x, (number,), constants, attributes) for number, x in enumerate(arguments)
    }
    for name, value in options.items():
        types[name] = "constexpr"
        constants[kernel.arg_names.index(name),] = value
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=settings)


class Recorder:
    """Stands in for a kernel: takes its launch and compiles it."""

    def __init__(self, kernel: Any, label: str, arch: int, may_spill: bool = False) -> None:
        self.kernel, self.label, self.arch, self.may_spill, self.failed = kernel, label, arch, may_spill, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            if "PRECISION" in options:
                options["PRECISION"] = "ieee"
            try:
                code = compiled(self.kernel, arguments, options, self.arch)
            except Exception as error:
                self.failed += 1
                print(f"FAILED  {self.label} {self.kernel.__name__}: {type(error).__name__}: {error}", flush=True)
                return
            (registers, stack), shared = resources(code.asm["cubin"]), code.metadata.shared
            measured = SPILLED.get(self.kernel.__name__, 0) if self.arch == 90 and "width 128" in self.label else 0
            bad = shared > ROOM[self.arch] * 1024 or (stack > measured and not self.may_spill)
            self.failed += bad
            print(
                f"{'FAILED' if bad else 'ok    '}  {self.label} {self.kernel.__name__}: {registers} registers, "
                f"{stack} bytes of stack, {shared // 1024} KiB shared, {len(code.asm['cubin']) // 1024} KiB",
                flush=True,
            )

        return run


def resources(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, by NVIDIA's own tool."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


SPILLED = {"backward_keys": 48}
"""Bytes that the best tile measured on an H200 at width 128 spills."""
KERNELS = {
    kernels: ("forward", "backward_rows", "backward_keys", "backward_queries"),
    table_kernels: ("padded", "backward_table", "backward_pairs", "sum_of_pairs"),
    prefix_kernels: ("backward_prefix",),
    window_kernels: ("backward_windows",),
    vector_kernels: ("weights", "sum_by_column"),
}
"""By the module that has them."""


def run(label: str, call: Call, arch: int, may_spill: bool = False) -> int:
    """Forward and backward of a call, compiled; the number that failed."""
    recorders = []
    for module, names in KERNELS.items():
        for name in names:
            recorders.append((module, Recorder(getattr(module, name), label, arch, may_spill)))
            setattr(module, name, recorders[-1][1])
    launch.shared_memory = lambda device: ROOM[arch] * 1024
    out, lse = passes.forward(call)
    learned = [term.values for term in call.terms.of(LineBias)] + [term.table for term in call.terms.of(TableLookup)]
    learned += [term.factor for term in call.terms.of(QueryScale)]
    learned += [side for term in call.terms.of(LowRank)[1:] for side in (term.query, term.key)]
    learned += [term.vectors for term in call.terms.of(LineVectors)]
    gradients = Gradients([call.q, call.k, call.v, *learned])
    passes.backward(call, out, lse, torch.zeros_like(out), torch.zeros_like(lse), gradients)
    for module, recorder in recorders:
        setattr(module, recorder.kernel.__name__, recorder.kernel)
    return sum(recorder.failed for _, recorder in recorders)


def calls(everything: bool) -> Any:
    """What is compiled: the cases that are measured, or every width, dtype and mask."""
    limits.FEW = 100  # so that small calls stand for large ones
    widths = (16, 64, 80, 128, 256) if everything else (64, 128)
    halves = (torch.bfloat16, torch.float16) if everything else (torch.bfloat16,)
    dtypes = (*halves, torch.float32, torch.float64) if everything else halves
    places = {
        "sequence": Sequence(256),
        "grid": Grid(15, 17, prefix=1),
        "window": Grid(8, 8, prefix=1),
        "no bias": None,
    }
    masks = ("", "causal", "packed") if everything else ("", "causal")
    found = itertools.product(widths, dtypes, masks, places.items())
    for number, (width, dtype, word, (name, where)) in enumerate(found):
        if not everything and number.bit_count() % 2:
            continue  # half of them hold every pair of width, mask and place
        if not everything and name == "no bias" and width == 64:
            continue  # as a sequence, whose bias takes more registers in the same tiles
        if dtype == torch.float64 and (width > 128 or word == "packed"):
            continue
        n, batch = 256 if where is None else where.count, 512 if name == "window" else 1
        groups = 2 if name in ("grid", "window") else 1  # two are in tiles of their own
        q = torch.zeros(batch, 4, n, width, dtype=dtype)
        k, v = torch.zeros(2, batch, 4 // groups, n, width, dtype=dtype)
        terms = Terms(Sinks(torch.zeros(4)))
        if where is not None:
            line = lines(where)
            terms = terms + LineBias(torch.zeros(4, line.length), line)
            if number % 7 == 5:
                of_queries = torch.zeros(1, 4, n)
                terms = after_content(terms.without(Sinks) + QueryScale(of_queries, "scores") + Sinks(of_queries))
        mask = Mask.causal() if word else None
        mask = mask & Mask.packed(torch.arange(n) // 50) if mask is not None and word == "packed" else mask
        seed = torch.tensor(1) if everything and number % 2 else None
        call = Call(q, k, v, terms, mask, 0.1, 0.1, seed)
        scaled = " scaled," if terms.of(QueryScale) else ""
        yield f"{name}, width {width}, {str(dtype)[6:]}{word and ' '}{word},{scaled}", call
    line = lines(places["sequence"])
    table = TableLookup(torch.zeros(32, 4, dtype=torch.bfloat16), Rows(torch.arange(line.length) % 32, 32), line)
    q = torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16)
    yield "a table, width 64, bfloat16,", Call(q, q.clone(), q.clone(), Terms(table), None, 0.1)
    for width, dtype in itertools.product(widths if everything else (48,), dtypes):  # 48: padded to 64
        if dtype == torch.float64 and width > 128:
            continue
        q, k, v = torch.zeros(3, 1, 4, 256, width, dtype=dtype)
        terms = Terms(*(LowRank(*torch.zeros(2, 1, 4, 256, rank)) for rank in (4, 2)))
        call = Call(q, k, v, terms + LineBias(torch.zeros(4, line.length), line), Mask.causal(), 0.1)
        yield f"forget gate and sequence, width {width}, {str(dtype)[6:]} causal,", call


def with_vectors(everything: bool) -> Any:
    """Calls with vectors: DeBERTa's; with everything Shaw's, Transformer-XL's and those of a grid's axes, too."""
    line, grid = lines(Sequence(256)), lines(Grid(16, 16))
    buckets, cells = torch.arange(line.length) // 4, torch.arange(grid.length)
    dtypes = (torch.bfloat16, torch.float32) if everything else (torch.bfloat16,)
    for width, dtype, word in itertools.product((64, 128), dtypes, ("", "causal")):
        few, of_axis = torch.zeros(4, 128, width), torch.zeros(4, 31, width)
        given = {
            "DeBERTa": [LineVectors(few, buckets, line, side) for side in ("query", "key")],
            "Shaw": [LineVectors(few, buckets, line, side) for side in ("query", "value")],
            "Transformer-XL": [LineVectors(torch.zeros(4, line.length, width), None, line, "query")],
            "axes": [LineVectors(of_axis, index, grid, "query") for index in (cells % 31, cells // 31)],
        }
        q, k, v = torch.zeros(3, 2, 4, 256, width, dtype=dtype)
        for name, terms in given.items():
            label = f"{name}, width {width}, {str(dtype)[6:]}{word and ' '}{word},"
            call = Call(q, k, v, Terms(*terms), Mask.causal() if word else None, 0.1)
            if everything or (name == "DeBERTa" and width == 64 and not word):
                yield label, call
    q, line = torch.zeros(512, 4, 49, 32, dtype=torch.bfloat16), lines(Grid(7, 7))
    bias = Terms(LineBias(torch.zeros(4, line.length), line))
    yield "one tile, width 32, bfloat16,", Call(q, q.clone(), q.clone(), bias, None, 0.1, 0.0, None)


def turns(arch: int) -> int:
    """The rotation's kernel, compiled both ways."""
    recorder = Recorder(kernels.turn, "rotation, bfloat16,", arch)
    rotation.kernels.turn = recorder
    x = torch.zeros(2, 4, 64, 128, dtype=torch.bfloat16)
    for pairs, half, back in ((48, True, False), (64, False, True)):
        angle = torch.zeros(1, 1, 64, pairs)
        rotation._rotate(x, angle, angle, half, back)
    rotation.kernels.turn = recorder.kernel
    return recorder.failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every width, dtype and mask")
    parser.add_argument("--arch", type=int, default=90, choices=sorted(ROOM))
    parser.add_argument("--few", type=int, choices=sorted(ROOM), help="every fourth of the calls for this kind, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = [*calls(asked.all), *with_vectors(asked.all)]
    kinds = [(asked.arch, wanted), *([] if asked.few is None else [(asked.few, wanted[::4])])]
    return sum(
        turns(arch) + sum(run(f"{arch}: {label}", call, arch, asked.all) for label, call in some)
        for arch, some in kinds
    )


if __name__ == "__main__":
    sys.exit(min(main(), 100))
