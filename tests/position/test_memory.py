"""Mechanisms whose vectors meet queries or keys never make a vector a pair: at 2,048 tokens of width 64 that is 1 GiB.

Each mechanism runs forward and backward in a process of its own, one head, and both the peak of resident
memory and the largest tensor that any operation returns are held far below N x M x D numbers.
"""

import pytest

from loaded import Loaded

TOKENS, WIDTH = 2048, 64
PAIRS = TOKENS * TOKENS

WORK = """
import contextlib
import ctypes
import sys
import torch
from position.published import Largest
from relpos import DisentangledPosition, Sequence, ShawPosition, TransformerXLPosition, attention
from relpos.comparison.memory import PeakMemory

name, backend, tokens, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
with contextlib.suppress(OSError, AttributeError):
    for parameter in (-1, -3):  # glibc gives freed memory back at once: what it would keep varies by tens of MiB
        ctypes.CDLL(None).mallopt(parameter, 65536)
mechanism = {
    "shaw": lambda: ShawPosition(width, 64),
    "shaw, keys only": lambda: ShawPosition(width, 64, values=False),
    "transformer_xl": lambda: TransformerXLPosition(1, width, width),
    "deberta": lambda: DisentangledPosition(1, width, width),
}[name]()
q, k, v = (torch.randn(1, 1, tokens, width, requires_grad=True) for _ in range(3))
peak = PeakMemory(torch.device("cpu"))
with Largest() as largest:
    attention(q, k, v, position=mechanism, queries=Sequence(tokens), backend=backend).sum().backward()
print(peak.mib(), largest.numbers)
"""

RUNS = [("shaw", "streaming"), ("shaw, keys only", "sdpa"), ("transformer_xl", "reference"), ("deberta", "streaming")]
"""The largest tensor alone is held in every engine by the tests of each mechanism."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_never_a_vector_a_pair(name: str, backend: str, loaded: Loaded) -> None:
    """The largest tensor has at most four numbers a pair, a sixteenth of a vector a pair; and all that is alive at once
    (scores, weights, what the vectors add, and the gradients of these) takes half of the memory of one of those."""
    run = loaded.run("-c", WORK, name, backend, TOKENS, WIDTH, needs=["train"])  # else imports are half of both
    assert run.returncode == 0, run.stderr
    mib, largest = run.stdout.split()
    assert int(largest) <= 4 * PAIRS
    assert float(mib) <= 0.5 * 4 * PAIRS * WIDTH / 2**20, f"{mib} MiB"
