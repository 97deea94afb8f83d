"""Which engine computes a call: chosen here and nowhere else. (In which of its ways, it says itself: `Engine.ways`.)

One asked for by name never falls back; `auto` takes the first of `ENGINES` that has everything the call needs, is not
known to be slower there and, where it must, agrees with the reference on this device (`self_check`). Engines say what
they can. What is faster is measured, and stands here, for each kind of device.

A border is a power of two of pairs, N x M, or of scores, pairs of all heads and elements, between the largest size at
which `sdpa` was faster and the smallest at which `streaming` was. `python benchmarks/borders.py NAME` times both about
one; docs/log.md has the times that they were taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from relpos.core import (
    AxisVectors,
    DenseBias,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Term,
)
from relpos.core.checks import require_name
from relpos.core.private import exporting
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.flex import FLEX
from relpos.engines.reference import REFERENCE
from relpos.engines.sdpa import SDPA, learned_bias, strided_bias
from relpos.engines.sdpa import vectors as few_vectors
from relpos.engines.self_check import verdicts
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


def choose(call: Call, backend: str, kind: str | None = None) -> Chosen:
    """The engine of a call; see the file's head.

    Args:
        kind: the kind of device whose times count; by default the call's.
    """
    require_backend(backend)
    if backend != "auto":
        engine = BY_NAME[backend]
        if (lack := engine.unsupported(call)) is not None:
            raise NotImplementedError(
                f"expected a backend that supports this call; got {backend!r}, which lacks {lack}. "
                "Use backend='auto' or 'reference'."
            )
        return Chosen(engine)
    if exporting():
        # Of any size, as a program of an example may serve: sizes that decided here would bound them all.
        return Chosen(SDPA if SDPA.unsupported(call) is None else REFERENCE)
    choice = Chosen(REFERENCE)  # used if no engine is preferred: one that serves any size, else the reference
    kind = call.q.device.type if kind is None else kind
    for engine in ENGINES:
        if (lack := engine.unsupported(call)) is not None:
            choice.passed_over[engine.name] = f"it lacks {lack}"
        elif (slower := SLOWER.get(engine.name, _never)(call, kind)) is not None:
            choice.passed_over[engine.name] = slower
            choice.engine = engine if engine.serves_any_size else choice.engine
        elif call.q.device.type in engine.checked_on and (fault := _fault(engine, call)) is not None:
            choice.passed_over[engine.name] = fault.words
            choice.lasts = choice.lasts and fault.lasts
        else:
            choice.engine = engine
            break
    choice.passed_over.pop(choice.engine.name, None)
    return choice


def _fault(engine: Engine, call: Call) -> verdicts.Fault | None:
    """Why `auto` must not use an engine for a call, or for its pairs of some rotation."""
    for part in call.parts():
        if (fault := verdicts.fault(engine, REFERENCE, part)) is not None:
            return fault
    return None


def serves_shards(term: Term) -> bool:
    """Whether an engine that computes shards of any call knows this kind of term."""
    assert STREAMING.served is not None
    return isinstance(term, (*STREAMING.served, Scale))


def choose_for_shards(call: Call) -> Engine:
    """The engine for shards of a call: the one `auto` takes if it computes shards, else `streaming`.

    Raises:
        NotImplementedError: what the call needs has no engine that computes shards.
    """
    engine = choose(call, "auto").engine
    return engine if engine.shards is not None else choose(call, STREAMING.name).engine


# On a CPU: `streaming` beside `sdpa`

LINE, GRID, KEY_VECTORS = 2**16, 2**18, 2**18
"""Pairs, for a learned bias on a line (and for vectors on the query side or on values), for one on a grid, for vectors
on the key side."""
FEW_VECTORS = 2**19
"""Pairs, for vectors that `sdpa` computes by their products with each row (`sdpa.vectors`)."""
LINE_FORWARD, GRID_FORWARD = 2**18, 2**20
"""Pairs, for such biases where no gradient is wanted at all."""
FIXED, WINDOW = 2**21, 2**20
"""Pairs, for a bias that learns nothing beside tensors that do: without a mask, and under one on a grid."""
WIDER = 2**25
"""Scores, for queries and keys that a rotation makes wider than values (PoPE): PyTorch's kernel has one width, and
multiplies zeros beside values. From 2**24 on `streaming` gives each of two threads heads of its own."""
MASKED, PATTERN = 2**18, 2**20
"""Pairs, under a mask that allows few of them: where PyTorch's kernel computes its tiles
(`streaming.cpu.masked_kernel`), and else."""
DROPOUT = 2**18
"""Pairs from which dropout by a counter is faster than a draw of PyTorch's generator for each score."""
ROTATIONS = 2**17
"""Scores, for several rotations by pair, of which a dense engine computes all products."""
LEAST = 2**20
"""Scores below which the fixed cost of a call, about a millisecond, dominates."""
MANY, OF_MANY = 2**24, 2**14
"""From so many scores on, a dense step waits for fresh memory; it is slower then from so many pairs on."""
SCORES = 2**25
"""Scores from which any other term is computed by `streaming`. That is no faster, but saves memory: a dense engine
holds several such tensors, 128 MiB each."""
_TOO_SMALL = f"this call is too small: it is faster only from {LEAST:,} scores (heads x queries x keys) on"

