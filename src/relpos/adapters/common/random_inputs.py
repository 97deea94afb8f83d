"""Random inputs for repeated runs of a module: every run draws the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RandomInputs:
    """Seeded inputs of one run, in the order in which the run requests them.

    Args:
        batch, tokens: the requested size; a run may change `tokens` to what its module takes.
        dtype, device: of floating-point inputs.
        replay: inputs to return instead of new ones, to repeat an earlier run.
    """

    def __init__(
        self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device, replay: Sequence[Tensor] | None = None
    ) -> None:
        self.batch, self.tokens, self.dtype, self.device = batch, tokens, dtype, device
        self.inputs: list[Tensor] = []
        """The results of `normal`: leaves that require a gradient."""
        self._replay = None if replay is None else list(replay)
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers: an input whose gradient is compared."""
        if self._replay is not None:
            return self._replay.pop(0)
        # drawn in float32, so that runs in several dtypes have the same inputs
        x = torch.randn(*shape, generator=self._generator).to(self.device, self.dtype).requires_grad_()
        self.inputs.append(x)
        return x

    def padding(self, batch: int, tokens: int) -> Tensor:
        """`[batch, tokens]` of int64, 1 at real tokens. The first row is full; each further row has more padding on the
        right."""
        lengths = torch.tensor([max(1, tokens - row * max(1, tokens // 4)) for row in range(batch)])
        return (torch.arange(tokens) < lengths[:, None]).long().to(self.device)
