"""`relpos.attention`: one function, SDPA's layout, any engine, the same meaning.

A call is planned once for all that have its structure (`plan`): checked, its engine chosen (`selection`) and prepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, overload

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, MaskLike
from relpos.core.checks import unknown_argument, without_autocast
from relpos.engines.arguments import Arguments, HiddenStates, Position
from relpos.engines.call import Call
from relpos.engines.dense_mask import note_on
from relpos.engines.plan import run_planned
from relpos.engines.reference import REFERENCE, weights
from relpos.engines.selection import BY_NAME, ENGINES, choose, require_backend
from relpos.engines.self_check.agreement import Difference, Expected
from relpos.engines.unseen import without_unseen


@dataclass(frozen=True)
class Explanation:
    """Which engine a call takes, and why not the others.

    Attributes:
        backend: the engine's name.
        passed_over: name to reason, for the engines `auto` asked before it and those it did not need to ask.
        notes: what could be said otherwise, and cheaper.
        way: which of its ways the engine takes, in words. None if it has only one; for empty calls and meta tensors,
            which compute nothing; and in a compiled function.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> why = relpos.explain(q, k, v, backend="reference")
        >>> why.backend
        'reference'
        >>> why.passed_over["sdpa"]
        'not asked for'
    """

    backend: str
    passed_over: dict[str, str]
    notes: tuple[str, ...] = ()
    way: str | None = None

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}" + ("" if self.way is None else f", {self.way}")]
        lines += [f"  not {name}: {reason}" for name, reason in self.passed_over.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _explain(call: Call, backend: str) -> Explanation:
    """The choice, and a reason for every other engine."""
    choice = choose(call, backend)
    chosen, passed_over = choice.engine, choice.passed_over
    for engine in ENGINES:
        if engine is chosen or engine.name in passed_over:
            continue
        if backend != "auto":
            passed_over[engine.name] = "not asked for"
        elif (lack := engine.unsupported(call)) is not None:
            passed_over[engine.name] = f"it lacks {lack}"
        else:
            passed_over[engine.name] = f"{chosen.name} has priority and supports this call"
    mask = call.mask
    notes = () if mask is None or mask.allowed is None else (note_on(mask, call.q.shape[2], call.k.shape[2]),)
    computes = not (torch.compiler.is_compiling() or call.is_empty or call.q.is_meta)
    way = chosen.way(call) if computes else None
    return Explanation(chosen.name, passed_over, notes, None if way is None else way.words)


@overload
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[False] = False,
    backend: str = "auto",
    states: HiddenStates | None = None,
) -> Float[Tensor, "B H N V"]: ...


@overload
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[True],
    backend: str = "auto",
    states: HiddenStates | None = None,
) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]: ...


@overload
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
    states: HiddenStates | None = None,
) -> Float[Tensor, "B H N V"] | tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]: ...


def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
    states: HiddenStates | None = None,
    **unknown: Any,
) -> Float[Tensor, "B H N V"] | tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """Softmax attention with any position mechanism.

    Tokens that the mask leaves out altogether may hold anything, also NaN and inf: keys and values that no query of
    their batch element sees (padding, the unused part of a cache), and queries that see no key. They change nothing,
    and their gradients are 0. A NaN or inf in a key or value that is hidden from some queries alone may reach these
    too, for 0 times NaN is NaN. What terms hold is finite for every token, left out or not; a `DenseBias` alone may
    hold anything at forbidden pairs.

    Args:
        q: queries.
        k: keys; G key heads serve H query heads in equal groups (H a multiple of G).
        v: values, as many as keys.
        position: terms, or a mechanism together with `queries`.
        queries: coordinates of the query tokens, only beside a mechanism.
        keys: coordinates of the key tokens; default the queries.
        mask: which pairs may attend; a row that may see none gives 0, as all do where there are no keys. A `Mask`;
            "causal", which is `Mask.causal()`; or a boolean tensor as SDPA has it, True where a pair may attend:
            `[N, M]`, or `[B, H, N, M]` in which any axis may be 1. A tensor costs N x M numbers, in time and memory:
            `explain` says which `Mask` would say the same.
        scale: factor on the content product. Default: the position's own (1 for T5), else 1/sqrt(D).
        dropout: probability that a weight is dropped, applied whenever it is above 0: pass 0.0 to evaluate. Seeded
            from PyTorch's generator.
        return_lse: also return the log-sum-exp of each row as the softmax sees it: of its scores, and of the sink where
            there is one. Shards of the keys merge by it, output by output weighted with exp(lse - lse of all); give
            `Sinks` to one shard only, or the sink counts as often as there are shards.
        backend: an engine's name, or "auto". On a GPU `auto` takes a kernel of ours only once it has agreed with the
            reference there: the first call of a kind runs small calls of that kind on both, forward and backward, which
            takes a few seconds while kernels are compiled. Inside torch.compile nothing is run: a model that is to have
            these kernels there is called once as it is, `torch.no_grad()` will do. An engine asked for by name is
            not checked. In a program that `torch.export` makes, `auto` takes PyTorch's own operators, whatever the
            sizes of the example: it serves other sizes, and where relpos is not installed.
        states: what the queries are projected from, `[B, N, E]`, for a mechanism that needs it (`ForgetGate`); a pair
            with that of the keys, `[B, M, E]`, where keys are other tokens. Other mechanisms are not handed it.

    Returns:
        `[B, H, N, V]`, in q's dtype (autocast's where that is on and q is not float64); with `return_lse` also
        `[B, H, N]`.

    Raises:
        ValueError: arguments that do not fit together; the message says what was expected, what came and the remedy.
        NotImplementedError: the backend asked for lacks something the call needs.

    Warns:
        RuntimeWarning: a kernel failed its check on this GPU, so that `auto` passes it over.

    Examples:
        >>> q = torch.randn(2, 8, 197, 64)
        >>> k, v = torch.randn(2, 2, 2, 197, 64)  # two key heads serve eight query heads
        >>> grid = relpos.Grid(14, 14, prefix=1)
        >>> bias = relpos.RelativePositionBias(num_heads=8, window_size=(14, 14), prefix=1)
        >>> relpos.attention(q, k, v, position=bias, queries=grid).shape
        torch.Size([2, 8, 197, 64])
    """
    if unknown:
        _fail_unknown(next(iter(unknown)))
    if not isinstance(backend, str):
        require_backend(backend)
    given = Arguments(q, k, v, position, queries, keys, mask, scale, dropout, return_lse, states, backend)
    output, lse = run_planned(given)
    if not return_lse:
        return output
    assert lse is not None, "an engine without it says so"
    return output, lse


_OF_SDPA = {
    "is_causal": 'Pass mask="causal".',
    "attn_mask": "Pass a boolean tensor as mask=, and numbers as position=relpos.DenseBias(x).",
    "dropout_p": "Pass it as dropout=.",
    "enable_gqa": "Leave it out: k and v may have fewer heads.",
    "query": "Pass it first, as q.",
    "key": "Pass it second, as k.",
    "value": "Pass it third, as v.",
}
"""What to write instead of an argument of PyTorch's `scaled_dot_product_attention`."""


