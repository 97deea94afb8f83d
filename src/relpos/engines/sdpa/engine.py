"""Everything that is a score becomes the mask of PyTorch's `scaled_dot_product_attention`.

N x M numbers are stored, but for a long sequence's bias without gradients (`strided_bias`); at small sizes this is the
fastest there is. A learned bias takes PyTorch's math path, or on CPU ours (`learned_bias`; for vectors, also without
gradients, `vectors`).
What PyTorch cannot express raises: value vectors, a soft cap, the log-sum-exp, and scores that are added under a
transform of functions, because PyTorch chooses a kernel without asking whether they are learned outside of it. Dropout
is PyTorch's own: the same distribution as elsewhere, not the same pairs.

On CUDA a floating mask goes in q's own dtype and never to cuDNN: PyTorch's kernels there want it so (a float32 mask
beside half q is refused or misread, pytorch 191612), and cuDNN's gradient under a mask has been NaN at some lengths
(pytorch 196678).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relpos.core import LineBias, LineVectors, PairRotations, Sinks, Softcap, at_least_float32, densify, may_cache
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.engine import Compute, Engine, Way
from relpos.engines.operators import FORWARD_MODE, lacks_transform
from relpos.engines.sdpa import learned_bias, strided_bias, vectors
from relpos.engines.sdpa.first_derivative import first_derivative_only

_UNDER_A_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _few_vectors(call: Call) -> bool:
    return vectors.serves(call) and learned_bias.serves(call)


def _under_vectors(call: Call) -> tuple[Tensor, None]:
    allowed, blank = _allowed(call)
    if allowed is not None and blank is not None:
        allowed = allowed | blank
    output = vectors.attend(call.rotated(), allowed)
    return (output if blank is None else output.masked_fill(blank, 0)), None


def _readable(call: Call) -> bool:
    return strided_bias.readable(call) is not None


def _by_strides(call: Call) -> Compute:
    line = strided_bias.readable(call)
    assert line is not None
    attend = strided_bias.Reading.of(call, line).attend
    return _of_rotated(lambda call: (attend(call), None))(call)


def _only_bias_on_cpu(call: Call) -> LineBias | None:
    """The bias on regular lines of a CPU call without mask and dropout that adds nothing else to the scores."""
    if not call.q.is_cpu or not may_cache(call.q.device) or call.mask is not None or call.dropout > 0:
        return None
    return call.only_bias


def _constant(call: Call) -> bool:
    line = _only_bias_on_cpu(call)
    return line is not None and not (torch.is_grad_enabled() and line.values.requires_grad)


def _of_rotated(compute: Compute) -> Callable[[Call], Compute]:
    """What prepares a function that takes calls whose rotation is applied."""
    return lambda call: (lambda one: compute(one.rotated())) if call.has_content_terms else compute


def _under_constant(call: Call) -> tuple[Tensor, None]:
    line = call.terms.one(LineBias)
    assert line is not None
    bias = densify.expand_regular(line.values, line.lines)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    bias = (bias if bias.dtype == wide else bias.to(wide))[None]
    output = F.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=bias, scale=call.scale, enable_gqa=call.is_grouped
    )
    return first_derivative_only(output), None


def _learned(call: Call) -> bool:
    line = _only_bias_on_cpu(call)
    return line is not None and learned_bias.serves(call) and line.values.dtype == call.q.dtype


def _under_learned(call: Call) -> tuple[Tensor, None]:
    line = call.terms.one(LineBias)
    assert line is not None
    return learned_bias.attend(call.q, call.k, call.v, line.values, line.lines, call.scale), None


def _is_causal(call: Call) -> bool:
    square = call.mask is not None and call.q.shape[2] == call.k.shape[2]
    plain = call.mask is not None and call.mask.is_plain_causal and not _adds(call)
    return True if square and plain else False  # noqa: SIM210 - decided now, where sizes are symbolic


def _needs_no_mask_tensor(call: Call) -> bool:
    """Whether PyTorch's kernel needs no tensor as its mask."""
    return not _adds(call) and call.terms.one(Sinks) is None and (call.mask is None or _is_causal(call))


