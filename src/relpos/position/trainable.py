"""What of a module learns, and whether a person has said so."""

from __future__ import annotations

from typing import Self

from torch import nn

from relpos.core.checks import require_flag


class Trainable(nn.Module):
    """A module whose parameters are frozen, or let learn, together.

    Attributes:
        frozen_by_name: whether it was itself asked to take no gradients, and not a model that has it.
    """

    frozen_by_name: bool = False

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As of any module. A model freezes its parameters without calling this of those inside."""
        self.frozen_by_name = not requires_grad
        return super().requires_grad_(requires_grad)

    @property
    def trainable(self) -> bool:
        """Whether any parameter takes a gradient. Set it to freeze all of them, or to let all of them learn."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @trainable.setter
    def trainable(self, value: bool) -> None:
        require_flag(value, "trainable")
        self.requires_grad_(value)
