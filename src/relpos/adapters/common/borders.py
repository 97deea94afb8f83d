"""From how many tokens relpos computes a retrofitted layer, by the kind of device.

Those of a CPU are measured and stand with each mixin (`border`, `training_border`). Those of a GPU stand here. No
model has been timed on a GPU since the kernels became faster, so they come from a model of costs, which reproduces the
kernels' times on an H200 within 20%:

    python benchmarks/gpu_costs.py        2026-11-28: sequence 8,192, grid 8,192

Both are for batch 1: Python then takes longer than the GPU, below about 4,096 tokens. Where the model of costs says
nothing (vectors, windows, boxes, slopes) or a model was measured slower (DeBERTa), the published method runs, as long
as its numbers for all pairs fit on a GPU.
`relpos retrofit MODEL --device cuda` times both ways on a GPU and names the border for `border=`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

NEVER = 2**20
"""A border beyond all inputs: the published method was faster in every timing. `border=` saves memory."""


@dataclass(frozen=True)
class Borders:
    """Tokens from which relpos computes.

    Attributes:
        forward: without gradients.
        training: in a training step.
    """

    forward: int
    training: int

    def of(self, training: bool) -> int:
        """The border of a step, or of a forward pass without gradients."""
        return self.training if training else self.forward


PUBLISHED = Borders(NEVER, NEVER)
UNTIMED_ON_GPU = Borders(2**15, 2**15)
"""Not for speed, which is not known: from here on a bias of 12 heads takes 24 GiB in half precision, and a step several
times that."""
SEQUENCE_ON_GPU = Borders(8192, 8192)
"""A learned bias by offset, T5's and its relatives'."""
GRID_ON_GPU = Borders(8192, 8192)
"""A learned table on a grid, that of all tokens of an image."""


def kind_of(module: nn.Module) -> str:
    """The kind of device on which a module computes: that of its first weight or buffer, else the CPU."""
    x: Tensor | None = next(module.parameters(), None)
    x = next(module.buffers(), None) if x is None else x
    return "cpu" if x is None else x.device.type
