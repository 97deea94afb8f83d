"""Each term through `torch.compile(fullgraph=True)`, value and gradients against eager. A script, not a test:

    python tests/engines/compile_terms.py [--all]

It runs apart from the other tests, because compilers must see relpos as users have it, without the shape checks. Each
by `auto`, which takes plain PyTorch at these sizes, and by `streaming`: with --all by inductor, which spends ten
seconds a term on C++, else most by tracing and autograd alone. A line each is printed; the exit status is the number
that failed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_terms_in_engines import CASES, inputs  # noqa: E402

import relpos  # noqa: E402

BACKENDS = ("auto", "streaming")
TERMS = (
    "LineBias",
    "LineBias with prefix",
    "LineBias, batched",
    "xPos",
    "rotated cache and QueryBias",
    "LineVectors of queries, clipped",
    "LineVectors of keys",
    "LineVectors of values",
    "AxisVectors",
    "LowRank",
    "DenseBias",
    "DenseBias of keys",
    "RowRule",
    "Scale",
    "Softcap",
    "a mask and Sinks",
)
LENGTHS, SYMBOLS = "several lengths", "several lengths, dynamic=True"
BY_INDUCTOR = {"LineBias with prefix", "RowRule"}


def compiler(name: str, backend: str) -> str:
    """Who compiles. With symbols the backward takes most of the time, and is traced where it is our own."""
    if "--all" in sys.argv or (backend == "auto" and name in BY_INDUCTOR):
        return "inductor"
    return "eager" if backend == "auto" and name in (LENGTHS, SYMBOLS) else "aot_eager"


def gradients(output: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def compare(name: str, backend: str) -> None:
    """Raise unless the compiled term gives what the eager one gives."""
    case = CASES[name]
    tensors, rest, upstream = inputs(case, torch.float32)
    leaves = [x.requires_grad_() for x in [*tensors, *rest]]

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        output = relpos.attention(q, k, v, position=case.terms(*rest), mask=case.mask, backend=backend)
        assert isinstance(output, Tensor)
        return output

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=compiler(name, backend))
    for ours, wanted in zip(
        gradients(compiled(*leaves), leaves, upstream), gradients(run(*leaves), leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def compare_lengths(backend: str, dynamic: bool | None = None) -> None:
    """One compiled function at one length after another: from the second on the compiler makes sizes symbolic.

    Queries are keys, and both are turned, which the compiler does once: one tensor then stands at two places. With
    `dynamic`, all sizes and numbers are symbols from the start, the head's width and the scale too, the mask hides
    tokens that no graph can know, and streaming, which asks for no border between sizes, is one graph.
    """
    mechanism = relpos.T5Bias(num_heads=2) + relpos.RotaryEmbedding(8)
    scale = None if backend == "streaming" else 0.25  # the width's own, and one of the caller

    def run(q: Tensor) -> Tensor:
        tokens, mask = relpos.Sequence(q.shape[2]), relpos.Mask.causal()
        if dynamic:
            numbers = torch.arange(q.shape[2])
            mask = relpos.Mask.causal(numbers, numbers) & relpos.Mask.packed(numbers % 3 - 1, numbers % 2)
        output = relpos.attention(q, q, q, position=mechanism, queries=tokens, mask=mask, scale=scale, backend=backend)
        assert isinstance(output, Tensor)
        return output

    torch._dynamo.reset()
    counters.clear()
    name = SYMBOLS if dynamic else LENGTHS
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=compiler(name, backend))
    for length in (6, 9, 14, 9):
        q, upstream = torch.randn(1, 2, length, 8).requires_grad_(), torch.randn(1, 2, length, 8)
        leaves = [q, *mechanism.parameters()]
        for ours, wanted in zip(
            gradients(compiled(q), leaves, upstream), gradients(run(q), leaves, upstream), strict=True
        ):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    assert not dynamic or backend != "streaming" or counters["stats"]["unique_graphs"] == 1, counters["stats"]


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for name in (*TERMS, LENGTHS, SYMBOLS):
        for backend in BACKENDS:
            try:
                if name in (LENGTHS, SYMBOLS):
                    compare_lengths(backend, dynamic=True if name == SYMBOLS else None)
                else:
                    compare(name, backend)
                print(f"ok      {name}, {backend}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED  {name}, {backend}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of inductor itself
    sys.exit(main())
