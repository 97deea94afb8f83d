"""Whether a kernel agrees with the reference on this machine: the only process-wide state that decides anything.

An engine names in `checked_on` the kinds of device where `auto` takes it only after a check: kernels that a compiler
makes for each GPU may be wrong on one that nobody has tried. Before the first such call of an engine, device and
variant (`variant`), small calls of the variant run on the engine and the reference (`agreement`), forward and
backward. The result is kept until the process ends. An engine that differs, or raises, is passed over, and warns
once.

Nothing is run while a call is traced, transformed or captured (torch.compile, fake tensors and other dispatch modes,
torch.func, a CUDA graph). What is known counts there, and where nothing is, the engine is passed over. A compiled
function asks again by itself once it is known: call the model once as it is, `torch.no_grad()` will do.

Threads may check the same at once, which costs time only: nothing waits for another thread, which autograd's own
could be waiting for, and the first verdict stays.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.engines.agreement import Expected
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.operators import lacks_transform
from relpos.engines.variant import Size, Variant, small_call, variant_of

Key = tuple[Any, ...]
"""Engine, device and the fields of a variant: plain tuples, of which a compiled function watches its own alone."""

_agreed: dict[Key, None] = {}
_faults: dict[Key, str] = {}

_SIZES: tuple[Size, ...] = ("odd", "full")


def fault(engine: Engine, reference: Engine, call: Call) -> str | None:
    """Why `auto` passes over an engine that the call could take, or None. Checks what has not been checked, if it may.

    Args:
        engine: one that has everything the call needs.
        reference: the engine that is right.
    """
    variant = variant_of(call)
    if variant is None:
        return "no check against the reference is known for its terms"
    device = call.q.device
    key = (engine.name, device.type, device.index, *variant)
    if key in _agreed:
        return None
    if torch.compiler.is_compiling():
        return "it has not been checked on this device, or failed: call the same once outside of torch.compile"
    if key in _faults:
        return _faults[key]
    obstacle = _obstacle(call.q)
    if obstacle is not None:
        return f"it has not been checked on {device}, and nothing is run under {obstacle}: call the same once outside"
    try:
        found = _check(engine, reference, variant, device)
    except Exception as error:
        if not _is_of_memory(error):
            raise
        return f"memory ran out while it was checked on {device}"  # which says nothing of it: the next call asks again
    if found is None:
        _agreed.setdefault(key, None)
        return None
    said = f"it failed its check against the reference on {device}: {found}"
    if _faults.setdefault(key, said) is said:  # no other thread was first
        warnings.warn(
            f"backend {engine.name!r} failed its check against the reference on {device}: {found} ({variant.words()}). "
            "backend='auto' passes it over in this process; `relpos check` prints more, to report.",
            RuntimeWarning,
            stacklevel=5,  # whoever called attention
        )
    return said


def _obstacle(q: Tensor) -> str | None:
    """The context of the call that forbids running a check now, in words, or None."""
    if is_in_torch_dispatch_mode() or type(q).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return "fake tensors or another dispatch mode"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the capture of a CUDA graph"
    return lacks_transform()


def _check(engine: Engine, reference: Engine, variant: Variant, device: torch.device) -> str | None:
    """What differs between an engine and the reference, in words, or None."""
    for size in _SIZES:
        try:
            found = Expected(reference, partial(small_call, variant, size)).difference(engine, device).fault
        except Exception as error:
            if _is_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or ["no message"]
            found = f"{type(error).__name__}: {lines[0]}"
        if found is not None:
            return found
    return None


def _is_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory."""
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)
