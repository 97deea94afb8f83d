"""The worked examples of docs/examples.md, computed with relpos: plain functions, plain values, no text.

`offset = query - key` throughout. Everything is float64, so that what is printed is right to its last digit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import relpos

Offset = tuple[int, int]

PATCHES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
"""Section 6.1: the four patches of a 2 x 2 image, in raster order."""
PLACES: tuple[Offset, ...] = ((0, 0), (0, 1), (1, 0), (1, 1))
TABLE: dict[Offset, float] = {
    (0, 0): 0.0,
    (0, 1): -0.2,
    (1, 0): -0.1,
    (1, 1): -0.3,
    (-1, 0): 0.1,
    (0, -1): 0.2,
    (-1, -1): 0.3,
}
"""Section 6.4, as printed. (-1, 1) and (1, -1) are missing there; here they are 0."""
BIAS_1D = {-2: -0.3, -1: -0.2, 0: 0.0, 1: 0.2, 2: 0.3}
"""Sections 12.6 and 14."""
TOKENS = PATCHES[:3]
"""Section 14.1: a sequence of three."""
SHAW = {-2: (-1.0, 0.0), -1: (-0.5, 0.0), 0: (0.0, 0.0), 1: (0.5, 0.0), 2: (1.0, 0.0)}
SLOPE = 0.1
TURN = math.radians(30)
"""Section 14, RoPE: how far one place turns."""


def scores(
    x: Tensor, position: relpos.Mechanism | relpos.Terms | None = None, *, queries: object = None, heads: int = 1
) -> Tensor:
    """What the softmax sees, `[heads, N, N]`, where queries and keys are the tokens `x[N, D]` themselves.

    A weight is exp(score - lse), so a score is log(weight) + lse.
    """
    q = x[None, None].expand(1, heads, -1, -1)
    weights = relpos.attention_weights(q, q, position=position, queries=queries)
    _, lse = relpos.attention(q, q, q, position=position, queries=queries, return_lse=True, backend="reference")
    return (weights.log() + lse[..., None])[0]


def bias_of(tables: list[dict[Offset, float]], window: tuple[int, int]) -> relpos.RelativePositionBias:
    """Swin's bias for a window, one head a table; offsets a table leaves out are 0."""
    bias = relpos.RelativePositionBias(len(tables), window_size=window, init_std=0.0).double()
    columns = 2 * window[1] - 1
    with torch.no_grad():
        for head, table in enumerate(tables):
            for (d_row, d_col), value in table.items():
                row = (d_row + window[0] - 1) * columns + (d_col + window[1] - 1)
                bias.relative_position_bias_table[row, head] = value
    return bias


def mirrored(table: dict[Offset, float]) -> dict[Offset, float]:
    """The same table for somebody who writes offsets as key - query."""
    return {(-d_row, -d_col): value for (d_row, d_col), value in table.items()}


# Section 6: the 2 x 2 image


def without_position() -> Tensor:
    """6.2: content alone."""
    return scores(PATCHES)[0]


def coordinates_added() -> Tensor:
    """6.3: each patch plus its vector (row / 2, column / 2)."""
    embedding = relpos.LearnedPositionEmbedding(2, grid_size=(2, 2)).double()
    with torch.no_grad():
        embedding.pos_embed[0] = torch.tensor(PLACES, dtype=torch.float64) / 2
    return embedding.embed(PATCHES[None], relpos.Grid(2, 2))[0].detach()


def absolute() -> Tensor:
    """6.3: the scores of patches with their vectors added."""
    return scores(coordinates_added())[0]


def relative(table: dict[Offset, float] = TABLE) -> Tensor:
    """6.4: content plus the bias of query - key."""
    return scores(PATCHES, bias_of([table], (2, 2)), queries=relpos.Grid(2, 2))[0].detach()


def other_sign() -> Tensor:
    """Section 7 reads the same table as key - query; these would be the scores."""
    return relative(mirrored(TABLE))


def direction(query: int, key: int) -> str:
    """Where a key lies, seen from the query, in words."""
    d_row, d_col = (a - b for a, b in zip(PLACES[query], PLACES[key], strict=True))
    down = {-1: "below", 0: "", 1: "above"}[d_row]
    across = {-1: "right", 0: "", 1: "left"}[d_col]
    return "-".join(word for word in (down, across) if word) or "itself"


