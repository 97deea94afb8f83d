"""Each term through `torch.compile(fullgraph=True)`, value and gradients against eager. A script, not a test:

    python tests/engines/compile_terms.py [--all]

It runs apart from the other tests, because compilers must see relpos as users have it, without the shape checks. Each
by `auto`, which takes plain PyTorch at these sizes, and by `streaming`: with --all by inductor, which spends ten
seconds a term on C++. Else streaming's are traced with their backward, and of `auto`'s those that have one of our own.
A line each is printed; the exit status is the number that failed.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from engine_steps import with_gradients  # noqa: E402
from test_terms_in_engines import CASES, inputs  # noqa: E402

import relpos  # noqa: E402

BACKENDS = ("auto", "streaming")
TERMS = (
    "LineBias",
    "LineBias with prefix",
    "LineBias, batched",
    "xPos",
    "Polar",
    "rotated cache and QueryBias",
    "LineVectors of queries, clipped",
    "LineVectors of a content",
    "LineVectors of keys",
    "LineVectors of values",
    "AxisVectors",
    "LowRank",
    "DenseBias",
    "DenseBias of keys",
    "IndexedBias",
    "RowRule",
    "PairRotations",
    "QueryScale",
    "QueryScale on scores",
    "Scale",
    "Softcap",
    "a mask and Sinks",
    "Sinks of queries",
)
OF_ANOTHER = {"LineBias with prefix", "LineBias, batched", "Polar", "DenseBias of keys", "QueryScale on scores"}
"""Streaming packs them, for its operator, as another of their kind."""
SYMBOLS = "several lengths, dynamic=True"
BY_INDUCTOR = {"LineBias with prefix"}  # its backward adds at indices
OWN_BACKWARD = {
    "LineBias",
    "LineBias, batched",
    "LineVectors of queries, clipped",
    "LineVectors of a content",
    "LineVectors of keys",
    "AxisVectors",
}


def compiler(name: str, backend: str) -> str:
    """Who compiles. Tracing the backward, too, takes twice the time, and with symbols more."""
    if "--all" in sys.argv or (backend == "auto" and name in BY_INDUCTOR):
        return "inductor"
    return "aot_eager" if backend == "streaming" or name in OWN_BACKWARD else "eager"


def assert_close(ours: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    """Output and gradients."""
    upstream = torch.randn(wanted.shape)
    found, eager = (with_gradients(out, leaves, upstream) for out in (ours, wanted))
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


def compare(name: str, backend: str) -> None:
    """Raise unless the compiled term gives what the eager one gives."""
    case = CASES[name]
    tensors, rest, _ = inputs(case, torch.float32)
    leaves = [x.requires_grad_() for x in [*tensors, *rest]]

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        return relpos.attention(q, k, v, position=case.terms(*rest), mask=case.mask, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=compiler(name, backend))
    assert_close(compiled(*leaves), run(*leaves), leaves)


def compare_masks(name: str, backend: str) -> None:
    """The same for masks in words and, where an engine takes them, as boolean tensors."""
    bias, q, k, v = relpos.T5Bias(4), *torch.randn(3, 2, 4, 6, 8, requires_grad=True)
    valid = torch.arange(6) < torch.tensor([[6], [4]])
    tensors = (torch.ones(6, 6, dtype=torch.bool).tril(), valid[:, None, None])
    for mask in ("causal", *(tensors if backend == "auto" else ())):

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = mask) -> Any:
            tokens = relpos.Sequence(6)
            return relpos.attention(q, k, v, position=bias, queries=tokens, mask=mask, backend=backend)

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend=compiler(name, backend))
        assert_close(compiled(q, k, v), run(q, k, v), list(bias.parameters()))


def compare_lengths(name: str, backend: str) -> None:
    """One compiled function at one length after another, all sizes and numbers symbols from the start.

    Queries are keys, and both are turned, which the compiler does once: one tensor then stands at two places. The
    head's width and the scale are symbols too, the mask hides tokens that no graph can know, and streaming, which asks
    for no border between sizes, is one graph. (Sizes that become symbols at the second length are frozen:
    `test_graphs_of_four_lengths`.)
    """
    mechanism = relpos.T5Bias(num_heads=2) + relpos.RotaryEmbedding(8)
    scale = None if backend == "streaming" else 0.25  # the width's own, and one of the caller

    def run(q: Tensor) -> Any:
        tokens, numbers = relpos.Sequence(q.shape[2]), torch.arange(q.shape[2])
        mask = relpos.Mask.causal(numbers, numbers) & relpos.Mask.packed(numbers % 3 - 1, numbers % 2)
        return relpos.attention(q, q, q, position=mechanism, queries=tokens, mask=mask, scale=scale, backend=backend)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=compiler(name, backend))
    for length in (6, 9, 14, 9):
        q = torch.randn(1, 2, length, 8).requires_grad_()
        assert_close(compiled(q), run(q), [q, *mechanism.parameters()])
    assert backend != "streaming" or counters["stats"]["unique_graphs"] == 1, counters["stats"]


CHECKS = {**dict.fromkeys(TERMS, compare), SYMBOLS: compare_lengths, "masks": compare_masks}
ASKED = [(name, backend) for name in CHECKS for backend in BACKENDS if backend == "auto" or name not in OF_ANOTHER]


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for name, backend in ASKED:
        try:
            CHECKS[name](name, backend)
            print(f"ok      {name}, {backend}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}, {backend}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of inductor itself
    sys.exit(main())