# On other devices

SCORES_ELSEWHERE = 2**31
"""Scores from which a dense engine's tensors, 8 GiB each, would fill a GPU. Faster there `streaming` is not."""
TOKENS_OF_TRITON = 512
"""Tokens from which `triton` is taken. A guess, until `benchmarks/on_gpu.py --parts short` has measured it; and for
low-rank biases, of which no GPU has measured a kernel, whether it is faster at all. So it is for vectors: `triton` is
taken for them because its memory is bounded, where dense scores are several tensors."""

# Anywhere

SCORES_OF_REFERENCE = 2**22
"""Scores up to which the reference does what the faster engines lack: 16 MiB a tensor, and there are several."""


def is_pattern(mask: Mask | None) -> bool:
    """Whether a mask probably allows few pairs, judged without reading tensors: it has a bound on the left, a block
    layout, or segments that the whole batch shares (those of padding rarely are)."""
    if mask is None:
        return False
    if mask.left is not None or mask.low is not None or mask.blocks is not None:
        return True
    return mask.query_segments is not None and mask.query_segments.dim() == 1


def _triton(call: Call, kind: str) -> str | None:
    if kind != "cuda":
        return "it would run in Triton's interpreter"
    if call.return_lse:  # PyTorch's kernels do not return it
        return None
    own = any(isinstance(term, LineBias | LineVectors | AxisVectors | LowRank | PairRotations) for term in call.terms)
    if not own and (call.mask is None or call.mask.is_plain_causal):
        return "without a bias PyTorch's own kernels are available"
    if max(call.q.shape[2], call.k.shape[2]) < TOKENS_OF_TRITON:
        return f"fewer than {TOKENS_OF_TRITON} tokens"
    return None


def _streaming(call: Call, kind: str) -> str | None:
    """The text names no sizes of the call, because torch.compile would turn these into constants."""
    batch, heads, n, _ = call.q.shape
    pairs = n * call.k.shape[2]
    scores = batch * heads * pairs
    if kind == "cpu" and call.terms.one(PairRotations) is not None:
        few = f"for rotations by pair it is faster only from {ROTATIONS:,} scores (heads x queries x keys) on"
        return few if scores < ROTATIONS else None
    if kind == "cpu" and scores < LEAST and call.terms.one(LineBias) is not None:
        return _TOO_SMALL
    border, what = _border(call)
    if kind != "cpu":
        fits = border is None or scores < SCORES_ELSEWHERE
        return f"it has not been measured faster on {kind}" if fits else None
    if border is None:
        return f"{what}: PyTorch's own kernel is faster"
    if scores < LEAST:
        return _TOO_SMALL
    if pairs < border:
        return f"for {what} it is faster only at more tokens"
    return None


