"""The peers: relpos's engines, PyTorch's attention with and without a bias, and the matrix products alone.

A peer states whether it supports a case and roughly how much memory it needs, and makes a `Workload` from the inputs.
Peers for whole layers are in `modules`. Every call reads its bias from the table, as a training step must.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relpos.bench.cases import Case
from relpos.bench.inputs import Inputs, setting
from relpos.core import LineBias, Sequence, expand
from relpos.engines import attention, backends, explain
from relpos.engines.arguments import Arguments
from relpos.engines.sdpa import strided_bias
from relpos.position import Mechanism, decoding

FREE = "sdpa-free"
"""PyTorch's attention without position: the limit, and the baseline of ratios. On a GPU, FlashAttention."""
FREE_CUDNN, FREE_OURS = "sdpa-cudnn", "relpos-free"
"""The same on a GPU with cuDNN and with our own kernels."""
DENSE, READY, FLEX = "sdpa-dense", "sdpa-ready", "flex"
TERMS, DECODING, COLD, CHANGED = "relpos-terms", "relpos-decoding", "relpos-cold", "relpos-changed"
"""Peers for small cases. `READY` is SDPA with a precomputed dense bias, which is learned in a step. The others are
relpos: with precomputed terms; inside `relpos.decoding`; with no cache from the last call; and with weights changed
since then. That change (negated twice) is part of the time."""
OF_SMALL_CASES = (READY, TERMS, DECODING, COLD, CHANGED)
ROOFLINE = "matmul"
_TILE = 512
_FLEX_AT_MOST = 8192
_SMALL = 2**24
"""Up to this many bytes of scores, a case is small."""
_FLOAT = 4


@dataclass(frozen=True, eq=False)
class Workload:
    """One computation to run: the forward pass, or with `leaves` a step.

    Attributes:
        forward: computes the output. leaves: tensors that need gradients. gradient: the output's gradient.
        backend: the engine that relpos chose; None for other peers.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    gradient: Tensor | None = None
    backend: str | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, then the gradients of the leaves."""
        if not self.leaves:
            with torch.no_grad():
                return (self.forward(),)
        output = self.forward()
        return (output, *torch.autograd.grad(output, self.leaves, self.gradient))


@dataclass(frozen=True, eq=False)
class Peer:
    """An implementation that can run cases.

    Attributes:
        suits: whether it supports a case. build: makes the work. needs: approximate bytes besides the inputs.
        missing: returns why it is not available here, or None; None if it needs no library.
        exact: whether its results must equal the reference's. compiles: whether its first call compiles.
    """

    name: str
    title: str
    suits: Callable[[Case], bool]
    build: Callable[[Inputs], Workload]
    needs: Callable[[Case], int]
    missing: Callable[[], str | None] | None = None
    exact: bool = True
    compiles: bool = False


def pairs(case: Case) -> int:
    """Bytes of one float32 number for each pair of query and key."""
    return case.batch * case.heads * case.count**2 * _FLOAT


def _step(inputs: Inputs, forward: Callable[[], Tensor], backend: str | None = None) -> Workload:
    """The workload of a forward function on q, k and v, with gradients in a step."""
    if inputs.case.what == "forward":
        return Workload(forward, backend=backend)
    learned = () if inputs.position is None else tuple(inputs.position.parameters())
    return Workload(forward, (*inputs.qkv, *learned), inputs.gradient, backend)


def engine_peer(engine: str) -> Peer:
    """An engine of relpos, or "auto"."""

    def build(inputs: Inputs) -> Workload:
        q, k, v = inputs.qkv
        queries = None if inputs.position is None else inputs.queries
        keys = None if queries is None or inputs.case.queries is None else inputs.tokens

        options = {"position": inputs.position, "queries": queries, "keys": keys, "mask": inputs.mask}
        forward: Any = partial(attention, q, k, v, **options, backend=engine)
        return _step(inputs, forward, taken(inputs.case, engine))

    def needs(case: Case) -> int:
        backend = taken(case, engine)
        linear = backend in ("streaming", "triton") or (backend == "sdpa" and _is_viewed(case))
        return 0 if linear else dense_bytes(case)

    return Peer(f"relpos-{engine}", f"relpos {engine}", _product, build, needs)


def taken(case: Case, engine: str) -> str | None:
    """The engine that runs a case if `engine` is requested; None if it does not support the case."""
    q, k = _blank(case)
    position, tokens, mask = setting(case)
    queries = keys = None if position is None else tokens
    if position is not None and case.queries is not None:
        queries = Sequence(case.queries, start=case.count - case.queries)
    try:
        return explain(q, k, k, position=position, queries=queries, keys=keys, mask=mask, backend=engine).backend
    except NotImplementedError:
        return None