def highest(matrix: Tensor) -> list[list[int]]:
    """The keys with the highest score of each query; several where they tie."""
    top = matrix.amax(dim=1, keepdim=True)
    return [torch.nonzero(row).flatten().tolist() for row in (matrix > top - 1e-9)]


# Sections 6.5, 7.5 and 8: the same offset means the same everywhere


def shifted() -> dict[str, tuple[Tensor, Tensor]]:
    """The 2 x 2 pattern at the left and one column further right of a 2 x 3 image: scores among its four patches."""
    grid, blank = relpos.Grid(2, 3), torch.zeros(2, 3, 2, dtype=torch.float64)
    left, right = blank.clone(), blank.clone()
    left[:, :2] = right[:, 1:] = PATCHES.reshape(2, 2, 2)
    cells = {"left": [0, 1, 3, 4], "right": [1, 2, 4, 5]}
    embedding = relpos.LearnedPositionEmbedding(2, grid_size=(2, 3)).double()
    with torch.no_grad():
        embedding.pos_embed[0] = grid.tokens().double() / 2
    found = {}
    for name, position in (("absolute", embedding), ("relative", bias_of([TABLE], (2, 3)))):
        pair = []
        for image, where in ((left, cells["left"]), (right, cells["right"])):
            tokens = position.embed(image.reshape(1, 6, 2), grid)[0]
            inside = position if position.acts_in_attention else None
            whole = scores(tokens, inside, queries=None if inside is None else grid)[0].detach()
            pair.append(whole[where][:, where])
        found[name] = (pair[0], pair[1])
    return found


# Section 9.4: heads


HEADS: tuple[tuple[str, dict[Offset, float]], ...] = (
    ("looks right", {(0, -1): 0.2}),
    ("looks left", {(0, 1): 0.2}),
    ("looks down", {(-1, 0): 0.3}),
    ("looks down and right", {(-1, -1): 0.3}),
)
"""Section 9.4 in query - key: a key on the right has column offset -1, a key below has row offset -1."""


def head_biases() -> dict[str, Tensor]:
    """What each head adds for the middle patch of a 3 x 3 image and every key, `[3, 3]`."""
    bias = bias_of([table for _, table in HEADS], (3, 3)).forward().detach()
    return {name: one[4].reshape(3, 3) for (name, _), one in zip(HEADS, bias, strict=True)}


def head_weights() -> Tensor:
    """Attention of the middle patch of a 3 x 3 image of equal patches, `[4, 3, 3]`: what is left is position."""
    bias = bias_of([table for _, table in HEADS], (3, 3))
    q = torch.ones(1, len(HEADS), 9, 2, dtype=torch.float64)
    weights = relpos.attention_weights(q, q, position=bias, queries=relpos.Grid(3, 3))
    return weights[0, :, 4].reshape(-1, 3, 3).detach()


# Sections 9.1 and 10: content overrides a negative bias


