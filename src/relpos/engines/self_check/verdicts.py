"""Whether an engine's kernels agree with the reference on this machine: what `auto` remembers of this machine.

`checked_on` of an engine names the device types on which `auto` uses it only after a check, because kernels that are
compiled for each GPU may be wrong on one that nobody has tried. Before the first call of a variant (see `variant`) on a
device, small calls of it run on the engine and on the reference (see `agreement`), forward and backward. The result is
kept until the process ends. An engine that disagrees or raises is not used, with one warning.

No check runs while a call is traced, transformed or captured (torch.compile, fake tensors and other dispatch modes,
torch.func, CUDA graphs). Known results apply there; without one the engine is not used. A compiled function is traced
again once the result is known: call the model once without compiling it, `torch.no_grad()` is enough.

Two threads may run the same check, which only costs time, and the first result counts. No thread waits for another,
which could be waiting for it in autograd.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core import LineBias, Rows, Term
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.operators import lacks_transform
from relpos.engines.self_check.agreement import Expected
from relpos.engines.self_check.variant import Size, Variant, small_call, variant_of

Key = tuple[Any, ...]
"""Engine, device and the fields of a variant: plain values, so that compiled functions guard only on their own key."""

_agreed: dict[Key, None] = {}
_faults: dict[Key, str] = {}

_SIZES: tuple[Size, ...] = ("odd", "full")


@dataclass(frozen=True)
class Fault:
    """Why `auto` must not use an engine for a call, in words, and whether this also holds for the next call."""

    words: str
    lasts: bool = False


def fault(engine: Engine, reference: Engine, call: Call) -> Fault | None:
    """Why `auto` must not use an engine for a call, or None. Runs the check if that is possible and not done yet.

    Args:
        engine: an engine that supports the call.
        reference: the reference engine.
    """
    variant = variant_of(call)
    if variant is None:
        return Fault("its terms have no check against the reference", lasts=True)
    device = call.q.device
    key = (engine.name, device.type, device.index, *variant)
    if key in _agreed:
        return None
    if torch.compiler.is_compiling():
        return Fault("it is unchecked on this device, or failed its check: make this call once outside torch.compile")
    if key in _faults:
        return Fault(_faults[key], lasts=True)
    obstacle = _obstacle(call.q)
    if obstacle is not None:
        words = f"it is unchecked on {device}, and cannot be checked under {obstacle}: make this call once outside"
        return Fault(words)
    try:
        found = _check(engine, reference, variant, device)
    except Exception as error:
        if not _is_of_memory(error):
            raise
        return Fault(f"memory ran out while it was checked on {device}")  # the next call checks again
    if found is None:
        _agreed.setdefault(key, None)
        return None
    said = f"it failed its check against the reference on {device}: {found}"
    if _faults.setdefault(key, said) is said:  # no other thread has warned
        warnings.warn(
            f"backend {engine.name!r} failed its check against the reference on {device}: {found} ({variant.words()}). "
            "backend='auto' skips it in this process; `relpos check` prints details for a report.",
            RuntimeWarning,
            stacklevel=5,  # whoever called attention
        )
    return Fault(said, lasts=True)


def _obstacle(q: Tensor) -> str | None:
    """The context in which no check can run, in words, or None."""
    if is_in_torch_dispatch_mode() or type(q).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return "fake tensors or another dispatch mode"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the capture of a CUDA graph"
    return lacks_transform()


def _check(engine: Engine, reference: Engine, variant: Variant, device: torch.device) -> str | None:
    """How an engine disagrees with the reference, in words, or None."""
    makes = [partial(small_call, variant, size) for size in _SIZES]
    makes += [partial(_with_table, variant)] * any(kind == "LineBias" for kind, *_ in variant.terms)
    for make in makes:
        try:
            expected = Expected(reference, make)
            if expected.call.terms.of(TableLookup) and not engine.takes_tables(expected.call):
                continue
            found = expected.difference(engine, device).fault
        except Exception as error:
            if _is_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or ["no message"]
            found = f"{type(error).__name__}: {lines[0]}"
        if found is not None:
            return found
    return None


def _with_table(variant: Variant) -> Call:
    """A small call in which a line bias is a table that an engine reads, three neighbouring entries from one row."""

    def unread(term: Term) -> Term:
        if not isinstance(term, LineBias):
            return term
        count = term.values.shape[1]
        rows = Rows(torch.arange(count, device="cpu") // 3, -(-count // 3))
        return TableLookup(term.values.detach()[:, ::3].mT.contiguous().requires_grad_(), rows, term.lines)

    call = small_call(variant, _SIZES[0])
    return replace(call, terms=call.terms.each(unread))


def _is_of_memory(error: Exception) -> bool:
    """Whether an error says that a device or the host ran out of memory."""
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)
