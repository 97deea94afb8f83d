"""`RELPOS_GPU_TESTS_ON=cpu`: the tests for a GPU without one, to find the faults of the tests themselves.

    RELPOS_GPU_TESTS_ON=cpu python -m pytest -m gpu tests/engines/test_gpu.py

Calls are small, Triton's interpreter runs the kernels, FlexAttention is not compiled, no sanitizer watches, and
functions of `torch.cuda` are replaced by what does the same on the CPU. A test that fails here fails on a GPU, too; one
that passes may still fail there.
"""

import copy
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from relpos.bench.engines import TOKENS
from relpos.engines import flex
from relpos.engines.flex import FLEX
from relpos.engines.selection import SLOWER
from relpos.engines.self_check import variant, verdicts
from relpos.engines.triton import TRITON, limits

ON_CPU = os.environ.get("RELPOS_GPU_TESTS_ON") == "cpu" and not torch.cuda.is_available()
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


def size(real: int, small: int) -> int:
    """A size on a GPU, and for Triton's interpreter, which takes 20 ms for a tile."""
    return small if ON_CPU else real


class Graph(TorchDispatchMode):
    """A `CUDAGraph` and its capture: `replay` computes what was computed anew, into the same tensors."""

    capturing = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Any:
        Graph.capturing = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        Graph.capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.steps.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.steps[-1][-1]

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.steps:
            pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(func(*args, **kwargs)), strict=True)
            for old, new in pairs:
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU for a GPU, until the test ends."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, function in {
        "CUDAGraph": Graph, "graph": lambda graph: graph, "get_rng_state": torch.get_rng_state,
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, function)
    # what decides by the device, or by how many tokens there are
    obstacle = "the capture of a CUDA graph"
    monkeypatch.setattr(verdicts, "_obstacle", lambda q: obstacle if Graph.capturing else None)
    monkeypatch.setattr(TRITON, "checked_on", ("cpu",))
    monkeypatch.setitem(SLOWER, "triton", lambda call, kind: None)
    monkeypatch.setattr(limits, "FEW", 0)
    monkeypatch.setitem(TOKENS, "cpu", 44)
    tokens = {("odd", False): 37, ("full", False): 32, ("odd", True): 13, ("full", True): 16}
    monkeypatch.setattr(variant, "TOKENS", tokens)
    monkeypatch.setattr(variant, "_CUT", {"odd": 4, "full": 8})
    monkeypatch.setattr(variant, "_FULL", 16)
    # FlexAttention, which refuses gradients on a CPU and has them
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_compiled", lambda: (flex_attention, create_block_mask))
    lacks = FLEX.unsupported
    monkeypatch.setattr(FLEX, "unsupported", lambda call: lacks(_on_cuda(call)))


class OnCuda(Tensor):
    device = torch.device("cuda")


def _on_cuda(call: Any) -> Any:
    there = copy.copy(call)
    object.__setattr__(there, "q", call.q.detach().as_subclass(OnCuda))
    return there


def no_sanitizer(folder: Path) -> str:
    """A command that leaves out the options of a sanitizer, and runs what it is asked to watch."""
    script = folder / "compute-sanitizer"
    script.write_text('#!/bin/sh\nshift 4\nexec "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)
