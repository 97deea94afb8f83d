"""Calls like the one before: their checks, the choice of their engine and its own choices are not repeated.

All follow from shapes, dtypes and settings, which layers and steps repeat, and cost a small call a fifth of its time.
What was found hangs on the `Lines` of the bias, which a mechanism keeps as well: nothing is global, and a copy starts
with nothing. On a GPU nothing is kept, for there the choice may change once a kernel has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos.core import LineBias, Scale, Terms, may_keep
from relpos.core.checks import CPU
from relpos.core.kept import share
from relpos.engines.call import Call
from relpos.engines.engine import Engine

_PLACE = "last call"


@dataclass
class Familiar:
    """What is known of calls that are alike.

    Attributes:
        alike: all that their checks and the choice of an engine depend on, beside the lines.
        fits: whether such arguments passed the checks.
        engine: what `auto` chose for them.
        repeat: what this engine does for them, where it has decided once what to do.
    """

    alike: Hashable
    fits: bool = False
    engine: Engine | None = None
    repeat: Callable[[Call], Tensor] | None = None


def familiar_of(q: Tensor, k: Tensor, v: Tensor, terms: Terms, dtype: torch.dtype) -> Familiar | None:
    """What is known of a call that has a bias on lines, perhaps a scale, and nothing else beside q, k and v of one
    dtype: what the last call on these lines left, if it was alike, else a new entry in its place. None for other calls.

    Args:
        q: queries of four dimensions.
        k: keys, alike.
        v: values, alike.
        terms: of the call.
        dtype: in which it is computed.
    """
    items = terms.items
    count = len(items)
    if count == 0 or count > 2 or type(items[0]) is not LineBias or (count == 2 and type(items[1]) is not Scale):
        return None
    bias = items[0]
    values = bias.values
    # Autocast may make several dtypes one, which fit only while it is on; to compare a fake tensor's sizes fixes them.
    if type(q) is not Tensor or not q.dtype == k.dtype == v.dtype:
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and values.is_cpu and may_keep(CPU)):
        return None
    alike = (
        q.shape, k.shape, v.shape, values.shape, q.dtype, values.dtype, dtype,
        k.stride(3), v.stride(3), torch.is_grad_enabled(), values.requires_grad,
    )  # fmt: skip
    kept = share(bias.lines)
    last: Familiar | None = kept.get(_PLACE)
    if last is None or last.alike != alike:
        last = kept[_PLACE] = Familiar(alike)
    return last
