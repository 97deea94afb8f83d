"""What `relpos show` draws is what the mechanism says, by plain loops over its formula."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import relpos
from relpos.position import presets
from relpos.report.drawing.mechanism_data import View, strips
from relpos.report.drawing.mechanism_picture import Bars, Maps, Words, counted

Tokens = relpos.Sequence | relpos.Grid


def built(name: str, tokens: Tokens, heads: int = 2) -> relpos.Mechanism:
    """A preset with heads of width 8."""
    torch.manual_seed(0)
    return presets()[name].build(relpos.Site(num_heads=heads, head_dim=8, embed_dim=heads * 8, queries=tokens))


def shown(name: str, tokens: Tokens, query: int | None = None, heads: int = 2) -> list[Any]:
    """What would be drawn of it."""
    return list(strips(built(name, tokens, heads).parts(), View(tokens, heads, 8, heads * 8, query)))


def test_alibi_over_offsets_and_over_pairs() -> None:
    over, pairs = shown("alibi", relpos.Sequence(5))
    assert isinstance(over, Bars)
    assert isinstance(pairs, Maps)
    slopes = (2**-4, 2**-8)
    assert over.along.first == -4
    np.testing.assert_allclose(over.values, [[-slope * abs(d) for d in range(-4, 5)] for slope in slopes])
    matrix = [[[-slope * abs(i - j) for j in range(5)] for i in range(5)] for slope in slopes]
    np.testing.assert_allclose(pairs.values, matrix)
    assert over.names == pairs.names == ("head 0", "head 1")
    assert (pairs.rows.label, pairs.columns.label) == ("query", "key")


def test_a_two_dimensional_table_lies_lowest_offset_first() -> None:
    (over,) = shown("relative_2d", relpos.Grid(3, 4))
    assert isinstance(over, Maps)
    table = built("relative_2d", relpos.Grid(3, 4)).parts()[0].relative_position_bias_table.detach()  # type: ignore[union-attr]
    assert over.values.shape == (2, 5, 7)
    assert (over.rows.first, over.columns.first) == (-2, -3)
    assert over.marked == (0, 0)
    for d_row in range(-2, 3):
        for d_column in range(-3, 4):
            row = (d_row + 2) * 7 + d_column + 3
            np.testing.assert_allclose(over.values[:, d_row + 2, d_column + 3], table[row].double().numpy())


def test_one_query_on_a_grid_is_a_map_over_keys() -> None:
    (row,) = shown("relative_2d", relpos.Grid(3, 4), query=6)
    assert isinstance(row, Maps)
    assert row.marked == (1, 2)
    bias = built("relative_2d", relpos.Grid(3, 4)).parts()[0].forward().detach()  # type: ignore[operator]
    np.testing.assert_allclose(row.values, bias[:, 6].reshape(2, 3, 4).double().numpy())
    assert "query (1, 2)" in row.title


def test_a_one_dimensional_bias_on_a_grid_shows_its_raster_order_and_a_map() -> None:
    over, row = shown("relative_1d", relpos.Grid(3, 4))
    assert isinstance(over, Bars)
    assert "raster" in over.along.label
    assert over.values.shape == (2, 23)
    assert isinstance(row, Maps)
    # The middle patch is number 6: key 0 is at offset 6, key 11 at offset -5.
    np.testing.assert_allclose(row.values[:, 0, 0], over.values[:, 11 + 6])
    np.testing.assert_allclose(row.values[:, 2, 3], over.values[:, 11 - 5])


def test_a_prefix_takes_no_place() -> None:
    tokens = relpos.Grid(3, 4, prefix=2)
    bias = built("relative_2d", tokens)
    (row,) = strips([bias], View(tokens, 2, 8, 16, query=6))
    assert isinstance(row, Maps)
    expected = bias.forward().detach()[:, 8, 2:].reshape(2, 3, 4)
    np.testing.assert_allclose(row.values, expected.double().numpy())


def test_a_rotation_is_its_angles_and_the_score_it_leaves() -> None:
    cosine, score = shown("rotary_1d", relpos.Sequence(6))
    assert isinstance(cosine, Maps)
    assert isinstance(score, Bars)
    bands = [10000.0 ** (-p / 4) for p in range(4)]
    np.testing.assert_allclose(cosine.values, [[[math.cos(n * w) for n in range(6)] for w in bands]], atol=1e-6)
    mean = [[sum(math.cos(d * w) for w in bands) / 4 for d in range(-5, 6)]]
    np.testing.assert_allclose(score.values, mean, atol=1e-6)
    assert score.along.first == -5
    assert cosine.limit == 1.0


def test_a_rotation_of_one_query_on_a_grid() -> None:
    (row,) = shown("rotary_2d", relpos.Grid(3, 4), query=1)
    assert isinstance(row, Maps)
    bands = [100.0 ** (-p / 2) for p in range(2)]
    expected = [
        [(sum(math.cos(r * w) for w in bands) + sum(math.cos((c - 1) * w) for w in bands)) / 4 for c in range(4)]
        for r in range(3)
    ]
    np.testing.assert_allclose(row.values, [expected], atol=1e-6)


def test_vectors_on_tokens_and_how_alike_they_are() -> None:
    vectors, likeness = shown("learned", relpos.Sequence(5))
    assert isinstance(vectors, Maps)
    assert isinstance(likeness, Maps)
    table = built("learned", relpos.Sequence(5)).parts()[0].pos_embed.detach()[0].double()  # type: ignore[union-attr, index]
    np.testing.assert_allclose(vectors.values, table[None].numpy())
    centred = table - table.mean(dim=0)
    for a in range(5):
        for b in range(5):
            cosine = torch.dot(centred[a], centred[b]) / centred[a].norm() / centred[b].norm()
            assert likeness.values[0, a, b] == pytest.approx(cosine.item())
    assert likeness.limit == 1.0


def test_likeness_on_a_grid_has_a_small_map_for_each_patch() -> None:
    _, sheet = shown("sinusoidal_2d", relpos.Grid(3, 4))
    (row,) = shown("sinusoidal_2d", relpos.Grid(3, 4), query=6)
    assert isinstance(sheet, Maps)
    assert isinstance(row, Maps)
    assert sheet.values.shape == (1, 3 * 4 - 1, 4 * 5 - 1)
    # Patch (1, 2): its map starts at row 4 and column 10.
    np.testing.assert_allclose(sheet.values[0, 4:7, 10:14], row.values[0])
    assert np.isnan(sheet.values[0, 3]).all()


def test_none_says_so_and_is_flat() -> None:
    words, flat = shown("none", relpos.Sequence(4))
    assert isinstance(words, Words)
    assert "Nothing is added" in words.text
    assert isinstance(flat, Bars)
    assert not flat.values.any()


def test_a_sum_has_strips_for_each_part() -> None:
    found = shown("rotary_2d+relative_2d", relpos.Grid(3, 4))
    names = [strip.title.split(":")[0] for strip in found]
    assert names == ["RotaryEmbedding", "RotaryEmbedding", "RelativePositionBias"]


def test_anything_else_is_what_it_adds_to_the_score_of_one_vector() -> None:
    class Shaw(relpos.Mechanism):
        def terms(self, queries: object, keys: object = None) -> relpos.Terms:
            line = relpos.lines(queries, keys)  # type: ignore[arg-type]
            vectors = torch.arange(float(line.length))[None, :, None].expand(1, -1, 8)
            both = (relpos.LineVectors(vectors, None, line, side=side) for side in ("query", "value"))  # type: ignore[arg-type]
            return relpos.Terms(*both)

    matrix, words = strips([Shaw()], View(relpos.Sequence(4), 2, 8, 16))
    assert isinstance(matrix, Maps)
    # The query is 8 times 1 / sqrt(8) and the vector of offset d is 8 times d + 3.
    expected = [[math.sqrt(8) * (i - j + 3) for j in range(4)] for i in range(4)]
    np.testing.assert_allclose(matrix.values, [expected], atol=1e-9)
    assert isinstance(words, Words)
    (row,) = strips([Shaw()], View(relpos.Sequence(4), 2, 8, 16, query=2))[:1]
    assert isinstance(row, Bars)
    np.testing.assert_allclose(row.values, [expected[2]], atol=1e-9)


def test_more_heads_than_a_picture_holds() -> None:
    over, _ = shown("alibi", relpos.Sequence(3), heads=24)
    assert isinstance(over, Bars)
    assert over.values.shape == (16, 5)


@pytest.mark.parametrize("name", ["cope", "fire"])
def test_what_counts_seen_keys_is_shown_under_a_causal_mask(name: str) -> None:
    (strip,) = shown(name, relpos.Sequence(7))
    assert isinstance(strip, Maps)
    assert "under a causal mask" in strip.title
    later = np.triu(np.ones((7, 7), dtype=bool), k=1)
    assert all(np.array_equal(np.isnan(values), later) for values in strip.values)
    if name == "cope":  # all keys are alike, so its places are offsets
        (values,) = strip.values
        for offset in range(7):
            assert np.ptp(np.diagonal(values, -offset)) < 1e-6
    (row,) = shown(name, relpos.Sequence(7), query=2)
    assert isinstance(row, Bars)
    assert np.array_equal(np.isnan(row.values[0]), np.arange(7) > 2)


@pytest.mark.parametrize(
    ("count", "step"), [(1, 1), (9, 1), (10, 2), (4096, 512), (9216, 1024), (9217, 2048), (65536, 8192)]
)
def test_ticks_are_a_few_however_long_it_is(count: int, step: int) -> None:
    places = [at for at, _ in counted(count)]
    assert places == list(range(0, count, step))
    assert len(places) <= 9
