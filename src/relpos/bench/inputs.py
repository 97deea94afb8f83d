"""The tensors of a case: the same numbers in every process, shared by all peers of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.bench.cases import Case
from relpos.core import Grid, Mask, Sequence
from relpos.position import Mechanism, RelativePositionBias
from relpos.position.deberta import DisentangledPosition
from relpos.position.shaw import ShawPosition
from relpos.position.t5 import T5Bias
from relpos.position.transformer_xl import TransformerXLPosition

_STD = 0.5
"""The standard deviation of learned tables: large enough that a wrong row is visible."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a case.

    Attributes:
        q, k, v: `[B, H, N, D]`, or None for a layer; with `case.queries`, N is smaller in q.
        x: tokens `[B, N, E]` of a layer, else None.
        gradient: the output's gradient in a step.
        tokens: coordinates of the tokens. position: the mechanism, or None. mask: causal, or None.
    """

    case: Case
    q: Float[Tensor, "B H N D"] | None
    k: Float[Tensor, "B H M D"] | None
    v: Float[Tensor, "B H M D"] | None
    x: Float[Tensor, "B N E"] | None
    gradient: Tensor
    tokens: Sequence | Grid
    position: Mechanism | None
    mask: Mask | None

    @property
    def queries(self) -> Sequence | Grid:
        """The coordinates of the queries: all tokens, or the last ones."""
        count, last = self.case.queries, self.case.sizes[0]
        return self.tokens if count is None else Sequence(count, start=last - count)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a case that is no layer."""
        assert self.q is not None
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v


def mechanism(case: Case) -> Mechanism | None:
    """The position of a case, with random tables in float32."""
    torch.manual_seed(0)
    heads, width = case.heads, case.head_dim
    match case.position:
        case "none":
            return None
        case "line":
            return RelativePositionBias(heads, seq_len=case.sizes[0], prefix=case.prefix, init_std=_STD)
        case "grid":
            rows, columns = case.sizes
            return RelativePositionBias(heads, window_size=(rows, columns), prefix=case.prefix, init_std=_STD)
        case "t5":
            return T5Bias(heads, bidirectional=not case.causal, init_std=_STD)
        case "shaw":
            return ShawPosition(width, max_distance=16, init_std=_STD)
        case "transformer_xl":
            return TransformerXLPosition(heads, width, case.width, init_std=_STD)
        case "deberta":
            return DisentangledPosition(heads, width, case.width, span=256, max_distance=512, init_std=_STD)


def setting(case: Case) -> tuple[Mechanism | None, Sequence | Grid, Mask | None]:
    """The position of a case, the coordinates of its tokens, and its mask."""
    tokens: Sequence | Grid = Sequence(case.sizes[0], prefix=case.prefix)
    if case.position == "grid":
        tokens = Grid(*case.sizes, prefix=case.prefix)
    position = mechanism(case)
    position = None if position is None else position.to(case.device).requires_grad_(case.what == "step")
    return position, tokens, Mask.causal() if case.causal else None


def make(case: Case, dtype: torch.dtype | None = None) -> Inputs:
    """The inputs of a case; `dtype` replaces its own, but the values are still rounded to the case's dtype."""
    case_dtype: torch.dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(1)
    learns = case.what == "step"

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator).to(case_dtype)
        return x.to(case.device) if dtype is None else x.to(case.device, dtype)

    position, tokens, mask = setting(case)
    if position is not None:
        position = position.to(dtype or torch.float32)
    q = k = v = x = None
    if case.layer:
        x = random(case.batch, case.count, case.width).requires_grad_(learns)
        gradient = random(*x.shape)
    else:
        shape = (case.batch, case.heads, case.count, case.head_dim)
        q, k, v = (random(*shape) for _ in range(3))
        q = q if case.queries is None else q[:, :, -case.queries :].clone()
        if case.position == "t5":
            q = q * 2.0 ** -round(math.log2(case.head_dim) / 2)  # T5's scale is 1, so scale the queries
        q, k, v = (x.requires_grad_(learns) for x in (q, k, v))
        gradient = random(*q.shape[:3], case.head_dim)
    return Inputs(case, q, k, v, x, gradient, tokens, position, mask)
