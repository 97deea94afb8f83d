"""The interface of an engine: it computes a `Call` exactly, or says what of it is unsupported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from relpos.core import Term
from relpos.engines.call import Call

Compute = Callable[[Call], tuple[Tensor, Tensor | None]]
"""Output and log-sum-exp of a call."""


@dataclass(frozen=True)
class Way:
    """One way in which an engine computes some of the calls that it supports.

    Attributes:
        words: what is done, for `relpos.explain`.
        serves: whether it can compute a call that no earlier way serves.
        prepare: returns a function for such calls of one structure, from the first of them; it keeps nothing of that.
    """

    words: str
    serves: Callable[[Call], bool]
    prepare: Callable[[Call], Compute]


@dataclass(frozen=True)
class Shards:
    """How an engine computes the shards of a call, each with some of its keys. Rotated (`Call.rotated`), without row
    rules, in eager mode.

    Attributes:
        forward: output and log-sum-exp of a shard. Several merge, weighted with exp(lse - lse of all).
        backward: takes a shard, the output of all shards, the log-sum-exp of all, the gradients of both, and adds to
            the gradients that are wanted (`operators.Gradients`); to those of earlier shards in place where it can.
    """

    forward: Callable[[Call], tuple[Tensor, Tensor]]
    backward: Callable[..., None]


class Engine(ABC):
    """One way to compute a call. Engines never import one another.

    Attributes:
        name: what `backend=` takes.
        summary: what it is for, in a line.
        serves_any_size: whether it holds no numbers for each pair of query and key, so that every call it supports
            fits where the inputs do.
        served: the kinds of terms that it computes; None for every kind, by `Term.scores`.
        ways: the ways in which it computes calls, if there are several: the first that serves a call is taken.
        shards: how it computes shards of a call; None if it cannot.
        checked_on: kinds of device where `auto` takes it only after it has agreed with the reference; see `verdicts`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    serves_any_size: ClassVar[bool] = False
    served: ClassVar[tuple[type[Term], ...] | None] = None
    ways: ClassVar[tuple[Way, ...]] = ()
    shards: ClassVar[Shards | None] = None
    checked_on: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def unsupported(self, call: Call) -> str | None:
        """What the call needs that this engine, or this machine, does not have, in words; None if it can compute it."""

    def unknown(self, call: Call) -> str | None:
        """The name of a term of the call that is of no kind in `served`, or None."""
        for term in call.terms:
            if self.served is not None and not isinstance(term, self.served):
                return type(term).__name__
        return None

    def takes_tables(self, call: Call) -> bool:
        """Whether it reads the tables of a call (`TableLookup`) by itself, and sums their gradients; asked of calls
        that it supports once they are read."""
        return False

    def way(self, call: Call) -> Way | None:
        """The first of its ways that serves a call; None if it declares no ways."""
        for way in self.ways:
            if way.serves(call):
                return way
        return None

    def plan(self, call: Call) -> Compute:
        """What `run` does for this call and all that have its structure (`structure`), in eager mode, where nothing
        looks on: with everything decided that follows from the structure. Nothing of the call is kept."""
        way = self.way(call)
        return self.run if way is None else way.prepare(call)

    @abstractmethod
    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"] | None]:
        """Output and log-sum-exp; an engine may have no log-sum-exp where `call.return_lse` is off.

        It is called with autocast off, on a call that is not empty and that it supports.
        """
