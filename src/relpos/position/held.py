"""The terms that a mechanism holds within `relpos.decoding`, and the tensors that they were made of."""

from __future__ import annotations

from typing import Any

from torch import nn

from relpos.core import Terms


class Held(dict[Any, Terms]):
    """Terms by the arguments they were asked with. They are valid only while their mechanism has its original tensors:
    `torch.func.functional_call` replaces these for one call."""

    def __init__(self, mechanism: nn.Module) -> None:
        super().__init__()
        groups = (group for part in mechanism.modules() for group in (part._parameters, part._buffers))
        self._made_of = [(group, name, x) for group in groups for name, x in group.items()]

    def counts(self) -> bool:
        """Whether the mechanism still has its original tensors."""
        for group, name, x in self._made_of:  # noqa: SIM110 - a generator takes twice as long
            if group.get(name) is not x:
                return False
        return True
