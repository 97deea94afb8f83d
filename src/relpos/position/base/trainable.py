"""Whether a module's parameters learn, and whether the user has set that."""

from __future__ import annotations

from torch import nn

from relpos.core.checks import require_flag


class Trainable(nn.Module):
    """A module whose parameters are frozen or unfrozen together."""

    _frozen_by_name = False  # whether it was frozen itself, not as a part of a model

    @property
    def trainable(self) -> bool:
        """Whether any parameter takes a gradient. Set it to freeze all of them, or to let all of them learn."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @trainable.setter
    def trainable(self, value: bool) -> None:
        require_flag(value, "trainable")
        self._frozen_by_name = not value
        self.requires_grad_(value)
