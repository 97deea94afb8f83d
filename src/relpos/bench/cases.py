"""The cases of the benchmark: computations as frozen data with a name. Tests run the same cases, shrunk.

    line-4096-float32-step-causal      a learned bias on a sequence of 4,096 tokens, one training step, causal
    grid-64x64+1-float32-step          a grid with one prefix token
    grid-7x7-float32-forward-b1024     a batch of 1,024 windows
    layer-deberta-2048-float32-step    a whole attention layer with its projections
    line-8192-bfloat16-step-d128-cuda  on a GPU, heads of width 128

Unless the name says otherwise, there are 8 heads of width 64, the batch is 1 and the device is the CPU. A *step* is the
forward pass and the gradients of queries, keys, values (for a layer: tokens and weights) and position parameters.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from relpos.core.checks import fail, require_choice, require_int, shape_of

CasePosition = Literal["none", "line", "grid", "t5", "shaw", "transformer_xl", "deberta"]
CasePass = Literal["forward", "step"]
CaseDtype = Literal["float32", "bfloat16", "float16", "float64"]
Device = Literal["cpu", "cuda"]

VECTORS: tuple[CasePosition, ...] = ("shaw", "transformer_xl", "deberta")
"""Positions with vectors that act on queries, keys or values."""


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        position: "none"; "line", a learned bias of 2 N - 1 numbers per head; "grid", its form on a grid; "t5", in 32
            buckets; "shaw", 33 clipped vectors for keys and for values; "transformer_xl", 2 N - 1 vectors and two
            biases; "deberta", 512 vectors for queries and 512 for keys.
        sizes: tokens of the sequence or grid along each axis. prefix: tokens before it.
        layer: a whole attention layer, heads * head_dim wide, instead of attention on given q, k and v.
        queries: how many tokens at the end of the sequence are queries; None means all, 1 is a decoding step.
    """

    position: CasePosition
    sizes: tuple[int, ...]
    what: CasePass = "forward"
    dtype: CaseDtype = "float32"
    causal: bool = False
    prefix: int = 0
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    layer: bool = False
    device: Device = "cpu"
    queries: int | None = None

    def __post_init__(self) -> None:
        require_choice(self.position, "a case's position", get_args(CasePosition))
        require_choice(self.what, "what a case computes", get_args(CasePass))
        require_choice(self.dtype, "a case's dtype", get_args(CaseDtype))
        require_choice(self.device, "a case's device", get_args(Device))
        for name in ("batch", "heads", "head_dim"):
            require_int(getattr(self, name), f"a case's {name}", at_least=1)
        require_int(self.prefix, "a case's prefix", at_least=0)
        axes = 2 if self.position == "grid" else 1
        if not isinstance(self.sizes, tuple) or len(self.sizes) != axes:
            fail(f"sizes of {axes} axes for {self.position}", shape_of(self.sizes), "Pass a tuple, one size per axis.")
        for size in self.sizes:
            require_int(size, "each size of a case", at_least=1)
        if self.queries is not None:
            require_int(self.queries, "a case's queries", at_least=1)
            if axes != 1 or self.prefix or self.layer or self.causal or self.queries > self.sizes[0]:
                fail("queries at the end of a plain sequence", str(self.queries), "Leave queries out.")

    @property
    def count(self) -> int:
        """Tokens, including the prefix."""
        return self.prefix + math.prod(self.sizes)

    @property
    def width(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim

    @property
    def name(self) -> str:
        """The case's name; defaults are left out."""
        size = "x".join(map(str, self.sizes)) + (f"+{self.prefix}" if self.prefix else "")
        words = [*(["layer"] if self.layer else []), self.position, size, self.dtype, self.what]
        words += ["causal"] if self.causal else []
        words += [f"b{self.batch}"] if self.batch != 1 else []
        words += [f"h{self.heads}"] if self.heads != 8 else []
        words += [f"d{self.head_dim}"] if self.head_dim != 64 else []
        words += [f"q{self.queries}"] if self.queries is not None else []
        words += [self.device] if self.device != "cpu" else []
        return "-".join(words)

    def shrunk(self, tokens: int) -> Case:
        """The same structure with at most `tokens` tokens besides the prefix, and at most two in the batch."""
        require_int(tokens, "tokens", at_least=1)
        sizes = self.sizes
        if len(sizes) == 2:
            while math.prod(sizes) > tokens:
                sizes = tuple(max(1, size - 1) if size == max(sizes) else size for size in sizes)
        sizes = sizes if len(sizes) == 2 else (min(sizes[0], tokens),)
        queries = None if self.queries is None else min(self.queries, sizes[0])
        return replace(self, sizes=sizes, queries=queries, batch=min(self.batch, 2))

    def one_head(self) -> Case:
        """The same tokens, with one head and one element in the batch."""
        return replace(self, heads=1, batch=1)


def _line(n: int, what: CasePass = "step", dtype: CaseDtype = "float32", *, causal: bool = False) -> Case:
    return Case("line", (n,), what, dtype, causal)


LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_EVERY_OTHER = LENGTHS[::2]
_GRIDS = (14, 32, 64)
_WINDOWS = ((7, 1024), (12, 384), (14, 256), (16, 128))
"""The height and width of a window, and the number of windows."""


QUICK = ("line-4096-float32-step", "grid-64x64+1-float32-step", "layer-deberta-2048-float32-step")
"""The cases of a quick run if none are named: a sequence, a grid and a layer. No peer compiles for them."""
EVERY, EVERY_GPU = "all", "gpu"
"""In place of names: all cases on CPU, and all on a GPU."""
GPU_LENGTHS = (512, 2048, 8192, 32768, 65536)
_GPU_WINDOWS = (7, 8)
_GPU_BATCH = 4096
_GPU_SHORT = (64, 128, 256)
_GPU_TOKENS = 65536
"""Tokens of a whole batch of short sequences."""


@cache
def families() -> dict[str, tuple[Case, ...]]:
    """The named sets of cases on CPU."""
    both: tuple[CasePass, CasePass] = ("forward", "step")
    windows = tuple(Case("grid", (size, size), what, batch=batch) for size, batch in _WINDOWS for what in both)
    vectors = (
        *(Case(position, (2048,), "step", layer=True) for position in VECTORS),
        Case("deberta", (512,), "step", layer=True),
    )
    on_grid = Case("grid", (32, 32), "step", prefix=1, layer=True)
    return {
        "target": (
            _line(4096, "forward"),
            _line(4096),
            _line(4096, causal=True),
            Case("grid", (64, 64), "step", prefix=1),
            _line(4096, "forward", "bfloat16"),
            _line(4096, "step", "bfloat16"),
            *vectors,
            on_grid,
            *windows,
            _line(16384),
        ),
        "lengths": (
            *(_line(n, what) for what in both for n in LENGTHS),
            *(_line(n, what, causal=True) for what in both for n in _EVERY_OTHER),
            *(_line(n, what, "bfloat16") for what in both for n in _EVERY_OTHER),
        ),
        "grids": (
            *(Case("grid", (size, size), what, prefix=1) for what in both for size in _GRIDS),
            *(Case("grid", (size, size), "step", "bfloat16", prefix=1) for size in _GRIDS),
        ),
        "windows": windows,
        "small": (
            Case("t5", (64,), queries=1),
            Case("line", (64,)),
            Case("t5", (64,)),
            _line(64),
            Case("t5", (64,), "step"),
            Case("grid", (8, 8), "step", prefix=1, batch=8, heads=4, head_dim=16),
            Case("grid", (7, 7), "step", batch=32),
            Case("grid", (14, 14), "step", prefix=1, batch=8),
        ),
        "shapes": (
            Case("line", (1024,), "step", batch=8),
            Case("line", (1024,), "step", heads=32),
            Case("line", (1024,), "step", heads=4, head_dim=128),
            Case("line", (1024,), "step", batch=4, heads=12),
        ),
        "vectors": tuple(Case(position, (n,), "step") for position in VECTORS for n in (512, 2048)),
        "layers": (
            *(Case("t5", (n,), "step", layer=True) for n in (512, 2048)),
            Case("t5", (2048,), "step", causal=True, layer=True),
            Case("grid", (14, 14), "step", prefix=1, batch=16, layer=True),
            on_grid,
            *vectors,
        ),
    }


@cache
def gpu_families() -> dict[str, tuple[Case, ...]]:
    """The named sets of cases on a GPU, in bfloat16."""
    both: tuple[CasePass, CasePass] = ("forward", "step")
    half: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda"}
    windows = tuple(
        Case("grid", (size, size), what, batch=_GPU_BATCH, **half) for size in _GPU_WINDOWS for what in both
    )
    grids = tuple(Case("grid", (size, size), what, prefix=1, **half) for size in _GRIDS for what in both)
    lengths = tuple(
        Case("line", (n,), what, causal=causal, head_dim=width, **half)
        for n in GPU_LENGTHS
        for width in (64, 128)
        for causal in (False, True)
        for what in both
    )
    return {
        "gpu-target": (
            *(case for case in lengths if case.sizes == (8192,) and (case.what == "step" or not case.causal)),
            *(case for case in grids if case.sizes == (64, 64) and case.what == "step"),
            *(case for case in windows if case.what == "step"),
        ),
        "gpu-lengths": lengths,
        "gpu-short": tuple(
            Case("line", (n,), what, batch=_GPU_TOKENS // n, **half) for n in _GPU_SHORT for what in both
        ),
        "gpu-grids": grids,
        "gpu-windows": windows,
        "gpu-layers": tuple(
            Case("t5", (n,), "step", causal=causal, layer=True, **half)
            for n in GPU_LENGTHS[:3]
            for causal in (False, True)
        ),
    }


def all_families() -> dict[str, tuple[Case, ...]]:
    """The named sets of cases on both devices."""
    return families() | gpu_families()


def every_case() -> dict[str, Case]:
    """All cases of all families by name."""
    return {case.name: case for cases in all_families().values() for case in cases}


def find_cases(names: str) -> tuple[Case, ...]:
    """The cases in a comma-separated list of names and families, each once; `all` is every CPU family, `gpu` every GPU
    family.

    Raises:
        ValueError: no name, or an unknown one; the message suggests the nearest.
    """
    known = {name: (case,) for name, case in every_case().items()} | all_families()
    for name, device in ((EVERY, "cpu"), (EVERY_GPU, "cuda")):
        known[name] = tuple(case for case in every_case().values() if case.device == device)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        fail("at least one case", "none", f"Name some, or a family: {', '.join(all_families())}.")
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            remedy = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See relpos bench --list."
            fail(
                f"a case, or a family among {', '.join([*all_families(), EVERY, EVERY_GPU])}", repr(name), remedy
            )  # cases are too many to list
    return tuple(dict.fromkeys(case for name in asked for case in known[name]))
