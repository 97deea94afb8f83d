"""`relpos.attention`: one function, SDPA's layout, any engine, the same meaning.

The engine is chosen here and nowhere else. One asked for by name never falls back; `auto` takes the first of `ENGINES`
that has everything the call needs, does not say itself that another is faster and, where it must, agrees with the
reference on this device (`verdicts`); `explain` says which that is and why the others were passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core import Coordinates, MaskLike
from relpos.core.checks import require_name, without_autocast
from relpos.core.private import exporting
from relpos.engines import verdicts
from relpos.engines.agreement import Difference, Expected
from relpos.engines.arguments import Position, prepare
from relpos.engines.call import Call
from relpos.engines.dense_mask import note_on
from relpos.engines.engine import Engine
from relpos.engines.familiar import Familiar
from relpos.engines.flex import FLEX
from relpos.engines.hidden import without_hidden
from relpos.engines.reference import REFERENCE, weights
from relpos.engines.sdpa import SDPA
from relpos.engines.streaming import STREAMING
from relpos.engines.triton import TRITON

ENGINES: tuple[Engine, ...] = (TRITON, STREAMING, SDPA, FLEX, REFERENCE)
"""In the order in which `auto` asks them."""
_BY_NAME = {engine.name: engine for engine in ENGINES}


def backends() -> dict[str, str]:
    """The engines' names, and what each is for, in the order `auto` asks them.

    Examples:
        >>> list(relpos.backends())
        ['triton', 'streaming', 'sdpa', 'flex', 'reference']
    """
    return {engine.name: engine.summary for engine in ENGINES}


@dataclass(frozen=True)
class Explanation:
    """Which engine a call takes, and why not the others.

    Attributes:
        backend: the engine's name.
        passed_over: name to reason, for the engines `auto` asked before it and those it did not need to ask.
        notes: what could be said otherwise, and cheaper.

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

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.passed_over.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def require_backend(backend: object) -> None:
    """Raise unless `backend` is "auto" or an engine's name."""
    if not (isinstance(backend, str) and (backend == "auto" or backend in _BY_NAME)):
        require_name(backend, ["auto", *_BY_NAME], "a backend")


def _fault(engine: Engine, call: Call) -> str | None:
    """What is wrong with an engine on the call's device, as far as it must be asked, or None."""
    return verdicts.fault(engine, REFERENCE, call) if call.q.device.type in engine.checked_on else None


def _engine_of(call: Call, familiar: Familiar) -> Engine:
    """The engine that `auto` takes, chosen once for calls that are alike; and what it does for them."""
    if familiar.engine is None:
        familiar.engine = _choose(call, "auto", {})
        familiar.repeat = None if call.is_empty else familiar.engine.repeat(call)
    return familiar.engine


def _choose(call: Call, backend: str, passed_over: dict[str, str]) -> Engine:
    """The engine of a call; why those before it are not goes into `passed_over`."""
    require_backend(backend)
    if backend != "auto":
        engine = _BY_NAME[backend]
        if (lack := engine.unsupported(call)) is not None:
            raise NotImplementedError(
                f"expected a backend with all the call needs; got {backend!r}, and backend {backend!r} lacks {lack}. "
                "Use backend='auto' or 'reference'."
            )
        return engine
    if exporting():
        # Of any size, as a program of an example may serve: sizes that decided here would bound them all.
        return SDPA if SDPA.unsupported(call) is None else REFERENCE
    last: Engine = REFERENCE  # used if no engine is preferred: one that serves any size, else the reference
    for engine in ENGINES:
        if (lack := engine.unsupported(call)) is not None:
            passed_over[engine.name] = f"it lacks {lack}"
        elif (slower := engine.not_preferred(call)) is not None:
            passed_over[engine.name] = slower
            last = engine if engine.serves_any_size else last
        elif (fault := _fault(engine, call)) is not None:
            passed_over[engine.name] = fault
        else:
            return engine
    return last


def _explain(call: Call, backend: str) -> Explanation:
    """The choice, and a reason for every other engine."""
    passed_over: dict[str, str] = {}
    chosen = _choose(call, backend, passed_over)
    passed_over.pop(chosen.name, None)
    for engine in ENGINES:
        if engine is chosen or engine.name in passed_over:
            continue
        if backend != "auto":
            passed_over[engine.name] = "not asked for"
        elif (lack := engine.unsupported(call)) is not None:
            passed_over[engine.name] = f"it lacks {lack}"
        else:
            passed_over[engine.name] = f"{chosen.name} comes first and can compute it"
    mask = call.mask
    notes = () if mask is None or mask.allowed is None else (note_on(mask, call.q.shape[2], call.k.shape[2]),)
    return Explanation(chosen.name, passed_over, notes)


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
    call, familiar = prepare(
        q, k, v, position=position, queries=queries, keys=keys, mask=mask, scale=scale, dropout=dropout,
        return_lse=return_lse,
    )  # fmt: skip
    if not isinstance(backend, str) or backend != "auto":
        familiar = None
    if familiar is not None and familiar.repeat is not None:
        with without_autocast(q.device):
            return familiar.repeat(call)
    engine = _choose(call, backend, {}) if familiar is None else _engine_of(call, familiar)
    with without_autocast(q.device):
        nothing = call.is_empty or (call.q.is_meta and backend == "auto" and not is_in_torch_dispatch_mode())
        output, lse = call.of_nothing() if nothing else engine.run(without_hidden(call.seeded()))
    if not return_lse:
        return output
    assert lse is not None, "an engine without it says so"
    return output, lse


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
    call, _ = prepare(
        q, k, v, position=position, queries=queries, keys=keys, mask=mask, scale=scale, dropout=dropout,
        return_lse=return_lse,
    )  # fmt: skip
    return _explain(call, backend)


def expected(make: Callable[[], Call]) -> Expected:
    """What the reference says of a call, to hold engines against; see `agreement`."""
    return Expected(REFERENCE, make)


def difference(backend: str, wanted: Expected, device: torch.device) -> Difference:
    """How far an engine on a device is from what is expected.

    Raises:
        NotImplementedError: the engine lacks something that the call needs; the message names it alone.
    """
    return wanted.difference(_BY_NAME[backend], device)


def attention_weights(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    *,
    position: Position | None = None,
    queries: Coordinates | None = None,
    keys: Coordinates | None = None,
    mask: MaskLike | None = None,
    scale: float | None = None,
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
    call, _ = prepare(
        q, k, k, position=position, queries=queries, keys=keys, mask=mask, scale=scale, dropout=0.0, return_lse=False
    )
    with without_autocast(q.device):
        return weights(without_hidden(call))[0].to(call.q.dtype)
