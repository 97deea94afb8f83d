"""Decomposed vectors of MViTv2, ViTDet and SAM: a vector an axis, interpolated tables, grids of two sizes."""

import importlib
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from parity import TIGHT, layers_agree
from position.published import BOTH, DTYPES, attended, config, merged, model, random, running_in, tokens
from position.suites import PositionSuite, stretched
from relpos import AxisVectors, DecomposedPosition, Grid, Site
from relpos.testing import SuiteCase, oracle


def row_of(i: Any, j: Any, n: int, m: int) -> Any:
    """floor(i * max(m / n, 1) + (m - 1 - j) * max(n / m, 1)) in whole numbers."""
    return (i * max(m * m, n * m) + (m - 1 - j) * max(n * n, n * m)) // (n * m)


class Decomposed(PositionSuite):
    """No `Positions`, and so nothing to move: a table is read by offsets between the cells of two grids."""

    axes: ClassVar[tuple[int, ...]] = (2, 3)
    irregular = False

    def window(self, site: Site) -> tuple[int, ...]:
        keys = site.queries if site.keys is None else site.keys
        assert isinstance(site.queries, Grid)
        assert isinstance(keys, Grid)
        return tuple(max(a, b) for a, b in zip(site.queries.sizes, keys.sizes, strict=True))

    def build(self, site: Site) -> DecomposedPosition:
        return DecomposedPosition(site.head_dim, self.window(site), init_std=1.0)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        bias = q.new_zeros(1, 1, queries.count, keys.count)
        for axis, table in enumerate(own.rel_pos):
            n, m = queries.sizes[axis], keys.sizes[axis]
            rows = stretched(table, 2 * max(n, m) - 1)
            rows.append(torch.zeros_like(rows[0]))  # what prefixes read
            read = [
                [-1 if a is None or b is None else row_of(a[axis], b[axis], n, m) for b in self.places(keys)]
                for a in self.places(queries)
            ]
            bias = bias + oracle.meet(q, [[rows[row] for row in line] for line in read])
        return {"bias": bias}


class TestDecomposed(Decomposed):
    preset = "decomposed"


class TestDecomposedInterpolated(Decomposed):
    """A table of one size, whatever the grids. Not of one row or column: there all keys score alike, and the gradient
    is 0 but for rounding, whose size is luck."""

    alike = True
    axes = (2,)
    row = "decomposed (interpolated)"

    def takes(self, case: SuiteCase) -> bool:
        return super().takes(case) and min(case.queries.sizes) > 1

    def window(self, site: Site) -> tuple[int, ...]:
        return (3, 4)


# parity


def sam(size: int, dtype: torch.dtype = torch.float64, kind: str = "SamVisionSdpaAttention") -> Any:
    settings = config(
        "sam", vision_config={"hidden_size": 12, "num_attention_heads": 3, "image_size": 16 * size, "patch_size": 16}
    ).vision_config
    return random(getattr(model("sam"), kind)(settings, window_size=0), dtype)


def as_ours(block: Any, size: int) -> DecomposedPosition:
    own = DecomposedPosition(4, (size, size)).to(block.rel_pos_h.dtype)
    own.load_state_dict({"rel_pos.0": block.rel_pos_h, "rel_pos.1": block.rel_pos_w})
    return own


@BOTH
@pytest.mark.parametrize("kind", ["SamVisionAttention", "SamVisionSdpaAttention"])
@pytest.mark.parametrize("grid", [(4, 4), (6, 3), (5, 8)], ids=str)
def test_parity_with_sam(timm: Any, grid: tuple[int, int], kind: str, backend: str, dtype: torch.dtype) -> None:
    """The whole layer, its tables for 4 x 4 cells interpolated elsewhere: output, and every gradient."""
    block = sam(4, dtype, kind)
    own = as_ours(block, 4)
    x = tokens(2, *grid, 12, dtype=dtype)
    with running_in(dtype):
        theirs, _ = block(x)
    q, k, v = block.qkv(x).flatten(1, 2).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    found = attended(own, q, k, v, queries=Grid(*grid), backend=backend)
    output = block.proj(merged(found).view(2, *grid, 12))
    leaves = {"x": x, **dict(block.named_parameters())}
    name = "decomposed" if grid == (4, 4) else "decomposed (interpolated)"
    layers_agree(name, f"transformers {kind}", output, theirs, leaves, tables(own), limit=TIGHT[dtype])