def _border(call: Call) -> tuple[int | None, str]:
    """The pairs from which `streaming` is faster, None for never; and what the number is for, in words."""
    regular_terms = (LineBias, LineVectors, Rotation, QueryBias, QueryScale, Sinks)
    scaled = any(isinstance(term, QueryScale) and term.adds_scores for term in call.terms)
    biases, vectors = call.terms.of(LineBias), call.terms.of(LineVectors)
    kinds = {term.lines.layout.kind for term in call.terms if isinstance(term, LineBias | LineVectors)}
    batch = max(1, call.q.shape[0]) * call.q.shape[1]
    regular = kinds <= {"affine"} if vectors else "irregular" not in kinds and len(biases) <= 1
    if _adds_fixed_dense(call):
        return None, "a dense bias that is not learned"
    wide = call.q.dtype in (torch.float32, torch.float64)  # half precision is faster by this engine
    if wide and call.mask is None and strided_bias.readable(call) is not None:
        return None, "a sequence's bias without gradients"
    if not regular or scaled or any(not isinstance(term, regular_terms) for term in call.terms):
        border = -(-SCORES // batch)
        if call.terms.of(RowRule):
            return border, "a row rule"
        return min(border, PATTERN) if is_pattern(call.mask) else border, "a position other than a line bias"
    if call.dropout > 0:
        return DROPOUT, "dropout"
    if not kinds:
        if is_pattern(call.mask):
            return (MASKED if _in_tiles(call) else PATTERN), "a pattern"
        if wide and (call.mask is None or call.mask.is_plain_causal) and _is_widened(call):
            return -(-WIDER // batch), "queries and keys wider than values"
        if call.mask is None or call.mask.is_plain_causal or not call.mask.is_interval:
            return None, "no bias"
        return (MASKED if _in_tiles(call) else WINDOW), "a window"
    if wide and call.groups == 1 and not is_pattern(call.mask) and few_vectors.serves(call):
        return FEW_VECTORS, "vectors on queries or keys"
    if any(term.side == "key" for term in vectors):
        return KEY_VECTORS, "vectors on the key side"
    if vectors:
        return LINE, "vectors"
    grid = "nested" in kinds
    if not torch.is_grad_enabled():
        return GRID_FORWARD if grid else LINE_FORWARD, "a line bias without gradients"
    if not any(term.values.requires_grad for term in biases):
        masked = WINDOW if grid else LINE_FORWARD
        return (FIXED if call.mask is None else masked), "a bias that is not learned"
    border, what = (GRID, "a learned bias on a grid") if grid else (LINE, "a learned line bias")
    by_groups = call.mask is None and learned_bias.serves(call)
    if by_groups and call.q.shape[0] > 1:  # whose elements share the dense bias and its gradient
        border *= 2
    # by groups, a few heads at a time are dense
    many = not by_groups and batch * call.q.shape[2] * call.k.shape[2] >= MANY
    return (OF_MANY if many else border), what


def _in_tiles(call: Call) -> bool:
    """Whether PyTorch's kernel computes the tiles of a mask, once the rotation is applied."""
    mask = call.mask
    if mask is None or mask.allowed is not None or mask.blocks is not None or mask.has_globals:
        return False
    same_width = call.q.shape[3] == call.v.shape[3] and not _is_widened(call)
    return same_width and call.q.dtype is torch.float32 and call.terms.one(Sinks) is None


def _is_widened(call: Call) -> bool:
    """Whether a rotation makes queries and keys wider than they are."""
    rotation = call.terms.one(Rotation)
    return rotation is not None and rotation.widens > 1


def _adds_fixed_dense(call: Call) -> bool:
    """Whether all that is added to the scores is there, pair by pair, and learns nothing: PyTorch's kernel reads it."""
    adding = [term for term in call.terms if term.adds_scores]
    learns = torch.is_grad_enabled()
    there = [isinstance(term, DenseBias) and not (learns and term.bias.requires_grad) for term in adding]
    return bool(there) and all(there) and call.dropout == 0 and not is_pattern(call.mask)


def _reference(call: Call, kind: str) -> str | None:
    scores = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    return "it would hold several tensors of all scores" if scores > SCORES_OF_REFERENCE else None


def _never(call: Call, kind: str) -> str | None:
    return None


SLOWER: dict[str, Callable[[Call, str], str | None]] = {
    "triton": _triton,
    "streaming": _streaming,
    "flex": lambda call, kind: "its gradients are not deterministic",
    "reference": _reference,
}
"""Why `auto` passes over an engine although it could compute a call on a kind of device, or None. An engine without a
rule is never passed over so."""
