"""Scopes in which what a mechanism says is made once: while weights do not change, and within a forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from relpos.core import Coordinates, Grid, Positions, Sequence, Terms, may_keep
from relpos.core.checks import fail, shape_of
from relpos.core.private import hooks_on_saved_tensors, writes
from relpos.position.held import Held
from relpos.position.mechanism import Mechanism


@contextmanager
def decoding(*modules: nn.Module) -> Iterator[None]:
    """While tokens are decoded one by one, biases of these modules are read from what was made for the first token.

    `LanguageModel.generate` is in such a scope. Inside it no weight of a position mechanism may change in place; where
    gradients are taken, and where `torch.func.functional_call` hands in other weights, nothing is kept.

    Args:
        modules: models or mechanisms.

    Examples:
        >>> model = relpos.LanguageModel(vocab_size=16, embed_dim=32, depth=2, num_heads=2, position="t5").eval()
        >>> cache, token = relpos.KeyValueCache(depth=2), torch.tensor([[3]])
        >>> with torch.no_grad(), relpos.decoding(model):
        ...     for _ in range(4):
        ...         token = model(token, cache=cache)[:, -1:].argmax(dim=-1)
        ...
        >>> cache.length
        4
    """
    inside = _mechanisms(modules, "modules to decode with")
    entered = [part for part in inside if part._held is None]  # of scopes inside one another the outer one counts
    for part in entered:
        part.__dict__["_held"] = Held(part)
    try:
        yield
    finally:
        for part in entered:
            part.__dict__.pop("_held", None)


@contextmanager
def reading_once(*models: nn.Module) -> Iterator[None]:
    """In each forward of these models, a mechanism that several layers share makes its terms once for all of them.

    For a stack of layers that each ask their mechanism: twelve of them that share T5's table read it once, and its
    gradient is summed once. relpos's own models hand terms down, and need no scope. What is made goes when the forward
    ends, so a training loop may stand inside as a whole. Terms are made anew, as without the scope, in a layer under
    `torch.utils.checkpoint`, which is to make all again, in compiled code, and where weights or coordinates differ.

    Args:
        models: whose forwards count: the module that is called, not one inside.

    Raises:
        ValueError: something else than a module.

    Examples:
        >>> class Stack(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.position, self.where = relpos.T5Bias(num_heads=2), relpos.Sequence(6)
        ...
        ...     def forward(self, x):  # [B, H, N, D]
        ...         for _ in range(12):
        ...             x = x + relpos.attention(x, x, x, position=self.position, queries=self.where)
        ...         return x
        ...
        >>> model, x = Stack(), torch.randn(1, 2, 6, 8)
        >>> with relpos.reading_once(model):
        ...     out = model(x)
        >>> out.shape
        torch.Size([1, 2, 6, 8])
    """
    forwards = _Forwards()
    inside = _mechanisms(models, "models whose forwards count")
    entered = [part for part in inside if "terms" not in part.__dict__]
    handles = []
    try:
        for model in models:
            handles.append(model.register_forward_pre_hook(forwards.begin))
            handles.append(model.register_forward_hook(forwards.end, always_call=True))
        for part in entered:
            part.__dict__["terms"] = _once_a_forward(part, forwards)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in entered:
            part.__dict__.pop("terms", None)


def _mechanisms(modules: tuple[nn.Module, ...], wanted: str) -> list[Mechanism]:
    for module in modules:
        if not isinstance(module, nn.Module):
            fail(wanted, shape_of(module), "Pass the model.")
    return list({part: None for module in modules for part in module.modules() if isinstance(part, Mechanism)})


class _Forwards:
    """The forwards under way in each thread, and the terms that were made in each."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Forwards, ()  # a copy of a model has none under way

    def begin(self, model: nn.Module, given: Any) -> None:
        """A hook before a forward."""
        if not torch.compiler.is_compiling():
            self._here.__dict__.setdefault("all", []).append({})

    def end(self, model: nn.Module, given: Any, output: Any) -> None:
        """A hook behind a forward, also one that raised."""
        if not torch.compiler.is_compiling():
            self._here.all.pop()

    def made(self) -> dict[Any, tuple[Terms, Any]] | None:
        """Terms by what was asked, of the innermost forward under way here."""
        under_way = self._here.__dict__.get("all")
        return under_way[-1] if under_way else None


def _once_a_forward(mechanism: Mechanism, forwards: _Forwards) -> Callable[..., Terms]:
    """`terms` of a mechanism, which looks whether the forward under way has made them."""
    make = mechanism.terms

    def terms(queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        if torch.compiler.is_compiling() or (made := forwards.made()) is None or hooks_on_saved_tensors():
            return make(queries, keys)
        device = mechanism.device
        if not may_keep(device):
            return make(queries, keys)
        where = _place(queries), _place(keys)
        if None in where:
            return make(queries, keys)
        weights = [x for part in mechanism.modules() for x in (*part._parameters.values(), *part._buffers.values())]
        asked = (
            id(mechanism), where, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device.type), *((id(x), 0 if x is None else writes(x)) for x in weights),
        )  # fmt: skip
        if asked not in made:
            made[asked] = make(queries, keys), (mechanism, queries, keys, weights)  # an id is one's while one lives
        return made[asked][0]

    return terms


def _place(coordinates: Coordinates | None) -> Any:
    """What coordinates are known by; None where they are of no known kind."""
    if isinstance(coordinates, Positions):
        return id(coordinates), writes(coordinates.values)
    return (coordinates,) if coordinates is None or type(coordinates) in (Sequence, Grid) else None
