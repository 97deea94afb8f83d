"""The signatures of the documents that relpos started from, where the field knows the thing by another name.

Each is a thin adapter of the class it names, with that class's arithmetic: the documents' own had width-D tensors meet
tables of width D / 2, rewarded keys after the query, and knew slopes for powers of two alone. `AdamW` is PyTorch's.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW

from relpos.core import LineBias, Sequence, expand, rotate
from relpos.core.checks import fail, require_floating, require_int, shape_of
from relpos.position import ALiBi, RotaryEmbedding

__all__ = ["ALiBiPositionalEmbedding", "AdamW", "RotaryPositionalEmbedding"]


class RotaryPositionalEmbedding(nn.Module):
    """`RotaryEmbedding` applied to a tensor of queries or keys: token n is at position n.

    Args:
        d_model: width of what is rotated, an even number: of a head, where there are heads.
        max_seq_len: the longest sequence that `forward` takes. Angles are computed, so it costs nothing.

    Raises:
        ValueError: a width that is odd; in use, another width or length.

    Examples:
        >>> rotary = relpos.RotaryPositionalEmbedding(d_model=16)
        >>> q = torch.ones(2, 8, 10, 16)  # [B, H, N, D], or [B, N, D]
        >>> rotary(q).shape
        torch.Size([2, 8, 10, 16])
        >>> bool((rotary(q)[:, :, 0] == q[:, :, 0]).all())  # position 0 is not rotated
        True
    """

    def __init__(self, d_model: int, max_seq_len: int = 2048) -> None:
        super().__init__()
        require_int(max_seq_len, "max_seq_len", at_least=1)
        self.d_model, self.max_seq_len = d_model, max_seq_len
        self.rotary = RotaryEmbedding(d_model, layout="half")

    def forward(self, x: Float[Tensor, "*B N D"], seq_len: int | None = None) -> Float[Tensor, "*B N D"]:
        """`x` (`[B, N, D]` or `[B, H, N, D]`) rotated, Hugging Face's "half" layout.

        Args:
            seq_len: N, which the documents ask for; left out, it is read off x.

        Raises:
            ValueError: another width or length.
        """
        if not isinstance(x, Tensor) or x.dim() not in (3, 4) or x.shape[-1] != self.d_model:
            wanted = f"x of shape [B, N, {self.d_model}] or [B, H, N, {self.d_model}]"
            fail(wanted, shape_of(x), "Build it with the width that is turned.")
        length = x.shape[-2]
        if seq_len not in (None, length):
            fail(f"seq_len {length}, as x has tokens", str(seq_len), "Leave it out.")
        if length > self.max_seq_len:
            fail(f"at most max_seq_len={self.max_seq_len} tokens", str(length), "Build it with a larger one.")
        heads = x if x.dim() == 4 else x[:, None]
        self.rotary.settle(x.device)
        turned = rotate(heads, self.rotary.angles(Sequence(length)), layout="half")
        return turned if x.dim() == 4 else turned[:, 0]


class ALiBiPositionalEmbedding(nn.Module):
    """`ALiBi` added to scores: -slope[h] * |i - j|, the published slopes for any number of heads, none learned.

    Args:
        num_heads: H.
        max_seq_len: the longest sequence that `forward` takes. Distances are computed, so it costs nothing.

    Raises:
        ValueError: no heads; in use, scores that are not square, of other heads, or too long.

    Examples:
        >>> scores = relpos.ALiBiPositionalEmbedding(num_heads=8)(torch.zeros(1, 8, 4, 4))
        >>> scores[0, 0, 3]  # the first head's slope is 1/2
        tensor([-1.5000, -1.0000, -0.5000,  0.0000])
    """

    def __init__(self, num_heads: int, max_seq_len: int = 2048) -> None:
        super().__init__()
        require_int(max_seq_len, "max_seq_len", at_least=1)
        self.num_heads, self.max_seq_len = num_heads, max_seq_len
        self.alibi = ALiBi(num_heads)

    def forward(self, attention_scores: Float[Tensor, "B H N N"]) -> Float[Tensor, "B H N N"]:
        """The scores with the bias, in their own dtype.

        Raises:
            ValueError: scores that are not square, of other heads, or longer than built for.
        """
        require_floating(attention_scores, "attention_scores", dims=4)
        heads, queries, keys = attention_scores.shape[1:]
        if heads != self.num_heads or queries != keys:
            wanted = f"scores of shape [B, {self.num_heads}, N, N]"
            fail(wanted, shape_of(attention_scores), "For a cache, pass relpos.ALiBi to relpos.attention.")
        if keys > self.max_seq_len:
            fail(f"at most max_seq_len={self.max_seq_len} tokens", str(keys), "Build it with a larger one.")
        self.alibi.settle(attention_scores.device)
        (term,) = self.alibi.terms(Sequence(keys)).of(LineBias)
        return (attention_scores + expand(term.values, term.lines)).to(attention_scores.dtype)
