"""All about a call but its numbers is its structure; a structure is planned once, and a plan is run with numbers.

Layers and steps repeat their calls with other numbers. What the checks say of such calls, which engine computes them
and what that engine prepares follow from their structure, and are found once, for the first of them: a plan. Plans hold
no tensor and stand in one table, for most of what calls are made of (terms, masks) is made anew for each.

A call has no structure where something looks on that may change the choice or must see all that is done (a compiler, a
mode, a tracer, a transform, the capture of a CUDA graph), and where an argument is of a class that is not relpos's own.
It is then planned for itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core import Rotation
from relpos.core.checks import without_autocast
from relpos.core.structure import structure_of
from relpos.core.terms.table_lookup import read_tables
from relpos.core.visibility import hides_nothing
from relpos.engines.arguments import Arguments
from relpos.engines.call import Call
from relpos.engines.engine import Compute
from relpos.engines.selection import choose
from relpos.engines.unseen import without_unseen

Structure = Hashable


def structure_of_call(given: Arguments) -> Structure | None:
    """All that a plan depends on, or None."""
    if not given.may_have_structure:
        return None
    tensors: list[Tensor] = []
    parts = structure_of((given.q, given.k, given.v, given.terms, given.mask), tensors)
    if parts is None:
        return None
    same: Hashable = None
    if len(set(map(id, tensors))) < len(tensors):  # what is saved for the gradient is saved once
        same = tuple(next(at for at, x in enumerate(tensors) if x is y) for y in tensors)
    return (
        parts, same, given.dtype, given.autocast, torch.is_grad_enabled(), given.scale, given.dropout,
        given.return_lse, given.backend,
    )  # fmt: skip


class Plan(NamedTuple):
    """How calls of one structure are computed.

    Attributes:
        scale: the factor on the content product.
        compute: what is done for these calls.
    """

    scale: float
    compute: Compute


def run_planned(given: Arguments) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp, by the plan of all calls of this structure, which the first of them makes."""
    structure = structure_of_call(given)
    if structure is None:
        given = given.read()
    plan = None if structure is None else PLANS.get(structure)
    if plan is None:
        plan = make_plan(given, structure)
    call = given.unchecked_call(plan.scale)
    if given.dropout > 0:
        call = call.seeded()
    if not given.autocast:
        return plan.compute(call)
    with without_autocast(call.q.device):
        return plan.compute(call)


def make_plan(given: Arguments, structure: Structure | None) -> Plan:
    """The plan of a call, checked; kept for others of its structure where it has one.

    Engines are chosen, and checks made, with all tables read.
    """
    assert given.backend is not None, "it is computed"
    known, backend = given.read(), given.backend
    call = known.call()
    choice = choose(call, backend)
    engine = choice.engine
    on_meta = call.q.is_meta and backend == "auto" and not is_in_torch_dispatch_mode()
    mask = call.mask
    hides_tokens = mask is not None and (
        mask.blocks is not None or not hides_nothing(mask, call.q.shape[2], call.k.shape[2])
    )
    compute: Compute = Call.empty_result if call.is_empty or on_meta else engine.run
    run: Compute = engine.run
    reads = known is not given
    if structure is not None and compute == engine.run:
        if reads and engine.takes_tables(as_given := given.unchecked_call(call.scale)):
            call, reads = as_given, False
        compute = engine.plan(call)
    if reads:
        compute, run = _reading_tables(compute), _reading_tables(run)
    rotation = call.terms.one(Rotation)
    if rotation is not None and rotation.values:
        compute, run = _turning_values(compute), _turning_values(run)
    if hides_tokens:
        compute = _hiding_tokens(compute, run)
    plan = Plan(call.scale, compute)
    if structure is not None and choice.lasts:
        PLANS.keep(structure, plan)
    return plan


def _reading_tables(compute: Compute) -> Compute:
    """The same for calls with tables that are not read."""
    return lambda call: compute(replace(call, terms=read_tables(call.terms)))


def _turning_values(compute: Compute) -> Compute:
    """The same for a `Rotation` that turns values, and the output back: engines turn queries and keys alone."""

    def turned(call: Call) -> tuple[Tensor, Tensor | None]:
        rotation = call.terms.of(Rotation)[0]
        output, lse = compute(replace(call, v=rotation.turn_values(call.v)))
        return rotation.turn_back(output), lse

    return turned


def _hiding_tokens(compute: Compute, run: Compute) -> Compute:
    """The same where the mask may hide tokens from all others: what these hold must not matter, not even NaN.

    Args:
        compute: for calls as they are. run: for those in which tokens were hidden, whose structure is another.
    """

    def hidden(call: Call) -> tuple[Tensor, Tensor | None]:
        shown = without_unseen(call)
        if shown is not call and call.q.is_cpu:  # where it is asked whether anything must be hidden
            return run(shown)
        return compute(shown)

    return hidden


_MOST = 1024


class Plans:
    """Plans by structure, the newest of them. Threads may share it: one that finds nothing makes a plan of its own."""

    def __init__(self, most: int = _MOST) -> None:
        self._plans: dict[Structure, Plan] = {}
        self._lock, self._most = Lock(), most

    def get(self, structure: Structure) -> Plan | None:
        """The plan of a structure, if there is one."""
        return self._plans.get(structure)

    def keep(self, structure: Structure, plan: Plan) -> None:
        """Keep a plan; the oldest goes where there are too many."""
        with self._lock:
            if len(self._plans) >= self._most:
                self._plans.pop(next(iter(self._plans)))
            self._plans[structure] = plan

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()


PLANS = Plans()
