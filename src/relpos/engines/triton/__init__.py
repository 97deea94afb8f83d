"""Fused kernels on GPU: a line bias read inside the tile, its gradient summed along lines in a fixed order.

The path of a call: `rotation` is applied before, `launch` says sizes and strides, and `kernels` does the rest. Triton
itself is imported with the first call. With TRITON_INTERPRET=1 the kernels run on CPU, for tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, Lines, QueryBias, Rotation, Scale, Sinks
from relpos.engines.call import Call
from relpos.engines.operators import lacks_transform, make_operator
from relpos.engines.work import Work, pack, work_of

NAME = "triton"
SUMMARY = "fused kernels for a line bias on GPU, with a gradient in a fixed order"
CHECKED_ON = ("cuda",)
"""Kinds of device where `auto` takes this engine only after it has agreed with the reference; see `verdicts`."""

_SERVED = (LineBias, Rotation, QueryBias, Scale, Sinks)
MOST_AXES = 3
"""Of regular lines, for the gradient of their bias."""
FEW = 256
"""Tokens up to which the gradient of a bias may be summed pair by pair, whatever the lines."""
_WIDEST = 256
HOPPERS = 227 * 1024
"""Bytes of shared memory that a program may have on the GPUs that tiles are sized for."""
_LEAST, _AMPLE = 99 * 1024, 160 * 1024
"""The least that any call takes, and what wide heads and float64 take."""
_SHORT = 512


def _forward(work: Work) -> tuple[Tensor, Tensor]:
    from relpos.engines.triton.launch import Launch

    with torch.cuda.device_of(work.q):
        return Launch(work).forward()


def _backward(work: Work, *results: Any) -> dict[int, Tensor]:
    from relpos.engines.triton.launch import Launch

    with torch.cuda.device_of(work.q):
        return Launch(work).backward(*results)


_INSTALLED = importlib.util.find_spec("triton") is not None
_operator = make_operator(NAME, _forward, _backward)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if not torch.cuda.is_available():  # a tensor that only says it is there
        return HOPPERS
    properties: Any = torch.cuda.get_device_properties(device)
    known = HOPPERS if properties.major in (9, 10) else _LEAST if properties.major >= 8 else 0  # if PyTorch is silent
    return int(getattr(properties, "shared_memory_per_block_optin", known))


def interpreting() -> bool:
    """Whether Triton runs kernels on CPU, step by step."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def lacks(call: Call) -> str | None:
    """What of the call this engine cannot do, or what it lacks here."""
    q, mask = call.q, call.mask
    if q.device.type != "cuda" and not interpreting():
        return f"a CUDA device (q is on {q.device.type})"
    if q.device.type == "cuda" and shared_memory(q.device) < _LEAST:
        return f"{_LEAST // 1024} KiB of shared memory for a program, which GPUs have from Ampere on"
    large = max(q.shape[3], call.v.shape[3]) > 128 or q.dtype == torch.float64
    if q.device.type == "cuda" and large and shared_memory(q.device) < _AMPLE:
        return f"{_AMPLE // 1024} KiB of shared memory for a program, which wide heads and float64 take"
    if not _INSTALLED:
        return "Triton, which is not installed"
    for term in call.terms:
        if not isinstance(term, _SERVED):
            return type(term).__name__
    if max(q.shape[3], call.v.shape[3]) > _WIDEST:
        return f"head widths above {_WIDEST}"
    if mask is not None and mask.has_globals:
        return "a mask with globals"
    if mask is not None and mask.blocks is not None:
        return "a mask with blocks"
    biases = call.terms.of(LineBias)
    if biases and call.scale == 0:
        return "a scale of 0 beside a bias"
    if len(biases) > 1:
        return "several line biases on different lines"
    if any(_is_irregular(term) for term in biases):
        return f"the gradient of a bias on irregular lines of over {FEW} tokens, or that differ within a batch"
    return lacks_transform()


def _is_irregular(term: LineBias) -> bool:
    """Whether a gradient is wanted that the kernel has no order for."""
    if not (torch.is_grad_enabled() and term.values.requires_grad):
        return False
    if are_few(term.lines):
        return False
    query, key = term.lines.layout.query, term.lines.layout.key
    if query is None or key is None:
        return True
    return query.strides != key.strides or len(query.sizes) > MOST_AXES


def are_few(lines: Lines) -> bool:
    """Whether no side has more than a few tokens, at the same places throughout the batch."""
    sides = lines.query, lines.key
    return all(x.shape[-1] <= FEW and (x.dim() == 1 or x.shape[0] == 1) for x in sides)


def slower(call: Call) -> str | None:
    """Why `auto` goes on, or None. The border to dense scores is a guess until it is measured."""
    if call.q.device.type != "cuda":
        return "it would run in Triton's interpreter"
    if call.return_lse:  # which PyTorch's kernels do not give
        return None
    if not call.terms.of(LineBias) and (call.mask is None or call.mask.is_plain_causal):
        return "without a bias PyTorch's own kernels are at hand"
    if max(call.q.shape[2], call.k.shape[2]) < _SHORT:
        return f"fewer than {_SHORT} tokens"
    return None


def run(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """Output and log-sum-exp."""
    from relpos.engines.triton.rotation import rotate

    out, lse = _operator(*pack(work_of(call, rotate)))
    return out, lse
