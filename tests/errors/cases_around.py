"""Wrong calls of what stands around positions: linear attention, norms, grouped heads, optimizers."""

from __future__ import annotations

from typing import Any

import torch
from ingredients import Case
from torch import nn

import relpos

x = torch.randn(1, 2, 5, 4)
tokens = torch.randn(1, 5, 8)
weight = nn.Parameter(torch.ones(3))


def linear(**more: Any) -> Any:
    return relpos.linear_attention(x, x, x, **more)


# fmt: off
CASES: list[Case] = [
    ("linear_attention: decay both ways", ValueError,
     lambda: linear(decay=torch.ones(2)),
     "decay only in a causal call", "causal=False", "has no direction"),
    ("linear_attention: keys of another width", ValueError,
     lambda: relpos.linear_attention(x, x[..., :3], x),
     "q [B, H, N, D]", "(1, 2, 5, 3)", "the same width"),
    ("linear_attention: heads", ValueError,
     lambda: relpos.linear_attention(x[:, :1], x, x),
     "query heads to be a multiple of key heads", "1 and 2", "Change one"),
    ("LinearAttention: heads", ValueError,
     lambda: relpos.LinearAttention(9, 2),
     "d_model to be a multiple of num_heads", "9 and 2", "Change one"),
    ("LinearAttention: tokens", ValueError,
     lambda: relpos.LinearAttention(6, 2)(tokens),
     "[B, N, 6]", "(1, 5, 8)", "Layout is"),
    ("RotaryPositionalEmbedding: width", ValueError,
     lambda: relpos.RotaryPositionalEmbedding(4)(tokens),
     "[B, N, 4] or [B, H, N, 4]", "(1, 5, 8)", "the width that is turned"),
    ("RotaryPositionalEmbedding: seq_len", ValueError,
     lambda: relpos.RotaryPositionalEmbedding(8)(tokens, 4),
     "seq_len 5", "4", "Leave it out."),
    ("RotaryPositionalEmbedding: longer", ValueError,
     lambda: relpos.RotaryPositionalEmbedding(8, 4)(tokens),
     "at most max_seq_len=4 tokens", "5", "a larger one"),
    ("ALiBiPositionalEmbedding: not square", ValueError,
     lambda: relpos.ALiBiPositionalEmbedding(2)(x),
     "scores of shape [B, 2, N, N]", "(1, 2, 5, 4)", "relpos.ALiBi"),
    ("ALiBiPositionalEmbedding: longer", ValueError,
     lambda: relpos.ALiBiPositionalEmbedding(2, 4)(torch.zeros(1, 2, 5, 5)),
     "at most max_seq_len=4 tokens", "5", "a larger one"),
    ("LocalAttention: even", ValueError,
     lambda: relpos.LocalAttention(8, 2, 4),
     "an odd window_size", "4", "causal=True"),
    ("SparseAttention: factor", ValueError,
     lambda: relpos.SparseAttention(8, 2, 0),
     "sparsity_factor to be an integer of at least 1", "int 0", "Its smallest value is 1."),
    ("FlashAttention: block", ValueError,
     lambda: relpos.FlashAttention(8, 2, 0),
     "block_size to be an integer of at least 1", "int 0", "Its smallest value is 1."),
    ("linear_attention: a decay that is a number", ValueError,
     lambda: linear(causal=True, decay=0.9),
     "a tensor with one decay a query head, [2]", "0.9", "above 0"),
    ("linear_attention: angles of other tokens", ValueError,
     lambda: linear(position=relpos.RotaryEmbedding(4).terms(relpos.Sequence(6))),
     "Rotation query angles of shape", "(1, 1, 6, 2)", "the same q, k and v"),
    ("flash_attention: lines of other tokens", ValueError,
     lambda: relpos.flash_attention(x, x, x, bias=relpos.T5Bias(2).terms(relpos.Sequence(9)).of(relpos.LineBias)[0]),
     "lines of LineBias for 5 queries", "9", "these very tokens"),
    ("flash_attention: a bias of another kind", ValueError,
     lambda: relpos.flash_attention(x, x, x, bias=torch.ones(2, 5, 5)),  # type: ignore[arg-type]
     "bias to be a LineBias", "(2, 5, 5)", "terms("),
    ("MultiQueryAttention: heads", ValueError,
     lambda: relpos.MultiQueryAttention(9, 2),
     "dim to be a multiple of num_heads", "9 and 2", "Change one"),
    ("RMSNorm: width", ValueError,
     lambda: relpos.RMSNorm(0),
     "d_model to be an integer of at least 1", "int 0", "Its smallest value is 1."),
    ("GroupNorm: groups", ValueError,
     lambda: relpos.GroupNorm(6, 4),
     "d_model to be a multiple of num_groups", "6 and 4", "Change one"),
    ("GroupNorm: tokens", ValueError,
     lambda: relpos.GroupNorm(6, 2)(tokens),
     "[B, N, 6]", "(1, 5, 8)", "Layout is"),
    ("Lion: betas", ValueError,
     lambda: relpos.Lion([weight], betas=(0.9, 1.0)),
     "two betas", "(0.9, 1.0)", "betas=("),
    ("Lion: rate", ValueError,
     lambda: relpos.Lion([weight], lr=-1.0),
     "lr to be a number of at least 0", "-1.0", "rate"),
    ("Sophia: rho", ValueError,
     lambda: relpos.Sophia([weight], rho=0.0),
     "rho to be a number above 0", "0.0", "paper"),
    ("Sophia: no gradients", ValueError,
     lambda: relpos.Sophia([weight]).update_hessian(4),
     "gradients of sampled_loss", "none", "backward()"),
    ("sampled_loss: integers", ValueError,
     lambda: relpos.sampled_loss(torch.ones(2, 3, dtype=torch.long)),
     "scores to be floating point", "int64", "float()"),
    ("parameter_groups: no module", ValueError,
     lambda: relpos.optim.parameter_groups([weight], learning_rate=1.0, weight_decay=0.0),  # type: ignore[arg-type]
     "a module", "list", "Build the model"),
    ("parameter_groups: rate", ValueError,
     lambda: relpos.optim.parameter_groups(torch.nn.Linear(2, 2), learning_rate=-1.0, weight_decay=0.0),
     "learning_rate to be a number of at least 0", "-1.0", "rate"),
    ("parameter_groups: decay", ValueError,
     lambda: relpos.optim.parameter_groups(torch.nn.Linear(2, 2), learning_rate=1.0, weight_decay=float("nan")),
     "weight_decay to be a number of at least 0", "nan", "0 is none"),
    ("parameter_groups: multiplier", ValueError,
     lambda: relpos.optim.parameter_groups(
         torch.nn.Linear(2, 2), learning_rate=1.0, weight_decay=0.0, position_learning_rate_multiplier=-1),
     "position_learning_rate_multiplier to be a number of at least 0", "-1", "1 is the rate of the rest"),
]
# fmt: on
