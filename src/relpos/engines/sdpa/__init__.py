"""Scores of all pairs, or a view of them, for PyTorch's `scaled_dot_product_attention`; and, on CPU, what is faster.

engine          what is a score becomes PyTorch's mask
learned_bias    a bias that is learned, as one node of autograd, a few heads at a time where scores are many
vectors         vectors at few tokens, as one node of autograd; pairs read products with each row
strided_bias    a sequence's bias that learns nothing: PyTorch's kernel reads one number an offset
once            a second derivative through a fused kernel of PyTorch's, which has none, is refused in our words
"""

from relpos.engines.sdpa.engine import SDPA

__all__ = ["SDPA"]