def _blank(case: Case) -> tuple[Tensor, Tensor]:
    """Uninitialized queries, and keys or values, with a case's shapes."""
    shape = case.batch, case.heads, case.count, case.head_dim
    k = torch.empty(shape, dtype=getattr(torch, case.dtype), device=case.device)
    return k if case.queries is None else k[:, :, -case.queries :], k


def _is_viewed(case: Case) -> bool:
    """Whether `sdpa` reads the bias of a case as a strided view, without storing N x N numbers."""
    position, tokens, mask = setting(case)
    if position is None or case.queries is not None:
        return False
    q, k = _blank(case)
    with torch.set_grad_enabled(case.what == "step"):
        call = Arguments(q, k, k, position=position, queries=tokens, mask=mask).call()
        return strided_bias.readable(call) is not None


def dense_bytes(case: Case) -> int:
    """Approximate bytes of dense scores: two numbers per pair forward; eight for a step, whose graph keeps several."""
    return pairs(case) * (2 if case.what == "forward" else 8)


def _product(case: Case) -> bool:
    return not case.layer


def _a_bias(case: Case) -> bool:
    return not case.layer and case.position in ("line", "grid")


def _for_flex(case: Case) -> bool:
    if case.device == "cpu":
        return _a_bias(case) and case.what == "forward"  # no backward on CPU
    return _a_bias(case) and case.count <= _FLEX_AT_MOST  # it compiles for every shape


def _values(inputs: Inputs) -> tuple[Tensor, LineBias]:
    assert inputs.position is not None
    (term,) = inputs.position.terms(inputs.queries, inputs.tokens).of(LineBias)
    return term.values, term


def _free(inputs: Inputs, kernel: SDPBackend | None = None) -> Workload:
    q, k, v = inputs.qkv

    def forward() -> Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=inputs.case.causal)

    return _step(replace(inputs, position=None), forward)


def _free_ours(inputs: Inputs) -> Workload:
    return replace(engine_peer("triton").build(replace(inputs, position=None)), backend=None)


def _dense(inputs: Inputs) -> Workload:
    """The way of published models: the table is gathered to `[H, N, N]`, which is the mask of one SDPA call."""
    q, k, v = inputs.qkv
    count = inputs.case.count
    after = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1) if inputs.case.causal else None

    def forward() -> Tensor:
        values, term = _values(inputs)
        bias = expand(values, term.lines)
        bias = bias if after is None else bias.masked_fill(after, -torch.inf)
        if inputs.case.device == "cpu":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # cuDNN misreads a wider mask
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))

    return _step(inputs, forward)


def is_small(case: Case) -> bool:
    """Whether the case is small, so that a call's overhead matters."""
    biased = _product(case) and case.position in ("line", "grid", "t5") and not case.causal
    return biased and case.device == "cpu" and pairs(case) <= _SMALL


def _small_forward(case: Case) -> bool:
    return is_small(case) and case.what == "forward"


def _ready(inputs: Inputs) -> Workload:
    q, k, v = inputs.qkv
    values, term = _values(inputs)
    bias = expand(values, term.lines).detach()[None].contiguous().requires_grad_(inputs.case.what == "step")
    scale = 1.0 if inputs.case.position == "t5" else None

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)

    leaves = (q, k, v, bias) if inputs.case.what == "step" else ()
    return Workload(forward, leaves, inputs.gradient)


def _terms(inputs: Inputs) -> Workload:
    assert inputs.position is not None
    forward: Any = partial(attention, *inputs.qkv, position=inputs.position.terms(inputs.queries, inputs.tokens))
    return Workload(forward)


def _with_own_position(inputs: Inputs) -> tuple[Mechanism, Workload]:
    """A copy of the position, and relpos's work with it."""
    position = copy.deepcopy(inputs.position)
    assert position is not None
    return position, engine_peer("auto").build(replace(inputs, position=position))


def _decoding(inputs: Inputs) -> Workload:
    position, work = _with_own_position(inputs)
    scopes = ExitStack()
    scopes.enter_context(decoding(position))

    def forward(_: ExitStack = scopes) -> Tensor:  # keeps `decoding` open as long as the work exists
        return work.forward()

    return replace(work, forward=forward)


def _after(inputs: Inputs, first: Callable[[Mechanism], None]) -> Workload:
    """relpos, calling `first` on its own copy of the position before each call; `first` is part of the time."""
    position, work = _with_own_position(inputs)

    def forward() -> Tensor:
        first(position)
        return work.forward()

    return replace(work, forward=forward)


