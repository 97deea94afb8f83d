"""Sparse patterns on sequences: strides, a window with global tokens, and block layouts."""

from __future__ import annotations

from numbers import Integral

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Blocks, Mask
from relpos.core.checks import fail, require_flag, require_int, shape_of
from relpos.patterns.neighbourhoods import local


def fixed(length: int, stride: int, *, summaries: int = 1, causal: bool = False) -> Mask:
    """Each token sees its own block of `stride` tokens, and the last `summaries` tokens of every block.

    The fixed pattern of Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3, with both
    parts in one head. `summaries` is their c: the last c tokens of a block summarize it for all others. Theirs is
    causal. With `stride` near sqrt(length) a token sees O(sqrt(length)) others.

    Args:
        length: number of tokens in the sequence.
        stride: tokens of a block.
        summaries: number of tokens at a block's end that all see.
        causal: whether a token sees no later token.

    Raises:
        ValueError: a number is out of range, or there are more summaries than tokens in a block.

    Examples:
        >>> relpos.patterns.fixed(6, stride=3, causal=True).dense(6, 6)[0, 0].int()
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 1, 1, 0, 0],
                [0, 0, 1, 1, 1, 0],
                [0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    """
    require_int(length, "length", at_least=0)
    require_int(stride, "stride", at_least=1)
    require_int(summaries, "summaries", at_least=1)
    require_flag(causal, "causal")
    if summaries > stride:
        fail(f"at most {stride} summaries, a whole block", str(summaries), "The last tokens of a block summarize it.")
    numbers = torch.arange(length)
    start = numbers // stride * stride
    whole = Mask(low=start, high=start + stride - 1, key_global=numbers % stride >= stride - summaries)
    return whole & Mask.causal() if causal else whole


def strided(length: int, stride: int, *, causal: bool = False) -> Mask:
    """Each token sees tokens at multiples of `stride` from it: the second part of Child's strided pattern.

    The first part is `local(stride, causal=True)`. The paper uses the parts in alternate layers or in separate heads,
    so here they are two masks. One head with both would be the union of a window and a remainder class. A `Mask` cannot
    express it, since segments and intervals both must hold; for one head the paper has `fixed`.

    Args:
        length: number of tokens in the sequence.
        stride: distance between tokens that see each other.
        causal: whether a token sees no later token.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> relpos.patterns.strided(6, stride=3, causal=True).dense(6, 6)[0, 0, 5].int()
        tensor([0, 0, 1, 0, 0, 1], dtype=torch.int32)
    """
    require_int(length, "length", at_least=0)
    require_int(stride, "stride", at_least=1)
    require_flag(causal, "causal")
    columns = Mask.packed(torch.arange(length) % stride)
    return columns & Mask.causal() if causal else columns


def longformer(length: int, window_size: int, global_tokens: Int[Tensor, " g"] | list[int]) -> Mask:
    """A window around each token, and global tokens that see all and are seen by all (Beltagy et al. 2020).

    Args:
        length: number of tokens in the sequence.
        window_size: number of tokens seen, with itself in the middle; odd.
        global_tokens: their indices, such as `[0]` for a class token.

    Raises:
        ValueError: a number is out of range, or a global token is not in the sequence.

    Examples:
        >>> relpos.patterns.longformer(5, window_size=3, global_tokens=[0]).dense(5, 5)[0, 0].int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    require_int(length, "length", at_least=0)
    numbers = _numbers(global_tokens)
    if numbers.numel() and not (int(numbers.min()) >= 0 and int(numbers.max()) < length):
        fail(f"global_tokens of 0 to {length - 1}", str(numbers.tolist()), "They are token indices.")
    chosen = torch.zeros(length, dtype=torch.bool)
    chosen[numbers] = True
    window = local(window_size)
    return Mask(left=window.left, right=window.right, query_global=chosen, key_global=chosen)


def _numbers(tokens: Int[Tensor, " g"] | list[int]) -> Int[Tensor, " g"]:
    """Token indices as a checked tensor."""
    if isinstance(tokens, Tensor):
        whole = not tokens.is_floating_point() and not tokens.is_complex() and tokens.dtype != torch.bool
        fits = tokens.dim() == 1 and (whole or not tokens.numel())
    else:
        fits = isinstance(tokens, tuple | list) and all(isinstance(one, Integral) for one in tokens)
        fits = fits and not any(isinstance(one, bool) or abs(one) >= 2**63 for one in tokens)
    if not fits:
        fail("global_tokens as integers, such as [0]", shape_of(tokens), "For a mask, pass mask.nonzero()[:, 0].")
    return torch.as_tensor(tokens, dtype=torch.long)


def block_sparse(layout: Bool[Tensor, "... n m"], size: int) -> Mask:
    """Blocks of `size` by `size` pairs, where `layout` (`[n, m]`, or one per head) is True.

    Raises:
        ValueError: the layout is not boolean with 2 or 3 dimensions, or the size is below 1.

    Examples:
        >>> layout = torch.tensor([[True, False], [True, True]])
        >>> relpos.patterns.block_sparse(layout, size=2).dense(4, 4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    if not isinstance(layout, Tensor) or layout.dtype != torch.bool or layout.dim() not in (2, 3):
        fail("a boolean layout [blocks, blocks], or one per head", shape_of(layout), "True where a block attends.")
    return Mask(blocks=Blocks(layout if layout.dim() == 3 else layout[None], size))


def big_bird(
    length: int,
    size: int = 64,
    *,
    window: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    heads: int = 1,
    seed: int = 0,
) -> Mask:
    """Adjacent blocks, global first blocks, and random blocks per head (Zaheer et al. 2020).

    Args:
        length: number of tokens in the sequence.
        size: tokens of a block.
        window: number of adjacent blocks; odd.
        global_blocks: number of first blocks that see all and are seen by all (the internal construction, ITC).
        random_blocks: number drawn from the rest for each block of queries and each head.
        heads: number of heads, each with its own random blocks.
        seed: of the draw, which is the same on every machine.

    Raises:
        ValueError: a number is out of range, or the window is even.

    Examples:
        >>> mask = relpos.patterns.big_bird(1024, size=64, heads=8)
        >>> mask.blocks.layout.shape  # of each head, which of 16 x 16 blocks attend
        torch.Size([8, 16, 16])
    """
    require_int(length, "length", at_least=1)
    for name, number in (("size", size), ("window", window), ("heads", heads)):
        require_int(number, name, at_least=1)
    for name, number in (("global_blocks", global_blocks), ("random_blocks", random_blocks)):
        require_int(number, name, at_least=0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        fail("seed to be an integer of at most 64 bits", shape_of(seed), "PyTorch's generator takes no larger one.")
    if window % 2 == 0:
        fail("an odd window", str(window), "Half of it is on each side.")
    count = -(-length // size)
    numbers = torch.arange(count)
    layout = ((numbers[:, None] - numbers).abs() <= window // 2).repeat(heads, 1, 1)
    layout[:, :global_blocks] = True
    layout[:, :, :global_blocks] = True
    generator = torch.Generator().manual_seed(seed)
    for head in range(heads):
        for row in range(global_blocks, count):
            rest = (~layout[head, row]).nonzero()[:, 0]
            drawn = rest[torch.randperm(len(rest), generator=generator)[:random_blocks]]
            layout[head, row, drawn] = True
    return Mask(blocks=Blocks(layout, size))