def _fail_unknown(name: str) -> NoReturn:
    """Raise for an argument that `attention` does not have: a `TypeError`, as Python's."""
    known = [one for one in inspect.signature(attention).parameters if one != "unknown"]
    raise TypeError(unknown_argument("attention", name, known, _OF_SDPA.get(name)))


def explain(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
    states: HiddenStates | None = None,
) -> Explanation:
    """Which engine `attention` would take for the same arguments, and why the others were passed over.

    It is what the next call takes: a kernel that has to agree with the reference before `auto` takes it on a GPU is
    checked here as well, unless it has been. Of the arguments nothing is computed.

    Args:
        q: queries, `[B, H, N, D]`.
        k: keys, `[B, G, M, D]`.
        v: values, `[B, G, M, V]`.
        position: terms, or a mechanism together with `queries`.
        queries: coordinates of the queries, beside a mechanism.
        keys: coordinates of the keys, by default the queries'.
        mask: which pairs may attend.
        scale: factor on the content product; default as in `attention`.
        dropout: as in `attention`.
        return_lse: as in `attention`.
        backend: as in `attention`.
        states: as in `attention`.

    Returns:
        An `Explanation`; print it.

    Raises:
        ValueError: arguments that do not fit together.
        NotImplementedError: the backend asked for lacks something the call needs.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> print(relpos.explain(q, k, v, backend="reference"))
        backend: reference
          not triton: not asked for
          not streaming: not asked for
          not sdpa: not asked for
          not flex: not asked for
    """
    given = Arguments(q, k, v, position, queries, keys, mask, scale, dropout, return_lse, states)
    return _explain(given.call(), backend)


def expected(make: Callable[[], Call]) -> Expected:
    """What the reference says of a call, to hold engines against; see `agreement`."""
    return Expected(REFERENCE, make)


def difference(backend: str, wanted: Expected, device: torch.device) -> Difference:
    """How far an engine on a device is from what is expected.

    Raises:
        NotImplementedError: the engine lacks something that the call needs; the message names it alone.
    """
    return wanted.difference(BY_NAME[backend], device)


def attention_weights(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
    states: HiddenStates | None = None,
) -> Float[Tensor, "B H N M"]:
    """The softmax's weights, by the reference engine: N x M numbers, for pictures and study.

    Args:
        q: queries, `[B, H, N, D]`.
        k: keys, `[B, G, M, D]`.
        position: terms, or a mechanism together with `queries`.
        queries: coordinates of the queries, beside a mechanism.
        keys: coordinates of the keys, by default the queries'.
        mask: which pairs may attend.
        scale: factor on the content product; default as in `attention`.
        states: as in `attention`.

    Returns:
        `[B, H, N, M]`, in q's dtype; a row that may see nothing is 0.

    Raises:
        ValueError: arguments that do not fit together.

    Examples:
        >>> q = k = torch.zeros(1, 1, 3, 8)
        >>> relpos.attention_weights(q, k, mask=relpos.Mask.causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    call = Arguments(q, k, k, position, queries, keys, mask, scale, states=states).call()
    with without_autocast(q.device):
        return weights(without_unseen(call))[0].to(call.q.dtype)