def tables(own: DecomposedPosition) -> dict[str, Tensor]:
    """Ours under their names."""
    return {"rel_pos_h": own.rel_pos[0], "rel_pos_w": own.rel_pos[1]}


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys"),
    [((4, 4), (2, 2)), ((2, 2), (4, 4)), ((4, 2), (2, 6)), ((3, 5), (2, 3)), ((2, 3), (3, 7)), ((1, 4), (3, 1))],
    ids=str,
)
def test_parity_with_sams_formula_of_two_sizes(
    timm: Any, queries: Any, keys: Any, backend: str, dtype: torch.dtype
) -> None:
    """`get_decomposed_rel_pos`, MViT's own, which SAM itself only calls with equal sizes."""
    block = sam(4, dtype)
    own = as_ours(block, 4)
    q = tokens(2, 3, math.prod(queries), 4, dtype=dtype)
    k, v = (tokens(2, 3, math.prod(keys), 4, dtype=dtype) for _ in range(2))
    said = block.get_decomposed_rel_pos(q.flatten(0, 1), block.rel_pos_h, block.rel_pos_w, queries, keys)
    said = said.reshape(2, 3, math.prod(queries), math.prod(keys))
    theirs = (q @ k.mT / 2 + said).softmax(dim=-1) @ v
    ours = attended(own, q, k, v, queries=Grid(*queries), keys=Grid(*keys), backend=backend)
    leaves = {"q": q, "k": k, "v": v, "rel_pos_h": block.rel_pos_h, "rel_pos_w": block.rel_pos_w}
    name, oracle = "decomposed (unequal sizes)", "transformers SAM get_decomposed_rel_pos"
    layers_agree(name, oracle, ours, theirs, leaves, tables(own), limit=TIGHT[dtype])


@DTYPES
@pytest.mark.parametrize("token", [True, False], ids=["class token", "no token"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (2, 1), (1, 1)], ids=["pooled keys", "pooled queries", "equal"])
def test_parity_with_mvit_v2(timm: Any, queries: int, keys: int, token: bool, dtype: torch.dtype) -> None:
    """The whole layer of timm, its queries or its keys pooled, with its class token, which has no vector."""
    published = importlib.import_module("timm.models.mvitv2")
    block = random(
        published.MultiScaleAttention(
            12,
            12,
            (4, 4),
            num_heads=3,
            mode="max",
            kernel_q=(3, 3),
            kernel_kv=(3, 3),
            stride_q=(queries, queries),
            stride_kv=(keys, keys),
            has_cls_token=token,
        ),
        dtype,
    )
    x = tokens(2, 16 + token, 12, dtype=dtype)
    theirs, _ = block(x, [4, 4])
    sides = block.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    pooled = []
    for side, pool in zip(sides, (block.pool_q, block.pool_k, block.pool_v), strict=True):
        cells = side[:, :, int(token) :].unflatten(2, (4, 4)).permute(0, 1, 4, 2, 3).flatten(0, 1)
        pooled.append(torch.cat([side[:, :, : int(token)], pool(cells).unflatten(0, (2, 3)).flatten(3).mT], dim=2))
    q, k, v = pooled
    own = as_ours(block, 4 // min(queries, keys))
    grids = (Grid(4 // step, 4 // step, prefix=int(token)) for step in (queries, keys))
    found = attended(own, q, k, v, **dict(zip(("queries", "keys"), grids, strict=True)))
    output = block.proj(merged(found + q))
    leaves = {"x": x, **dict(block.named_parameters())}
    name = "decomposed" if queries == keys else "decomposed (unequal sizes)"
    layers_agree(name, "timm MViTv2 MultiScaleAttention", output, theirs, leaves, tables(own), limit=TIGHT[dtype])


@pytest.mark.parametrize("larger", [True, False], ids=["more queries", "more keys"])
def test_rows_of_every_pair_of_sizes(timm: Any, larger: bool) -> None:
    """Against `get_rel_pos` up to 14 cells, with the row's number for a vector. Where a float32 product of theirs falls
    below the whole number that it is, they are a row apart; ours is the exact one. Never where one size divides the
    other."""
    get = sam(4).get_rel_pos
    for big in range(1, 15):
        for small in range(1, big + 1):
            n, m = (big, small) if larger else (small, big)
            own = DecomposedPosition(1, (big,))
            numbers = torch.arange(2.0 * big - 1)[:, None]
            own.load_state_dict({"rel_pos.0": numbers})
            exact = row_of(torch.arange(n)[:, None], torch.arange(m), n, m)
            (term,) = own.terms(Grid(n), Grid(m)).of(AxisVectors)
            found = term.vectors[0][0, term.lines[0].index(), 0].long()
            assert torch.equal(found, exact), (n, m)
            theirs = get(n, m, numbers)[..., 0].long()
            rounded = theirs != exact
            assert torch.equal(theirs[rounded], exact[rounded] - 1)
            assert big % small or not rounded.any()
