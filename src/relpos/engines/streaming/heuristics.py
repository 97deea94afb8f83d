"""When `auto` prefers another engine because this one was measured to be slower.

Each threshold is a power of two of N x M, between the largest size at which the dense engine was faster and the
smallest at which this one was; docs/log.md has the measurements. They hold for CPU; other devices are not measured yet.
"""

from __future__ import annotations

import torch

from relpos.core import DenseBias, LineBias, LineVectors, Mask, QueryBias, Rotation, RowRule, Scale, Sinks
from relpos.engines import product, vector_product, view
from relpos.engines.call import Call

_SEQUENCE, _GRID, _KEY_VECTORS = 2**16, 2**18, 2**18
_VECTORS = 2**19
"""For calls that `vector_product` serves."""
_SEQUENCE_WITHOUT_GRADIENT, _GRID_WITHOUT_GRADIENT = 2**18, 2**20
_NOT_LEARNED, _WINDOW = 2**21, 2**20
_LEAST = 2**20
"""Scores of all heads below which the fixed cost of a call, about a millisecond, dominates."""
_TOO_SMALL = f"the call is too small: from {_LEAST:,} scores (heads x queries x keys) on it is faster"
_DROPOUT = 2**18
"""Pairs from which its dropout by counter is faster than a draw of PyTorch's generator for each score."""
_MANY, _OF_MANY = 2**24, 2**14
"""From so many scores of all heads on, a dense step waits for fresh memory; it is slower then from so many pairs on."""
_SCORES = 2**25
"""Scores of all heads from which any other term is computed here. That is no faster, but saves memory: a dense engine
holds several such tensors, 128 MiB each."""
_PATTERN = 2**20
"""Pairs from which a dense engine is slower under a mask that allows few pairs; the same as for a window."""
_SCORES_ELSEWHERE = 2**31
"""Scores of all heads from which a dense engine's tensors, 8 GiB each, would fill a GPU."""


def is_pattern(mask: Mask | None) -> bool:
    """Whether a mask probably allows few pairs, judged without reading tensors: it has a bound on the left, a block
    layout, or segments that the whole batch shares (those of padding rarely are)."""
    if mask is None:
        return False
    if mask.left is not None or mask.low is not None or mask.blocks is not None:
        return True
    return mask.query_segments is not None and mask.query_segments.dim() == 1


def slower(call: Call) -> str | None:
    """Why another engine is faster for this call, or None. The text names no sizes of the call, because torch.compile
    would turn these into constants."""
    batch, heads, n, _ = call.q.shape
    pairs = n * call.k.shape[2]
    scores = batch * heads * pairs
    on_cpu = call.q.device.type == "cpu"
    if on_cpu and scores < _LEAST and call.terms.one(LineBias) is not None:
        return _TOO_SMALL
    border, kind = _border(call)
    if not on_cpu:
        fits = border is None or scores < _SCORES_ELSEWHERE
        return f"it has not been measured faster on {call.q.device.type}" if fits else None
    if border is None:
        return f"{kind}: PyTorch's own kernel is faster"
    if scores < _LEAST:
        return _TOO_SMALL
    if pairs < border:
        return f"for {kind} it is faster at more tokens only"
    return None


def _border(call: Call) -> tuple[int | None, str]:
    """The number of pairs from which this engine is faster, None for never; and what the number is for, in words."""
    regular_terms = (LineBias, LineVectors, Rotation, QueryBias, Scale, Sinks)
    biases, vectors = call.terms.of(LineBias), call.terms.of(LineVectors)
    kinds = {term.lines.layout.kind for term in call.terms if isinstance(term, LineBias | LineVectors)}
    batch = max(1, call.q.shape[0]) * call.q.shape[1]
    regular = kinds <= {"affine"} if vectors else "irregular" not in kinds and len(biases) <= 1
    if _adds_fixed_dense(call):
        return None, "a dense bias that is not learned"
    wide = call.q.dtype in (torch.float32, torch.float64)  # half precision is faster by this engine
    if wide and call.mask is None and view.readable(call) is not None:
        return None, "a sequence's bias without gradients"
    if not regular or any(not isinstance(term, regular_terms) for term in call.terms):
        border = -(-_SCORES // batch)
        if call.terms.of(RowRule):
            return border, "a row rule"
        return min(border, _PATTERN) if is_pattern(call.mask) else border, "a position that is no line bias"
    if call.dropout > 0:
        return _DROPOUT, "dropout"
    if not kinds:
        if is_pattern(call.mask):
            return _PATTERN, "a pattern"
        if call.mask is None or call.mask.is_plain_causal or not call.mask.is_interval:
            return None, "no bias"
        return _WINDOW, "a window"
    if wide and call.groups == 1 and not is_pattern(call.mask) and vector_product.serves(call):
        return _VECTORS, "vectors on queries or keys"
    if any(term.side == "key" for term in vectors):
        return _KEY_VECTORS, "vectors on the key side"
    if vectors:
        return _SEQUENCE, "vectors"
    grid = "nested" in kinds
    if not torch.is_grad_enabled():
        border = _GRID_WITHOUT_GRADIENT if grid else _SEQUENCE_WITHOUT_GRADIENT
        return border, "a line bias without gradients"
    if not any(term.values.requires_grad for term in biases):
        masked = _WINDOW if grid else _SEQUENCE_WITHOUT_GRADIENT
        return (_NOT_LEARNED if call.mask is None else masked), "a bias that is not learned"
    border, kind = (_GRID, "a learned bias on a grid") if grid else (_SEQUENCE, "a learned line bias")
    alone = call.mask is None and product.serves(call)
    if alone and call.q.shape[0] > 1:  # whose elements share the dense bias and its gradient
        border *= 2
    many = not alone and batch * call.q.shape[2] * call.k.shape[2] >= _MANY  # alone, a few heads at a time are dense
    return (_OF_MANY if many else border), kind


def _adds_fixed_dense(call: Call) -> bool:
    """Whether all that is added to the scores is there, pair by pair, and learns nothing: PyTorch's kernel reads it."""
    adding = [term for term in call.terms if term.adds_scores]
    learns = torch.is_grad_enabled()
    there = [isinstance(term, DenseBias) and not (learns and term.bias.requires_grad) for term in adding]
    return bool(there) and all(there) and call.dropout == 0 and not is_pattern(call.mask)
