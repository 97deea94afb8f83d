"""Find the stacks of a model by the exact full names of its classes.

A family is a file with two dictionaries, keyed by class name. `STACKS` has functions that return the stacks a module of
the class holds. `READS` has the methods that the mixins override or depend on; their source has a fingerprint. A family
imports nothing of the other library, and is imported only when a model is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from relpos.adapters.common.kinds import path_of
from relpos.adapters.common.libraries import strange
from relpos.adapters.replacements.repositioned import CHILD
from relpos.adapters.replacements.stacks import Given, Stack
from relpos.core.checks import fail

Finder = Callable[[str, Any, Given], Iterator[Stack]]
FAMILIES = (
    "vit",
    "beit",
    "swin",
    "torchvision_vit",
    "torchvision_windows",
    "torchvision_mvit",
    "bert",
    "gpt2",
    "llama",
    "t5",
    "torch_attention",
)


@cache
def _finders() -> dict[str, Finder]:
    """The `STACKS` of all families, by class."""
    return {path: finder for family in FAMILIES for path, finder in _family(family).STACKS.items()}


@cache
def reads() -> dict[str, tuple[str, ...]]:
    """The methods that all families depend on, by class, as in `kinds.Replaced.reads`."""
    return {path: names for family in FAMILIES for path, names in _family(family).READS.items()}


def _family(name: str) -> Any:
    return import_module(f"relpos.adapters.replacements.{name}")


def switches(path: str) -> bool:
    """Whether a class calls the attention function that its configuration selects."""
    return path.startswith("transformers.")


def require_known_source(model: nn.Module) -> None:
    """Raise if the installed source of a class in a model is not a tested one."""
    for path in sorted({path_of(type(module)) for module in model.modules()} & reads().keys()):
        reason = strange(path, reads()[path], switches=switches(path))
        if reason:
            remedy = "Install that version, or pass force=True: with a position like its own, outputs must not change."
            fail("a tested version of the library", reason, remedy)


def stacks_of(model: nn.Module, given: Given) -> list[Stack]:
    """The stacks of a model.

    Raises:
        ValueError: there is none, or one cannot be served.
    """
    refused = _family("torch_attention").REFUSED
    for name, module in model.named_modules():
        if path_of(type(module)) in refused:
            came = f"{type(module).__name__} ({name or 'the model itself'})"
            fail("an encoder", came, refused[path_of(type(module))])
    found = [
        stack
        for name, module in model.named_modules()
        if (finder := _finders().get(path_of(type(module)))) is not None
        for stack in finder(name, module, given)
    ]
    found = found or _layers_alone(model, given)
    if not found:
        known = ", ".join(sorted({".".join((path.split(".")[0], path.split(".")[-1])) for path in _finders()}))
        fail("a model whose attention can be found", type(model).__name__, f"Known are {known}, nn.MultiheadAttention.")
    for stack in found:
        if given.causal is not None and stack.site.causal != given.causal:
            came = f"causal={given.causal} for {type(stack.holder).__name__}, which has {stack.site.causal}"
            fail("causal= equal to the model's", came, "Leave causal out.")
        _require_free(stack)
    return found


def _layers_alone(model: nn.Module, given: Given) -> list[Stack]:
    """PyTorch's attention layers outside any encoder, in a user's own module."""
    found: list[Stack] = _family("torch_attention").layers_alone(model, given)
    return found


def _require_free(stack: Stack) -> None:
    """Raise if the child's name is taken, or a module has its own `forward` attribute."""
    if hasattr(stack.holder, CHILD):
        came = f"{type(stack.holder).__name__}, which has one"
        fail(f"a model without a child named {CHILD!r}", came, "Rename it.")
    for module in (*stack.layers, *(one for one, _ in (*stack.tokens, *stack.others))):
        if "forward" in vars(module):
            came = f"{type(module).__name__} with its own"
            fail("modules whose forward is not overridden", came, "Replace before accelerate adds hooks.")