def _forget(position: Mechanism) -> None:
    position.__dict__.pop("_shape_cache", None)


@torch.no_grad()
def _change(position: Mechanism) -> None:
    for weight in position.parameters():
        weight.neg_().neg_()


def _flex(inputs: Inputs) -> Workload:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs.qkv
    count = inputs.case.count
    term = _values(inputs)[1]
    query, key, origin = term.lines.query, term.lines.key, term.lines.origin
    compiled = torch.compile(flex_attention, dynamic=False)
    seen = None
    if inputs.case.causal:
        seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, count, count, device=inputs.case.device)

    def forward() -> Tensor:
        values = _values(inputs)[0]

        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + values[h, query[i] - key[j] + origin]

        output = compiled(q, k, v, score_mod=biased, block_mask=seen)
        assert isinstance(output, Tensor)
        return output

    return _step(inputs, forward)


def _products(inputs: Inputs) -> Workload:
    """Matrix products by `torch.bmm`: two per pair of tiles forward, seven for a step (recomputed scores, and four
    gradients).

    A causal case skips tiles beyond the diagonal.
    """
    case = inputs.case
    q, k, v, g = (x.detach().flatten(0, 1) for x in (*inputs.qkv, inputs.gradient))
    products = 2 if case.what == "forward" else 7
    tiles = range(0, case.count, _TILE)

    def forward() -> Tensor:
        out = torch.zeros_like(q)
        for rows in (slice(start, start + _TILE) for start in tiles):
            for columns in (slice(start, start + _TILE) for start in tiles):
                if case.causal and columns.start >= min(rows.stop, case.count):
                    continue
                scores = torch.bmm(q[:, rows], k[:, columns].mT)
                out[:, rows].baddbmm_(scores, v[:, columns])
                if products == 7:
                    torch.bmm(q[:, rows], k[:, columns].mT)
                    weights = torch.bmm(g[:, rows], v[:, columns].mT)
                    torch.bmm(scores.mT, g[:, rows])
                    torch.bmm(weights, k[:, columns])
                    torch.bmm(weights.mT, q[:, rows])
        return out

    return Workload(forward)


def op_peers(engines: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers for cases without layers; the baseline of ratios comes first."""

    def tiles(case: Case) -> int:
        return 2 * case.batch * case.heads * min(case.count, _TILE) ** 2 * _FLOAT

    def on(device: str) -> Callable[[Case], bool]:
        return lambda case: _product(case) and case.device == device

    def free(name: str, kernel: SDPBackend) -> Peer:
        title = f"SDPA without bias, {kernel.name.split('_')[0].lower()}"
        return Peer(name, title, on("cuda"), partial(_free, kernel=kernel), lambda case: 0, exact=False)

    return (
        Peer(FREE, "SDPA without bias", on("cpu"), _free, lambda case: 0, exact=False),
        free(FREE, SDPBackend.FLASH_ATTENTION),
        free(FREE_CUDNN, SDPBackend.CUDNN_ATTENTION),
        Peer(FREE_OURS, "relpos triton, no bias", on("cuda"), _free_ours, lambda case: 0, exact=False),
        *(engine_peer(engine) for engine in engines),
        Peer(DENSE, "SDPA, gathered bias", _a_bias, _dense, dense_bytes),
        Peer(READY, "SDPA, bias ready", is_small, _ready, dense_bytes, exact=False),
        Peer(TERMS, "relpos, terms ready", _small_forward, _terms, dense_bytes),
        Peer(COLD, "relpos, nothing kept", is_small, partial(_after, first=_forget), dense_bytes),
        Peer(CHANGED, "relpos, weights changed", is_small, partial(_after, first=_change), dense_bytes),
        Peer(DECODING, "relpos, decoding", _small_forward, _decoding, dense_bytes),
        Peer(FLEX, "FlexAttention, compiled", _for_flex, _flex, lambda case: 0, compiles=True),
        Peer(ROOFLINE, "matrix products alone", on("cpu"), _products, tiles, exact=False),
    )


def all_engines() -> tuple[str, ...]:
    """`auto`, then every engine by name."""
    return ("auto", *backends())


def engines_here(device: str) -> tuple[str, ...]:
    """`auto` and the engines that run on a device of this machine."""
    x = torch.empty(1, 1, 1, 1, device=device)

    def runs(name: str) -> bool:
        try:
            explain(x, x, x, backend=name)
        except NotImplementedError:
            return False
        return True

    return tuple(name for name in all_engines() if runs(name))
