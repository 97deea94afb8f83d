"""One warning where a position that learns is frozen at its start while the rest of a model is trained.

PEFT freezes all that it is not told of. A table that starts from 0 then stays so, and the model has no position at all.

    frozen       none of its parameters takes a gradient
    at its start nothing was ever written into them: neither by an optimizer nor from a file
    trained      a call in training mode, with gradients that reach something

Who freezes a position by name has meant it: `trainable=False`, `mechanism.trainable = False`, or
`positions.requires_grad_(False)`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from relpos.adapters.above import Above
from relpos.core.private import writes

PEFT = 'modules_to_save=["positions"]'
"""What PEFT is to be told to train a position that was put in."""


@dataclass
class Notice:
    """What all stacks of a model have in common: one warning.

    Attributes:
        model: what was replaced in. said: whether it was said.
    """

    model: Above
    said: bool = False

    def give(self, *, trained: bool) -> None:
        """Warn where the model is trained: where gradients reach it, or any of its parameters takes one."""
        model = self.model()
        if model is None or not (trained or any(x.requires_grad for x in model.parameters())):
            return
        self.said = True
        warnings.warn(
            f"the position of {type(model).__name__} learns, and is frozen at its start while the model is trained: it "
            "stays as it was made, and says nothing where its tables start from 0. Let its `positions` learn, with "
            f"PEFT by {PEFT}; or, if it is meant, pass trainable=False to replace_position.",
            RuntimeWarning,
            stacklevel=2,
        )


class Writes:
    """How often parameters were written to, as PyTorch counts: `Module.to` is none, an optimizer's step is."""

    def __init__(self, module: nn.Module) -> None:
        self._counted = [(weakref.ref(x), writes(x)) for x in module.parameters()]

    def none_since(self, module: nn.Module) -> bool:
        """Whether they are the same objects, and nothing was written into them."""
        own = list(module.parameters())
        return len(own) == len(self._counted) and all(
            ref() is x and count == writes(x) for (ref, count), x in zip(self._counted, own, strict=True)
        )


def frozen_unmeant(module: nn.Module) -> bool:
    """Whether there are parameters that nobody froze by name, and none that takes a gradient."""
    found = list(_not_by_name(module))
    return bool(found) and not any(found)


def _not_by_name(module: nn.Module) -> Iterator[bool]:
    """Whether each parameter takes a gradient, without those that were frozen by name."""
    if not getattr(module, "_frozen_by_name", False):
        yield from (x.requires_grad for x in module._parameters.values() if x is not None)
        for part in module.children():
            yield from _not_by_name(part)
