"""`terms_from` through `torch.compile(fullgraph=True)`, values and gradients against eager. A script, not a test:

    python tests/position/compile_functional.py

It runs apart from the other tests, because compilers must see relpos as users have it, without the shape checks. A line
each is printed; the exit status is the number that failed.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

import relpos

GRID = relpos.Grid(3, 4)
MECHANISMS = {
    "a table, a network, buckets and angles in a sum": lambda: (
        relpos.RelativePositionBias(2, window_size=(3, 4))
        + relpos.LogContinuousBias(2, (3, 4), hidden_dim=8)
        + relpos.T5Bias(2)
        + relpos.RotaryMixed(2, 4)
    ),
    "modules inside": lambda: relpos.TUPEPosition(2, 4, 8, grid_size=(3, 4)),
}
"""Each is compiled once; the parameters of a sum have a gradient each, so one graph shows of them what four would."""


def compare(name: str) -> None:
    """Raise unless compiled terms give what eager ones give, for two sets of tensors, and nothing is swapped."""
    torch.manual_seed(3)
    mechanism, q = MECHANISMS[name](), torch.randn(1, 2, 12, 4)
    own = {name: x.detach().clone() for name, x in mechanism.named_parameters()}

    def run(tensors: dict[str, Tensor]) -> Tensor:
        terms = mechanism.terms_from(tensors, GRID)
        output = relpos.attention(q, q, q, position=terms)
        assert isinstance(output, Tensor)
        return output

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        tensors = {name: torch.randn_like(x).requires_grad_() for name, x in own.items()}
        upstream = torch.randn_like(q)
        leaves = list(tensors.values())
        for ours, wanted in zip(*(gradients(each(tensors), leaves, upstream) for each in (compiled, run)), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    for name, x in mechanism.named_parameters():
        assert torch.equal(x, own[name]), f"{name} was changed"


def gradients(output: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for name in MECHANISMS:
        try:
            compare(name)
            print(f"ok      {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the compiler itself
    sys.exit(main())
