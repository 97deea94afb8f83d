"""Warn once if a learned position stays frozen at its initial values while the rest of a model is trained.

PEFT freezes every parameter it is not told to train. A table that starts at 0 then stays 0, and the model has no
position.

    frozen       none of its parameters requires a gradient
    initial      no optimizer and no checkpoint has written to them
    trained      a call in training mode, with gradients that reach some parameter

Freezing a position explicitly gives no warning: `trainable=False`, `mechanism.trainable = False`, or
`positions.requires_grad_(False)`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from relpos.adapters.common.above import Above
from relpos.core.private import writes

PEFT = 'modules_to_save=["positions"]'
"""The PEFT option that trains an inserted position."""


@dataclass
class FrozenWarning:
    """The one warning, shared by all stacks of a model.

    Attributes:
        model: the model whose position was replaced. given: whether the warning was given.
    """

    model: Above
    given: bool = False

    def give(self, *, trained: bool) -> None:
        """Warn if the model is trained: gradients reach it, or any of its parameters requires one."""
        model = self.model()
        if model is None or not (trained or any(x.requires_grad for x in model.parameters())):
            return
        self.given = True
        warnings.warn(
            f"the position of {type(model).__name__} is trainable but frozen while the model trains: it "
            "keeps its initial values, and tables of 0 have no effect. Unfreeze its `positions`, with "
            f"PEFT by {PEFT}; or, if intended, pass trainable=False to replace_position.",
            RuntimeWarning,
            stacklevel=2,
        )


class WriteCounts:
    """How often parameters were written to, by PyTorch's version counter: an optimizer step counts, `Module.to` does
    not."""

    def __init__(self, module: nn.Module) -> None:
        self._counted = [(weakref.ref(x), writes(x)) for x in module.parameters()]

    def unwritten_since(self, module: nn.Module) -> bool:
        """Whether the parameters are the same objects and unwritten since."""
        own = list(module.parameters())
        return len(own) == len(self._counted) and all(
            ref() is x and count == writes(x) for (ref, count), x in zip(self._counted, own, strict=True)
        )


def frozen_unintentionally(module: nn.Module) -> bool:
    """Whether there are parameters not explicitly frozen, and none of them requires a gradient."""
    found = list(_not_by_name(module))
    return bool(found) and not any(found)


def _not_by_name(module: nn.Module) -> Iterator[bool]:
    """Whether each parameter requires a gradient, leaving out explicitly frozen ones."""
    if not getattr(module, "_frozen_by_name", False):
        yield from (x.requires_grad for x in module._parameters.values() if x is not None)
        for part in module.children():
            yield from _not_by_name(part)


def keep_sizes(module: nn.Module, off: list[Tensor | None], state_dict: dict[str, Tensor], prefix: str) -> None:
    """Let weights of another size load: a module's parameters among those that are `off` keep their values then.

    No call reads them. `state_dict` gets these values, and a warning says so.
    """
    for name, own in module._parameters.items():
        saved = state_dict.get(prefix + name)
        if own is None or saved is None or saved.shape == own.shape or not any(own is one for one in off):
            continue
        state_dict[prefix + name] = own.detach()
        warnings.warn(
            "the model's own position, which is switched off, has another size in these weights: it keeps its present "
            "values, which only relpos.restore would use",
            stacklevel=2,
        )
