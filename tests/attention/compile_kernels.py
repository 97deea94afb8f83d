"""Compile every Triton kernel for Hopper, without a GPU. A script, not a test:

    python tests/attention/compile_kernels.py [--all]

The interpreter runs kernels as Python, so what the compiler refuses shows here alone. A line each is printed: registers
that did not fit, shared memory, bytes of code. The exit status is the number that failed or want more than there is.
"""

from __future__ import annotations

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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relpos import Grid, LineBias, Mask, Sequence, Sinks, Terms, lines
from relpos.attention.work import Work

launch = importlib.import_module("relpos.attention.triton.launch")
kernels = importlib.import_module("relpos.attention.triton.kernels")
_ROOM = 227 * 1024
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
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
    if isinstance(x, float):
        return "fp32"
    if x % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if abs(x) < 2**31 else "i64"


def compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kernel, compiled for an H200."""
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
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)


class Recorder:
    """Stands in for a kernel: takes its launch and compiles it."""

    def __init__(self, kernel: Any, label: str) -> None:
        self.kernel, self.label, self.failed = kernel, label, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            if "PRECISION" in options:
                options["PRECISION"] = "ieee"
            try:
                code = compiled(self.kernel, arguments, options)
            except Exception as error:
                self.failed += 1
                print(f"FAILED  {self.label} {self.kernel.__name__}: {type(error).__name__}: {error}", flush=True)
                return
            spilled, shared = spills(code.asm["cubin"]), code.metadata.shared
            bad = shared > _ROOM
            self.failed += bad
            print(
                f"{'FAILED' if bad else 'ok    '}  {self.label} {self.kernel.__name__}: {spilled}, "
                f"{shared // 1024} KiB shared, {len(code.asm['cubin']) // 1024} KiB",
                flush=True,
            )

        return run


def spills(binary: bytes) -> str:
    """Registers, and bytes of the stack, by NVIDIA's own tool."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return "registers unknown" if found is None else f"{found[1]} registers, {found[2]} bytes of stack"


def run(label: str, work: Work) -> int:
    """Forward and backward of a call, compiled; the number that failed."""
    recorders = []
    for name in ("forward", "backward_rows", "backward_keys", "backward_queries", "backward_table"):
        recorder = Recorder(getattr(kernels, name), label)
        recorders.append(recorder)
        setattr(launch.kernels, name, recorder)
    call = launch.Launch(work)
    out, lse = call.forward()
    call.backward(
        out,
        lse,
        torch.zeros_like(out),
        torch.zeros_like(lse),
        [work.q, work.k, work.v, work.terms.of(LineBias)[0].values],
    )
    for recorder in recorders:
        setattr(launch.kernels, recorder.kernel.__name__, recorder.kernel)
    return sum(recorder.failed for recorder in recorders)


def calls(everything: bool) -> Any:
    """What is compiled: the cases that are measured, or every width, dtype and mask."""
    widths = (16, 64, 80, 128, 256) if everything else (64, 128)
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if everything else (torch.bfloat16,)
    n = 256
    masks = {"": None, " causal": Mask.causal()}
    if everything:
        masks[" packed"] = Mask.packed(torch.arange(n) // 50) & Mask.causal()
    places = {"sequence": Sequence(n), "grid": Grid(15, 17, prefix=1)}
    found = itertools.product(widths, dtypes, masks.items(), places.items())
    for number, (width, dtype, (word, mask), (name, where)) in enumerate(found):
        if not everything and number.bit_count() % 2:
            continue  # half of them hold every pair of width, mask and place
        q, k, v = torch.zeros(1, 4, n, width, dtype=dtype), *torch.zeros(2, 1, 2, n, width, dtype=dtype)
        line = lines(where)
        terms = Terms(LineBias(torch.zeros(4, line.length), line), Sinks(torch.zeros(4)))
        seed = torch.tensor(1) if everything else None
        work = Work(q, k, v, None, None, terms, mask, 0.1, 0.1, seed, 0)
        yield f"{name}, width {width}, {str(dtype)[6:]}{word},", work


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return sum(run(label, work) for label, work in calls("--all" in sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(min(main(), 100))
