"""`terms_from` through `torch.compile(fullgraph=True)`, values and gradients against eager: a program of
`test_functional`, which prints "ok"."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import relpos

warnings.simplefilter("ignore")  # of the compiler itself
torch.set_num_threads(1)
GRID = relpos.Grid(3, 4)
# The parameters of a sum have a gradient each, so one graph shows of them what five would. TUPE has modules inside.
mechanism = (
    relpos.TUPEPosition(2, 4, 8, grid_size=(3, 4))
    + relpos.RelativePositionBias(2, window_size=(3, 4))
    + relpos.LogContinuousBias(2, (3, 4), hidden_dim=8)
    + relpos.T5Bias(2, scaled=True)
    + relpos.RotaryMixed(2, 4)
)
q = torch.randn(1, 2, 12, 4)
own = {name: x.detach().clone() for name, x in mechanism.named_parameters()}


def run(tensors: dict[str, Tensor]) -> Tensor:
    return relpos.attention(q, q, q, position=mechanism.terms_from(tensors, GRID))


compiled = torch.compile(run, fullgraph=True, backend="eager")  # terms are compiled to the end in tests/engines
for _ in range(2):
    tensors = {name: torch.randn_like(x).requires_grad_() for name, x in own.items()}
    found, wanted = compiled(tensors), run(tensors)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    upstream, leaves = torch.randn_like(q), list(tensors.values())
    for ours, theirs in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
for name, x in mechanism.named_parameters():
    assert torch.equal(x, own[name]), f"{name} was changed"


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = mechanism.mechanisms[0] + mechanism.mechanisms[2]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + relpos.attention(x, x, x, position=self.position, queries=GRID)
        return x


stack = Stack()
with relpos.reading_once(stack):
    in_graph = torch.compile(stack, fullgraph=True, backend="eager")
    torch.testing.assert_close(in_graph(q), stack(q), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(in_graph(2 * q), stack(2 * q), rtol=1e-4, atol=1e-5)
print("ok")
