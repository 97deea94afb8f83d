"""A fixed bias on consecutive integers: PyTorch's kernel reads it as a view, which stores O(N) numbers.

The kernel reads a mask through its strides. With the values reversed and the last query first, row r reads r entries
further right than row 0. What a mask by `left` and `right` forbids lies at both ends, which are set to -inf:

    reversed values     ... v4 v3 v2 v1 v0
    last query                 v2 v1 v0
    the one before                v1 v0 -inf

So queries are passed from the last to the first, and the output is flipped back. A small bias is flipped instead: N x M
numbers per head, but fewer than q and the output have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, Mask, QueryBias, QueryScale, Rotation, may_cache
from relpos.engines.call import Call
from relpos.engines.sdpa.first_derivative import first_derivative_only

_AT_ONCE = 2**17
"""Numbers of q that are flipped at once if no gradient is wanted: memory for more comes fresh from the system."""

_FEW = 2**17
"""Maximum numbers of a bias that is flipped, if q and output have more: 8 heads of 128 x 128."""

_OF_CONTENT = (Rotation, QueryBias, QueryScale)
"""The terms that may come with the bias."""


def readable(call: Call) -> LineBias | None:
    """The bias of a call, if PyTorch's flash kernel supports the call and can read the bias so, and if flipping costs
    less than looking up every pair."""
    if not call.q.is_cpu or not may_cache(call.q.device):  # before sizes, which would guard a graph
        return None
    batch, _, n, width = call.q.shape
    bias = call.only_bias
    if bias is None or n == 1 or call.dropout > 0 or call.return_lse:
        return None
    if bias.lines.layout.kind != "affine" or (torch.is_grad_enabled() and bias.values.requires_grad):
        return None
    if call.mask is not None and (not call.mask.is_interval or call.mask.may_blank_rows):
        return None
    for term in call.terms.items:
        if term is not bias and not isinstance(term, _OF_CONTENT):
            return None
    flash = call.v.shape[3] == width and call.k.stride(3) == call.v.stride(3) == 1
    return bias if flash and batch * width <= call.k.shape[2] else None


@dataclass(frozen=True)
class Reading:
    """How calls of one structure read their bias: all that depends on shapes, dtypes and lines.

    Attributes:
        part: the values that the pairs read; None for all.
        wide: the dtype that the kernel needs for them; None if they have it.
        shape: of the view, `[1, 1 or H, N, M]`.
        few: whether the bias is flipped, and not q and the output.
        at_once: heads that are flipped together if no gradient is wanted.
    """

    part: slice | None
    wide: torch.dtype | None
    shape: tuple[int, int, int, int]
    few: bool
    at_once: int

    @classmethod
    def of(cls, call: Call, bias: LineBias) -> Reading:
        """How a call reads the bias that is `readable`."""
        (batch, _, n, width), m, groups = call.q.shape, call.k.shape[2], call.groups
        query, key = bias.lines.layout.query, bias.lines.layout.key
        assert query is not None
        assert key is not None
        zero = bias.lines.origin + query.start - key.start  # where the first query meets the first key
        wide = torch.promote_types(call.q.dtype, torch.float32)
        rows = bias.values.shape[0]
        return cls(
            part=None if bias.values.shape[1] == n + m - 1 else slice(zero - m + 1, zero + n),
            wide=None if bias.values.dtype == wide else wide,
            shape=(1, rows, n, m),
            few=n >= m and rows * n * m <= min(2 * call.q.numel(), _FEW),  # for fewer queries it would be copied twice
            at_once=max(1, _AT_ONCE // (batch * n * width * groups)) * groups,
        )

    def attend(self, call: Call) -> Float[Tensor, "B H N V"]:
        """The output of a call whose rotation is applied."""
        bias = call.terms.one(LineBias)
        assert bias is not None
        window = bias.values
        if self.part is not None:
            window = window[:, self.part]
        if self.wide is not None:
            window = window.to(self.wide)
        if call.mask is not None:
            window = _masked(window, call.mask, self.shape[3])
        q = call.q if call.q.stride(3) == 1 else call.q.contiguous()  # the kernel requires it
        window = window.contiguous() if self.few else window.flip(-1).contiguous()
        view = window.as_strided(self.shape, (0, window.stride(0), 1, 1))
        if self.few:  # a row has the last key first here
            return _attended(q, call.k, call.v, view.flip(3), call)
        return self._by_turning_queries(q, view, call)

    def _by_turning_queries(self, q: Tensor, view: Tensor, call: Call) -> Float[Tensor, "B H N V"]:
        """The output by a view that has the last query first, a few heads at once if no gradient is wanted."""
        heads, groups, at_once = q.shape[1], call.groups, self.at_once
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, call.k, call.v))
        if at_once >= heads or learns:
            return _turned(q, call.k, call.v, view, call)
        out, view = q.new_empty(q.shape), view.expand(-1, heads, -1, -1)
        for start in range(0, heads, at_once):
            own, shared = slice(start, start + at_once), slice(start // groups, (start + at_once) // groups)
            out[:, own] = _turned(q[:, own], call.k[:, shared], call.v[:, shared], view[:, own], call)
        return out


def _masked(window: Float[Tensor, "H L"], mask: Mask, keys: int) -> Float[Tensor, "H L"]:
    """The values of query - key from -(keys - 1) on, with -inf where these are farther apart than a mask allows."""
    window = window.clone()
    if mask.left is not None:
        window[:, keys + mask.left :] = -torch.inf
    if mask.right is not None:
        window[:, : max(0, keys - 1 - mask.right)] = -torch.inf
    return window


def _turned(q: Tensor, k: Tensor, v: Tensor, view: Tensor, call: Call) -> Tensor:
    """The output of some heads, whole groups of them, by a view of the bias with the last query first."""
    return _attended(q.flip(2), k, v, view, call).flip(2)


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, call: Call) -> Tensor:
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=call.scale, enable_gqa=call.is_grouped)
    return first_derivative_only(output)
