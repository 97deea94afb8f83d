"""Scores of all pairs, or a view of them, for PyTorch's `scaled_dot_product_attention`; and faster code on CPU.

engine              passes the added scores as PyTorch's mask
learned_bias        a learned bias, as one autograd node, a few heads at a time if scores are many
vectors             vectors at few tokens, as one autograd node; pairs read products with each row
strided_bias        a sequence's fixed bias: PyTorch's kernel reads one number per offset
first_derivative    relpos's error for a second derivative through PyTorch's fused kernels, which have none
"""

from relpos.engines.sdpa.engine import SDPA

__all__ = ["SDPA"]