def _under_mask(call: Call) -> tuple[Tensor, None]:
    """Any call that `DenseSDPA` supports, by PyTorch's mask; a learned mask goes to `learned_bias` where it can."""
    causal = _is_causal(call)
    bias = blank = None
    if not causal:
        bias, blank = _mask(call)
    if call.terms.one(PairRotations) is None:
        call = call.rotated()
        q, k, v = call.q, call.k, call.v
    else:  # the mask has the products of all pairs
        q, k, v = torch.zeros_like(call.q), torch.zeros_like(call.k), call.v
    width = v.shape[3]
    if q.is_cpu and q.shape[3] > width:  # the kernel there that holds no scores takes one width
        v = F.pad(v, (0, q.shape[3] - width))
    if call.terms.one(Sinks) is not None:  # one more key that scores the sink's logit and carries nothing
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if bias is not None and bias.requires_grad and torch.is_grad_enabled() and learned_bias.serves(call):
        output = learned_bias.attend(q, k, v[..., :width], bias, None, call.scale)
        return (output if blank is None else output.masked_fill(blank, 0)), None
    masked_on_cuda = bias is not None and q.is_cuda
    if bias is not None and masked_on_cuda and bias.is_floating_point():
        bias = bias.to(q.dtype)
        if bias.shape[3] == 1:  # kernels there read keys side by side
            bias = bias.expand(-1, -1, -1, k.shape[2]).contiguous()
    with sdpa_kernel(_UNDER_A_MASK) if masked_on_cuda else nullcontext():
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=call.dropout,
            is_causal=causal,
            scale=call.scale,
            enable_gqa=call.is_grouped,
        )
    output = first_derivative_only(output)
    output = output if output.shape[3] == width else output[..., :width]
    return (output if blank is None else output.masked_fill(blank, 0)), None


def _adds(call: Call) -> bool:
    """Whether something is added to the scores, which makes PyTorch's mask a floating one."""
    return any(term.adds_scores for term in call.terms)


def _repeated(k: Tensor, groups: int) -> Tensor:
    """The keys of each query head."""
    return k if groups == 1 else k.repeat_interleave(groups, dim=1)


def _allowed(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The pairs that a mask allows, and the rows that may see nothing."""
    if call.mask is None:
        return None, None
    allowed = call.mask.dense(call.q.shape[2], call.k.shape[2], call.q.device)
    if not call.mask.may_blank_rows or call.terms.one(Sinks) is not None:
        return allowed, None
    return allowed, ~allowed.any(dim=-1, keepdim=True)  # such a row attends anywhere and is blanked: 0 is no divisor


def _mask(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """PyTorch's mask, boolean where nothing is added, and the rows `[1 or B, 1 or H, N, 1]` that may see nothing."""
    n, m = call.q.shape[2], call.k.shape[2]
    allowed, blank = _allowed(call)
    k = _repeated(at_least_float32(call.k), call.groups)
    bias = dense.scores(call.terms, at_least_float32(call.q), k, call.scale, allowed)
    if call.terms.one(PairRotations) is not None:
        own = dense.product(call.terms, at_least_float32(call.q), k) * call.scale
        bias = own if bias is None else bias + own
    sinks = call.terms.one(Sinks)
    if allowed is None and sinks is None:
        return bias, None
    if sinks is not None:
        bias = k.new_zeros(1, 1, n, m) if bias is None else bias
        allowed = torch.ones_like(bias, dtype=torch.bool) if allowed is None else allowed
    if allowed is None:
        return bias, blank
    if bias is None:
        return (allowed if blank is None else allowed | blank), blank
    forbidden = bias.new_full((), -torch.inf)
    bias = torch.where(allowed, bias, forbidden if blank is None else forbidden.where(~blank, 0))
    if sinks is not None:
        column = sinks.rows(bias.dtype)[..., None]
        shape = torch.broadcast_shapes(bias.shape[:2], column.shape[:2])
        bias = torch.cat([bias.expand(*shape, n, m), column.expand(*shape, n, 1)], dim=-1)
    return bias, blank


class DenseSDPA(Engine):
    name = "sdpa"
    summary = (
        "scores handed to PyTorch's scaled_dot_product_attention; any device; best for small windows, fixed biases"
    )
    ways = (
        Way("products with each row of vectors, looked up for all pairs", _few_vectors, lambda call: _under_vectors),
        Way("a bias on lines, read as a strided view", _readable, _by_strides),
        Way("a bias on lines, expanded to all pairs", _constant, _of_rotated(_under_constant)),
        Way("a learned bias on lines, in one autograd node", _learned, _of_rotated(_under_learned)),
        Way("PyTorch's own kernel, without a tensor of pairs", _needs_no_mask_tensor, lambda call: _under_mask),
        Way("a mask of all pairs", lambda call: True, lambda call: _under_mask),
    )

    def unsupported(self, call: Call) -> str | None:
        for term in call.terms:
            if isinstance(term, Softcap):
                return "Softcap"
            if isinstance(term, LineVectors) and term.side == "value":
                return "LineVectors on the value side"
        if call.return_lse:
            return "return_lse (PyTorch does not return the log-sum-exp)"
        transform = lacks_transform()
        return transform if transform is not None and (transform == FORWARD_MODE or _adds(call)) else None

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], None]:
        """The output; there is no log-sum-exp."""
        return self.plan(call)(call)  # type: ignore[return-value]


SDPA = DenseSDPA()
