"""Checks of a request for a comparison, before any data are read. `CompareRequest` has the fields."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from relpos.comparison.callables import find_build, find_function
from relpos.comparison.choices import CHOICES, WHATS, find_choice
from relpos.core.checks import fail, require_choice, require_flag, require_int, shape_of
from relpos.position import find
from relpos.position.base.outside import files_in, with_files
from relpos.train import OURS, Procedure, require_precision, resolve_device
from relpos_command.option import options_of
from relpos_command.requests import CompareRequest

EVERY = "all"
"""In place of names: every position that suits the task."""
STANDARD = "standard"
"""In place of names: the task's wider choice."""
OWN = "own"
"""The built-in position of the user's model; its `build` must understand the name."""


def checked(request: CompareRequest) -> tuple[CompareRequest, Procedure]:
    """The request with its names as tuples, and the procedure that builds, trains and measures its models.

    Raises:
        ValueError: something is wrong that does not depend on the data.
    """
    request = replace(
        request, positions=_names(request.positions, "positions"), choices=_names(request.choices, "choices")
    )
    if request.positions is not None:
        request = replace(request, positions=tuple(map(with_files, request.positions)))
    procedure = _procedure(request)
    require_asked(request, procedure)
    if request.recipe is not None and not isinstance(request.recipe, Mapping):
        fail(
            "recipe to be a dict of fields", shape_of(request.recipe), 'Pass for example recipe={"weight_decay": 0.1}.'
        )
    if request.out is not None and not isinstance(request.out, str | os.PathLike):
        fail("out to be the path of a folder", shape_of(request.out), "Leave it out for one under runs/.")
    return request, procedure


def require_values(request: Any) -> None:
    """Raise unless the flags of a request are flags, and its whole numbers are within their bounds."""
    options = options_of(type(request))
    for one in fields(request):
        value, how = getattr(request, one.name), options[one.name]
        if isinstance(one.default, bool):
            require_flag(value, one.name)
        elif how.bounds is not None and not (value is None and one.default is None):
            require_int(value, one.name, at_least=how.bounds[0])


def require_asked(request: CompareRequest, procedure: Procedure = OURS) -> None:
    """Raise errors of a request that do not depend on the task, before many images are read."""
    require_values(request)
    positions, what, choices = request.positions, request.what, request.choices
    if positions == ():
        fail("at least one position", "none", "Name some, e.g. --positions none,learned,relative_2d.")
    for name in () if positions in (None, (EVERY,), (STANDARD,)) else positions:
        if procedure.build is None or name != OWN:
            find(name)
    require_choice(what, "--what", WHATS)
    if what != "position" and not procedure.is_ours:
        fail("what='position' with your own model, step or evaluate", repr(what), "Leave what out.")
    if what == "position":
        if choices is not None:
            fail("--choices only with --what attention, norm or optimizer", "--what position", "Use --positions.")
    else:
        if positions is not None and (len(positions) != 1 or positions[0] in (EVERY, STANDARD)):
            fail(f"one position for all models of --what {what}", ", ".join(positions), "Name one, or leave it out.")
        if choices == ():
            fail("at least one choice", "none", f"Name some, e.g. --choices {','.join(list(CHOICES[what])[:2])}.")
        for name in () if choices is None else choices:
            find_choice(what, name)
    require_precision(request.precision)
    resolve_device(request.device)


def changes_of(request: CompareRequest) -> dict[str, Any]:
    """The requested changes of the recipe by its fields, except the steps."""
    own = {"batch_size": request.batch_size, "learning_rate": request.lr}
    changes = [*(request.recipe or {}).items(), *own.items()]
    return {name: value for name, value in changes if value is not None}


def as_typed(request: CompareRequest) -> dict[str, str]:
    """The request's model, step and evaluate that were named, and the mechanisms of files, as they were typed."""
    files = {name: file.typed for name, file in files_in(request.positions or ()).items()}
    functions = {"model": request.model, "step": request.step, "evaluate": request.evaluate}
    return {name: typed for name, typed in functions.items() if isinstance(typed, str)} | files


def _procedure(request: CompareRequest) -> Procedure:
    better = request.better
    if request.evaluate is None:
        if better is not None:
            fail("better only with evaluate", f"better={better!r} alone", "Leave it out: lower is better for a loss.")
    elif better is None:
        fail("better='higher' or 'lower' with evaluate", "none", "Say whether higher or lower figures are better.")
    else:
        require_choice(better, "better", ("higher", "lower"))
    return Procedure(
        find_build(request.model),
        find_function(request.step, "step(model, batch)"),
        find_function(request.evaluate, "evaluate(model, split)"),
        "lower" if better is None else better,
    )


def _names(asked: Any, what: str) -> tuple[str, ...] | None:
    """One name or several; None if left out."""
    if asked is None or isinstance(asked, str):
        return None if asked is None else (asked,)
    if not isinstance(asked, Iterable):
        fail(f"{what} to be names", shape_of(asked), f'Pass {what}=["NAME", ...], or leave it out.')
    return tuple(asked)
