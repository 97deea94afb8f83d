"""`mask="causal"` and boolean tensors in `torch.compile(fullgraph=True)`. A script, not a test: types unchecked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos import Sequence, T5Bias, attention

N = 6
VALID = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
MASKS: list[Any] = ["causal", torch.ones(N, N, dtype=torch.bool).tril(), VALID[:, None, None]]

if __name__ == "__main__":
    bias, tokens = T5Bias(4), Sequence(N)
    q, k, v = torch.randn(3, 2, 4, N, 8).unbind()
    for mask in MASKS:

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = mask) -> Tensor:
            return attention(q, k, v, position=bias, queries=tokens, mask=mask)

        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