SCENE = torch.tensor(
    [[0.5, 0.0], [0.0, 1.0], [0.5, 0.5], [1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [0.0, 0.5], [1.0, 0.5], [0.0, 0.0]],
    dtype=torch.float64,
)
"""A 3 x 3 image in raster order. An edge runs from the middle (patch 4) to its right neighbour (patch 5)."""
CENTRE, RIGHT = 4, 5


def override(bias_to_the_right: float = -0.2) -> dict[str, Tensor]:
    """The middle patch of the scene: content scores, the bias, their sum and the weights, each `[3, 3]`.

    The head is the one that section 8 describes in words: less to the right, below and below-right, more to the others.
    """
    table = {**mirrored(TABLE), (0, -1): bias_to_the_right}
    grid, bias = relpos.Grid(3, 3), bias_of([table], (3, 3))
    q = SCENE[None, None]
    return {
        "content": scores(SCENE)[0, CENTRE].reshape(3, 3),
        "bias": bias.forward()[0, CENTRE].reshape(3, 3).detach(),
        "sum": scores(SCENE, bias, queries=grid)[0, CENTRE].reshape(3, 3).detach(),
        "weights": relpos.attention_weights(q, q, position=bias, queries=grid)[0, 0, CENTRE].reshape(3, 3).detach(),
    }


def override_threshold() -> float:
    """The bias to the right at which the right neighbour no longer comes first."""
    parts = override(0.0)
    others = parts["sum"].flatten().clone()
    others[RIGHT] = -math.inf
    return (others.max() - parts["content"].flatten()[RIGHT]).item()


# Section 11.2: without position


SHUFFLE = [2, 0, 3, 1]


def shuffled(position: relpos.Mechanism | None = None) -> dict[str, Tensor]:
    """Attention over the 2 x 2 image, and over the same patches in another order."""
    queries = None if position is None else relpos.Grid(2, 2)
    found = {}
    for name, x in (("in order", PATCHES), ("shuffled", PATCHES[SHUFFLE])):
        q = x[None, None]
        found[name] = relpos.attention(q, q, q, position=position, queries=queries)[0, 0].detach()
    return found


# Section 12: clipping


def clipped() -> Tensor:
    """12.6: the 7 x 7 bias of a table with R_max = 2."""
    bias = relpos.RelativePositionBias(1, seq_len=3, init_std=0.0, beyond="clip").double()
    with torch.no_grad():
        bias.relative_position_bias_table[:, 0] = torch.tensor([BIAS_1D[r] for r in range(-2, 3)], dtype=torch.float64)
    zeros = torch.zeros(7, 2, dtype=torch.float64)
    return scores(zeros, bias, queries=relpos.Sequence(7))[0].detach()


def clipped_offsets() -> list[list[int]]:
    """12.6: query - key, cut to -2 ... 2."""
    index = relpos.get_relative_position_index_1d(7) - 6
    return index.clamp(-2, 2).tolist()


def t5_edges(bidirectional: bool) -> list[int]:
    """The distance at which each of T5's buckets begins: 32 buckets, max_distance 128, keys before the query."""
    bucket = relpos.T5Bias(1, bidirectional=bidirectional).bucket(torch.arange(130))
    return [0, *(distance for distance in range(1, 130) if bucket[distance] != bucket[distance - 1])]


# Section 14: three tokens, four mechanisms


def additive() -> Tensor:
    """14, variant 1: a number an offset."""
    bias = relpos.RelativePositionBias(1, seq_len=3, init_std=0.0).double()
    with torch.no_grad():
        bias.relative_position_bias_table[:, 0] = torch.tensor([BIAS_1D[r] for r in range(-2, 3)], dtype=torch.float64)
    return scores(TOKENS, bias, queries=relpos.Sequence(3))[0].detach()


def shaw() -> Tensor:
    """14, variant 2: a vector an offset meets the query."""
    vectors = torch.tensor([[SHAW[r] for r in range(-2, 3)]], dtype=torch.float64)
    term = relpos.LineVectors(vectors, None, relpos.lines(relpos.Sequence(3)), side="query")
    return scores(TOKENS, relpos.Terms(term))[0]


def turned() -> Tensor:
    """14, variant 3: each token turned by 30 degrees per position."""
    angles = torch.arange(3, dtype=torch.float64)[None, None, :, None] * TURN
    return relpos.rotate(TOKENS[None, None], angles, layout="half")[0, 0]


def rope(x: Tensor = TOKENS) -> Tensor:
    """14, variant 3: the scores of turned tokens."""
    angles = torch.arange(3, dtype=torch.float64)[None, None, :, None] * TURN
    return scores(x, relpos.Terms(relpos.Rotation(angles, angles, layout="half")))[0]


def alibi(*, both_ways: bool) -> Tensor:
    """14, variant 4: minus slope times i - j as printed, or times |i - j|, which needs no causal mask."""
    lines = relpos.lines(relpos.Sequence(3))
    offsets = lines.offsets().axes[:, 0].double()
    return scores(
        TOKENS, relpos.Terms(relpos.LineBias(-SLOPE * (offsets.abs() if both_ways else offsets)[None], lines))
    )[0]


def alibi_causal_weights(*, both_ways: bool) -> Tensor:
    """The weights of both under a causal mask, where they are the same."""
    lines = relpos.lines(relpos.Sequence(3))
    offsets = lines.offsets().axes[:, 0].double()
    bias = relpos.LineBias(-SLOPE * (offsets.abs() if both_ways else offsets)[None], lines)
    q = TOKENS[None, None]
    return relpos.attention_weights(q, q, position=relpos.Terms(bias), mask=relpos.Mask.causal())[0, 0]


def same_token() -> Tensor:
    """RoPE where all three tokens are [1, 0]: one score an offset."""
    return rope(torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64))
