"""How terms combine: `a + b`, and which terms contradict each other.

`Terms` is an ordered, immutable collection. Each kind of term defines in `join` how it combines with another of its
kind: two rotations, two soft caps, two sinks or two different scales raise; line biases on the same lines are added
into one; the others are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

from relpos.core.checks import fail, shape_of
from relpos.core.tree import Movable, register, unchecked

Queries = Float[Tensor, "B H N D"]
Keys = Float[Tensor, "B H M D"]
"""Of all query heads, not rotated, in float32 or wider."""


class Term(Movable):
    """Base of the terms. `a + b` joins terms into `Terms`.

    Attributes:
        adds_scores: whether it adds to the scores or the sum of their exponentials; without such terms, attention is
            PyTorch's own.
        meets_plain: whether its scores depend on queries or keys, which it takes unrotated.
    """

    adds_scores: ClassVar[bool] = True
    meets_plain: ClassVar[bool] = True

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms(self) + other

    def narrow(self, queries: slice, keys: slice) -> Term:
        """The same term for some consecutive queries and keys."""
        return self

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise unless it fits the queries, keys and values of a call.

        Raises:
            ValueError: it does not fit; the message says what was expected, what came and what to do.
        """

    def scores(
        self,
        q: Queries,
        k: Keys,
        scale: float,
        allowed: Bool[Tensor, "#B #H N M"] | None,
    ) -> Float[Tensor, "*#B #H #N #M"] | None:
        """What it adds to the score of every pair: its dense meaning.

        Args:
            q: not rotated, float32 or wider.
            k: the same for keys, repeated to the query heads.
            scale: of the content product.
            allowed: True where the mask allows a pair; None for everywhere.

        Returns:
            A tensor that broadcasts to `[B, H, N, M]`; None if the term adds nothing to the score.
        """
        return None

    def join(self, other: Self) -> Term | None:
        """How this term combines with a later one of its kind: the one term that replaces both, or None to keep both.

        Raises:
            ValueError: the two contradict each other.
        """
        return None


class Single(Term):
    """A term that may occur once.

    Attributes:
        one_of: a name that kinds share which exclude one another, or None.
    """

    one_of: ClassVar[str | None] = None

    def join(self, other: Self) -> NoReturn:
        """Two of them contradict each other, equal or not."""
        fail(f"at most one {type(self).__name__}", "two", "Combine mechanisms so that only one has it.")


T = TypeVar("T", bound=Term)


@register("relpos.core.algebra.Terms")
@dataclass(frozen=True, eq=False, init=False)
class Terms(Movable):
    """An ordered collection of terms that do not contradict one another. `Terms()` says nothing.

    Mechanisms make them; attention takes them as `position=`.

    Args:
        terms: in order; two line biases on the same lines become one.
        items: the same by keyword.

    Raises:
        ValueError: no terms, or two that contradict each other.

    Examples:
        >>> bias = relpos.T5Bias(num_heads=2, bidirectional=False)
        >>> terms = bias.terms(relpos.Sequence(100)) + relpos.Softcap(30.0)  # once, for every layer
        >>> [type(term).__name__ for term in terms]
        ['LineBias', 'Scale', 'Softcap']
        >>> last = terms.narrow(slice(99, 100), slice(0, 100))  # of one query and all keys
        >>> last.one(relpos.LineBias).lines.query.shape
        torch.Size([1])
    """

    items: tuple[Term, ...]

    def __init__(self, *terms: Term, items: Iterable[Term] = ()) -> None:  # by name: `dataclasses.replace`, and FSDP
        joined: list[Term] = []
        for term in (*terms, *items):
            _join(joined, term)
        object.__setattr__(self, "items", tuple(joined))

    def __iter__(self) -> Iterator[Term]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms(*self.items, *(other.items if isinstance(other, Terms) else (other,)))

    def of(self, kind: type[T]) -> tuple[T, ...]:
        """The terms of one kind, in order."""
        return tuple(term for term in self.items if isinstance(term, kind))

    def one(self, kind: type[T]) -> T | None:
        """The term of a kind that occurs at most once."""
        for term in self.items:
            if isinstance(term, kind):
                return term
        return None

    def without(self, *kinds: type[Term]) -> Terms:
        """The terms that are of none of these kinds."""
        return self._of([term for term in self.items if not isinstance(term, kinds)])

    def narrow(self, queries: slice, keys: slice) -> Terms:
        """The same terms for some consecutive queries and keys: one step of decoding, a block, a shard."""
        return self.each(lambda term: term.narrow(queries, keys))

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise unless every term fits the queries, keys and values of a call."""
        for term in self:
            term.check(q, k, v)

    def each(self, change: Callable[[Term], Term]) -> Terms:
        """The terms, each replaced by `change(term)`. Nothing is joined, even where two now have the same lines."""
        return self._of(change(term) for term in self)

    @staticmethod
    def _of(terms: Iterable[Term]) -> Terms:
        return unchecked(Terms, items=tuple(terms))


def _join(joined: list[Term], term: Term) -> None:
    """Append `term`, or fold it into an earlier one, or raise where they contradict."""
    if not isinstance(term, Term):
        fail("terms (LineBias, Rotation, ...)", shape_of(term), "Call mechanism.terms(queries, keys) first.")
    for index, other in enumerate(joined):
        related = isinstance(other, Single) and (isinstance(term, type(other)) or isinstance(other, type(term)))
        if isinstance(other, Single) and isinstance(term, Single) and other.one_of is not None:
            related = related or other.one_of == term.one_of
        if related or type(other) is type(term):
            together = other.join(term)
            if together is not None:
                joined[index] = together
                return
    joined.append(term)
