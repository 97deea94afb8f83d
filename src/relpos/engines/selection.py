"""Which engine computes a call: chosen here and nowhere else.

One asked for by name never falls back; `auto` takes the first of `ENGINES` that has everything the call needs, does not
say itself that another is faster and, where it must, agrees with the reference on this device (`verdicts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relpos.core.checks import require_name
from relpos.core.private import exporting
from relpos.engines import verdicts
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.flex import FLEX
from relpos.engines.reference import REFERENCE
from relpos.engines.sdpa import SDPA
from relpos.engines.streaming import STREAMING
from relpos.engines.triton import TRITON

ENGINES: tuple[Engine, ...] = (TRITON, STREAMING, SDPA, FLEX, REFERENCE)
"""In the order in which `auto` asks them."""
BY_NAME = {engine.name: engine for engine in ENGINES}


def backends() -> dict[str, str]:
    """The engines' names, and what each is for, in the order `auto` asks them.

    Examples:
        >>> list(relpos.backends())
        ['triton', 'streaming', 'sdpa', 'flex', 'reference']
    """
    return {engine.name: engine.summary for engine in ENGINES}


def require_backend(backend: object) -> None:
    """Raise unless `backend` is "auto" or an engine's name."""
    if not (isinstance(backend, str) and (backend == "auto" or backend in BY_NAME)):
        require_name(backend, ["auto", *BY_NAME], "a backend")


@dataclass
class Chosen:
    """The engine of a call.

    Attributes:
        engine: that computes it.
        passed_over: why those that `auto` asked before it do not.
        lasts: whether the same would be chosen again.
    """

    engine: Engine
    passed_over: dict[str, str] = field(default_factory=dict)
    lasts: bool = True


def choose(call: Call, backend: str) -> Chosen:
    """The engine of a call; see the file's head."""
    require_backend(backend)
    if backend != "auto":
        engine = BY_NAME[backend]
        if (lack := engine.unsupported(call)) is not None:
            raise NotImplementedError(
                f"expected a backend with all the call needs; got {backend!r}, and backend {backend!r} lacks {lack}. "
                "Use backend='auto' or 'reference'."
            )
        return Chosen(engine)
    if exporting():
        # Of any size, as a program of an example may serve: sizes that decided here would bound them all.
        return Chosen(SDPA if SDPA.unsupported(call) is None else REFERENCE)
    choice = Chosen(REFERENCE)  # used if no engine is preferred: one that serves any size, else the reference
    for engine in ENGINES:
        if (lack := engine.unsupported(call)) is not None:
            choice.passed_over[engine.name] = f"it lacks {lack}"
        elif (slower := engine.not_preferred(call)) is not None:
            choice.passed_over[engine.name] = slower
            choice.engine = engine if engine.serves_any_size else choice.engine
        elif call.q.device.type in engine.checked_on and (fault := verdicts.fault(engine, REFERENCE, call)) is not None:
            choice.passed_over[engine.name] = fault.words
            choice.lasts = choice.lasts and fault.lasts
        else:
            choice.engine = engine
            break
    choice.passed_over.pop(choice.engine.name, None)
    return choice
