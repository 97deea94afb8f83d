"""Terms that a mechanism makes once within the scopes of `position/base/scope.py`, and when they may be used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from relpos.core import Coordinates, Graph, Grid, Positions, Sequence, Terms, may_cache
from relpos.core.private import hooks_on_saved_tensors, writes


class DecodingTerms(dict[Any, Terms]):
    """Terms by the arguments they were asked with, within `decoding`. They are valid only while their mechanism has its
    original tensors: `torch.func.functional_call` replaces these for one call."""

    def __init__(self, mechanism: nn.Module) -> None:
        super().__init__()
        groups = (group for part in mechanism.modules() for group in (part._parameters, part._buffers))
        self._originals = [(group, name, x) for group in groups for name, x in group.items()]

    def is_valid(self) -> bool:
        """Whether the mechanism still has its original tensors."""
        for group, name, x in self._originals:  # noqa: SIM110 - a generator takes twice as long
            if group.get(name) is not x:
                return False
        return True


class _Forwards(threading.local):
    """The current forwards of this thread, outermost first, each with the terms made in it."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, dict[Any, tuple[Terms, Any]]]] = []


_forwards = _Forwards()


def begin_forward(model: nn.Module, given: Any) -> None:
    """A hook before the forward of a model in `reading_once`."""
    if not torch.compiler.is_compiling():
        end_forward(model)  # an earlier one that Ctrl-C interrupted
        _forwards.stack.append((model, {}))


def end_forward(model: nn.Module, given: Any = None, output: Any = None) -> None:
    """A hook after it, also if it raised."""
    if torch.compiler.is_compiling():
        return
    stack = _forwards.stack
    for index in reversed(range(len(stack))):
        if stack[index][0] is model:
            del stack[index:]
            return


class TermsOfForward:
    """Replaces `terms` of a mechanism within `reading_once`: returns the terms that the current forward already made.

    Args:
        mechanism: the mechanism, whose instance attribute `terms` this becomes. make: its method `terms`.
    """

    changes = 0
    """Number of settings changed so far on mechanisms in such a scope."""

    def __init__(self, mechanism: nn.Module, make: Callable[..., Terms]) -> None:
        self.mechanism, self.make = mechanism, make

    def __call__(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        if torch.compiler.is_compiling() or not _forwards.stack or hooks_on_saved_tensors():
            return self.make(queries, keys)
        key_and_inputs = self._key_and_inputs(queries, keys)
        if key_and_inputs is None:
            return self.make(queries, keys)
        key, inputs = key_and_inputs
        terms_by_key = _forwards.stack[-1][1]
        if key not in terms_by_key:
            terms_by_key[key] = self.make(queries, keys), inputs
        return terms_by_key[key][0]

    def _key_and_inputs(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Any, Any] | None:
        """A key of all that the terms depend on, and the objects to keep alive because the key holds their ids."""
        device: torch.device = self.mechanism.device  # type: ignore[assignment]
        tokens = _key_of(queries), _key_of(keys)
        if device.type == "meta" or None in tokens or not may_cache(device):
            return None
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        tensors = [
            x for part in self.mechanism.modules() for x in (*part._parameters.values(), *part._buffers.values())
        ]
        weights = [x for x in tensors if x is not None]
        if any(x.is_inference() for x in weights):  # they have no version counter
            return None
        key = (
            id(self.mechanism), TermsOfForward.changes, tokens, stream, torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type),
            *((id(x), writes(x), x.requires_grad) for x in weights),
        )  # fmt: skip
        return key, (self.mechanism, queries, keys, weights)


def drop_terms_of_forward(attributes: dict[str, Any]) -> None:
    """Remove a `TermsOfForward` from a module's attributes, or from a copy's, which would ask the original."""
    if isinstance(attributes.get("terms"), TermsOfForward):
        del attributes["terms"]


def _key_of(coordinates: Coordinates | None) -> Any:
    """A key for coordinates; None if their changes cannot be seen."""
    if isinstance(coordinates, Positions | Graph):
        values = coordinates.values if isinstance(coordinates, Positions) else coordinates.distances
        return None if values.is_inference() else (id(coordinates), writes(values))
    return (coordinates,) if coordinates is None or type(coordinates) in (Sequence, Grid) else None
