"""Each pattern against its definition pair by pair; layers and windows that use them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relpos import Grid, LocalAttention, Mask, RelativePositionBias, SparseAttention, attention
from relpos.patterns import big_bird, block_sparse, dilated, fixed, join, local, longformer, partition, strided, windows
from relpos.testing import oracle

FAST_SHARE = 8  # of its tests, in the fast part

N = 24
ROWS, COLUMNS = 4, 6
LAYOUT = torch.tensor([[True, False, True], [False, True, False], [True, True, True]])


def window_of(n: int, size: int) -> tuple[int, int]:
    row, column = divmod(n, COLUMNS)
    return row // size, column // size


def swin(i: int, j: int, size: int, shift: int) -> bool:
    """As Swin has it: the grid rolled back by the shift and cut into windows, and what met over an edge kept apart."""

    def rolled(n: int) -> tuple[tuple[int, int], tuple[bool, bool]]:
        cell = divmod(n, COLUMNS)
        padded = (-(-x // size) * size for x in (ROWS, COLUMNS))
        at = [(x - shift) % total for x, total in zip(cell, padded, strict=True)]
        wrapped = tuple(x < shift for x in cell)
        return tuple(x // size for x in at), wrapped  # type: ignore[return-value]

    return rolled(i) == rolled(j)


PATTERNS: dict[str, tuple[Mask, Callable[[int, int], bool]]] = {
    "local": (local(7), lambda i, j: abs(i - j) <= 3),
    "local, causal": (local(4, causal=True), lambda i, j: 0 <= i - j <= 3),
    "dilated": (dilated(N, 5, 3), lambda i, j: abs(i - j) in (0, 3, 6)),
    "dilated, causal": (dilated(N, 3, 2, causal=True), lambda i, j: i - j in (0, 2, 4)),
    "fixed": (fixed(N, 5), lambda i, j: i // 5 == j // 5 or j % 5 == 4),
    "fixed, causal": (
        fixed(N, 6, summaries=2, causal=True),
        lambda i, j: j <= i and (i // 6 == j // 6 or j % 6 in (4, 5)),
    ),
    "strided": (strided(N, 4), lambda i, j: (i - j) % 4 == 0),
    "strided, causal": (strided(N, 5, causal=True), lambda i, j: i >= j and (i - j) % 5 == 0),
    "longformer, causal": (
        longformer(N, 5, [0, 9]) & Mask.causal(),
        lambda i, j: j <= i and (abs(i - j) <= 2 or i in (0, 9) or j in (0, 9)),
    ),
    "longformer": (longformer(N, 5, [0, 9]), lambda i, j: abs(i - j) <= 2 or i in (0, 9) or j in (0, 9)),
    "block sparse": (block_sparse(LAYOUT, 8), lambda i, j: bool(LAYOUT[i // 8, j // 8])),
    "windows": (windows(Grid(ROWS, COLUMNS), 2), lambda i, j: window_of(i, 2) == window_of(j, 2)),
    "shifted windows": (windows(Grid(ROWS, COLUMNS), 2, 1), lambda i, j: swin(i, j, 2, 1)),
    "shifted windows, odd": (windows(Grid(ROWS, COLUMNS), 3, 1), lambda i, j: swin(i, j, 3, 1)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_pairs_are_those_of_the_definition(name: str) -> None:
    mask, allowed = PATTERNS[name]
    wanted = torch.tensor([[allowed(i, j) for j in range(N)] for i in range(N)])
    assert torch.equal(mask.dense(N, N)[0, 0], wanted)
    assert not wanted.all()


def test_big_bird_has_its_three_parts() -> None:
    layout, again = (
        big_bird(100, 8, window=3, global_blocks=2, random_blocks=3, heads=4, seed=5).blocks.layout for _ in range(2)
    )
    assert layout.shape == (4, 13, 13)
    assert layout[:, :2].all()
    assert layout[:, :, :2].all()
    for head in range(4):
        for row in range(2, 13):
            near = {x for x in (row - 1, row, row + 1) if 2 <= x < 13}
            seen = {x for x in layout[head, row].nonzero()[:, 0].tolist() if x >= 2}
            assert near <= seen
            assert len(seen - near) == 3
    assert not all(torch.equal(layout[0], layout[head]) for head in (1, 2, 3)), "each head draws its own"
    assert torch.equal(again, layout)


TABLE = RelativePositionBias(2, seq_len=N, init_std=1.0)


LAYERS: dict[str, tuple[Any, Mask, Any, Mask]] = {
    "local": (
        LocalAttention(8, 2, 5, position=TABLE), local(5), LocalAttention(8, 2, 4, causal=True), local(4, causal=True),
    ),
    "sparse": (
        SparseAttention(8, 2, position=TABLE), fixed(N, 4),
        SparseAttention(8, 2, 6, causal=True), fixed(N, 6, causal=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "mask", "causal", "sees"), LAYERS.values(), ids=LAYERS)
def test_layers_attend_under_their_pattern(layer: Any, mask: Mask, causal: Any, sees: Mask) -> None:
    """A changed token changes the output of those that see it, and no other."""
    x = torch.randn(2, N, 8)
    assert torch.equal(layer(x), layer.attn(x, mask=mask))
    for own, pattern in ((layer, mask), (causal, sees)):
        for token in (11, 12):
            changed = x.clone()
            changed[:, token] = 0.0
            same = (own(changed) == own(x)).all(dim=(0, 2))
            assert torch.equal(same, ~pattern.dense(N, N)[0, 0, :, token])


@pytest.mark.parametrize(("size", "shift"), [(2, 0), (2, 1), (3, 0), (3, 1), ((3, 2), (2, 0)), (5, 2)])
def test_windows_taken_apart_are_the_mask(size: Any, shift: Any) -> None:
    """One call a window with the table of a window equals one call of all tokens under the mask, gradients and all."""
    torch.manual_seed(0)
    grid, (rows, columns) = Grid(ROWS, COLUMNS), (size, size) if isinstance(size, int) else size
    x = torch.randn(2, ROWS, COLUMNS, 6, dtype=torch.float64, requires_grad=True)
    table = RelativePositionBias(3, (rows, columns), init_std=1.0).double()
    tokens, apart = partition(x, size, shift)
    q = tokens.unflatten(-1, (3, 2)).transpose(1, 2)
    out = attention(q, q, q, position=table, queries=Grid(rows, columns), mask=apart)
    ours = join(out.transpose(1, 2).flatten(2), grid, size, shift)
    allowed = windows(grid, size, shift).dense(N, N)
    cells = [divmod(n, COLUMNS) for n in range(N)]
    offsets = [[(a[0] - b[0] + rows - 1, a[1] - b[1] + columns - 1) for b in cells] for a in cells]
    entries = torch.tensor([[r * (2 * columns - 1) + c for r, c in row] for row in offsets])
    inside = torch.where(allowed[0, 0], entries, 0)
    bias = table.relative_position_bias_table[inside].permute(2, 0, 1)[None]
    whole = x.flatten(1, 2).unflatten(-1, (3, 2)).transpose(1, 2)
    wanted = oracle.attention(whole, whole, whole, bias=bias, allowed=allowed)[0].transpose(1, 2).flatten(2).view_as(x)
    torch.testing.assert_close(ours, wanted)
    leaves, upstream = [x, table.relative_position_bias_table], torch.randn_like(x)
    for a, b in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    assert (apart is None) == (shift == 0 and ROWS % rows == 0 and COLUMNS % columns == 0)
    assert torch.equal(join(tokens, grid, size, shift), x)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: local(4), "an odd window_size"),
        (lambda: local(0), "window_size to be an integer of at least 1"),
        (lambda: dilated(8, 3, 0), "dilation to be an integer of at least 1"),
        (lambda: fixed(8, 4, summaries=5), "at most 4 summaries, a whole block; got 5"),
        (lambda: fixed(8, 0), "stride to be an integer of at least 1"),
        (lambda: strided(8, 0), "stride to be an integer of at least 1"),
        (lambda: longformer(8, 3, [8]), r"global_tokens of 0 to 7; got \[8\]"),
        (lambda: block_sparse(torch.ones(2, 2), 4), "a boolean layout"),
        (lambda: big_bird(64, 8, window=2), "an odd window; got 2"),
        (lambda: windows(Grid(4, 4, prefix=1), 2), "a grid without a prefix"),
        (lambda: windows(Grid(4, 4), (2, 2, 2)), "a size for each of 2 axes"),
        (lambda: partition(torch.ones(4, 4), 2), r"tokens \[B, rows, columns, E\]"),
        (lambda: windows(Grid(4, 4), 2, 2), "a shift below the window's size; got 2 and 2"),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
