"""docs/examples.md: the right figures, typed here or made by plain loops, and a page that is what its code makes."""

import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> ModuleType:
    """A module of docs/examples, which is no package and is run as `python docs/examples`."""
    folder = str(DOCS / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


computed, printed, layout = load("computed"), load("printed"), load("layout")

ROOT2 = math.sqrt(2)
X = [[1, 0], [0, 1], [1, 1], [0, 0]]
PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def assert_rows(matrix: Tensor, expected: list[list[float]]) -> None:
    """Equal to three decimals, as they are written down."""
    assert list(matrix.shape) == [len(expected), len(expected[0])]
    for i, row in enumerate(expected):
        for j, value in enumerate(row):
            assert abs(matrix[i, j].item() - value) < 5.1e-4, (i, j, matrix[i, j].item(), value)


def assert_equal(matrix: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(matrix, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_no_position() -> None:
    assert_equal(computed.without_position(), [[dot(a, b) / ROOT2 for b in X] for a in X])


def test_absolute() -> None:
    with_vectors = [[x + c / 2 for x, c in zip(a, place, strict=True)] for a, place in zip(X, PLACES, strict=True)]
    assert with_vectors == [[1, 0], [0, 1.5], [1.5, 1], [0.5, 0.5]]
    assert_equal(computed.coordinates_added(), with_vectors)
    assert_equal(computed.absolute(), [[dot(a, b) / ROOT2 for b in with_vectors] for a in with_vectors])


def biased(table: dict[tuple[int, int], float], sign: int) -> list[list[float]]:
    """Content plus the table at sign x (query - key), 0 where it has no entry."""
    rows = []
    for a, (r, c) in zip(X, PLACES, strict=True):
        offsets = [(sign * (r - s), sign * (c - d)) for s, d in PLACES]
        rows.append([dot(a, b) / ROOT2 + table.get(offset, 0.0) for b, offset in zip(X, offsets, strict=True)])
    return rows


TABLE = {(0, 0): 0.0, (0, 1): -0.2, (1, 0): -0.1, (1, 1): -0.3, (-1, 0): 0.1, (0, -1): 0.2, (-1, -1): 0.3}


def test_relative() -> None:
    assert_equal(computed.relative(), biased(TABLE, 1))
    assert_equal(computed.other_sign(), biased(TABLE, -1))


def test_directions_under_one_sign() -> None:
    assert computed.highest(computed.relative()) == [[2], [1, 2], [2], [3]]
    assert computed.highest(computed.other_sign()) == [[0], [1, 2], [2], [0]]
    assert [computed.direction(0, key) for key in range(4)] == ["itself", "right", "below", "below-right"]
    assert [computed.direction(3, key) for key in range(4)] == ["above-left", "above", "left", "itself"]
    # One offset, one bias: the right neighbour of patch 0 and of patch 2.
    bias = computed.relative() - computed.without_position()
    assert bias[0, 1].item() == pytest.approx(0.2)
    assert bias[2, 3].item() == pytest.approx(0.2)


def test_shifting_the_image() -> None:
    found = computed.shifted()
    left, right = found["relative"]
    assert_equal(left, biased(TABLE, 1))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    for step, scores in enumerate(found["absolute"]):
        tokens = [[x[0] + r / 2, x[1] + (c + step) / 2] for x, (r, c) in zip(X, PLACES, strict=True)]
        assert_equal(scores, [[dot(a, b) / ROOT2 for b in tokens] for a in tokens])
    assert bool((found["absolute"][0] != found["absolute"][1]).all())


def test_heads_look_where_their_names_say() -> None:
    looked_at = {"looks right": (1, 2), "looks left": (1, 0), "looks down": (2, 1), "looks down and right": (2, 2)}
    biases = computed.head_biases()
    for (name, place), weights in zip(looked_at.items(), computed.head_weights(), strict=True):
        nudge = 0.2 if name in ("looks right", "looks left") else 0.3
        for row in range(3):
            for column in range(3):
                here = (row, column) == place
                assert biases[name][row, column].item() == pytest.approx(nudge if here else 0.0, abs=1e-12)
                expected = (math.exp(nudge) if here else 1.0) / (8 + math.exp(nudge))
                assert weights[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_content_overrides_a_negative_bias() -> None:
    scene = computed.SCENE.tolist()
    by_key = [0.3, 0.1, 0.0, 0.2, 0.0, -0.2, 0.0, -0.1, -0.3]  # above-left, above, ..., right: -0.2, ..., below-right
    content = [dot(scene[4], key) / ROOT2 for key in scene]
    for bias_right in (-0.2, -2.0):
        bias = [*by_key[:5], bias_right, *by_key[6:]]
        total = [a + b for a, b in zip(content, bias, strict=True)]
        weights = [math.exp(x) / sum(map(math.exp, total)) for x in total]
        parts = computed.override(bias_right)
        for name, expected in (("content", content), ("bias", bias), ("sum", total), ("weights", weights)):
            assert_equal(parts[name], [expected[0:3], expected[3:6], expected[6:9]])
    weights = computed.override()["weights"].flatten()
    assert weights.argmax().item() == 5
    assert weights[5].item() == pytest.approx(0.679, abs=5e-4)
    assert computed.override(-2.0)["weights"].flatten().argmax().item() == 4
    assert computed.override_threshold() == pytest.approx(-ROOT2)


def test_without_position_attention_is_equivariant_and_its_mean_invariant() -> None:
    order = computed.SHUFFLE
    assert sorted(order) == [0, 1, 2, 3] != order
    plain, biased_ = computed.shuffled(), computed.shuffled(computed.bias_of([TABLE], (2, 2)))
    rows = []
    for a in X:
        weights = [math.exp(dot(a, b) / ROOT2) for b in X]
        rows.append([sum(w * b[c] for w, b in zip(weights, X, strict=True)) / sum(weights) for c in range(2)])
    assert_equal(plain["in order"], rows)
    torch.testing.assert_close(plain["shuffled"], plain["in order"][order], rtol=0, atol=1e-12)
    torch.testing.assert_close(plain["shuffled"].mean(dim=0), plain["in order"].mean(dim=0), rtol=0, atol=1e-12)
    assert (biased_["shuffled"] - biased_["in order"][order]).abs().max() > 1e-3
    assert (biased_["shuffled"].mean(dim=0) - biased_["in order"].mean(dim=0)).abs().max() > 1e-3


def test_clipping() -> None:
    values = {-2: -0.3, -1: -0.2, 0: 0.0, 1: 0.2, 2: 0.3}
    offsets = [[max(-2, min(2, i - j)) for j in range(7)] for i in range(7)]
    assert computed.clipped_offsets() == offsets
    assert_equal(computed.clipped(), [[values[r] for r in row] for row in offsets])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(bidirectional: bool) -> None:
    half = 16 if bidirectional else 32
    exact = half // 2
    buckets = []
    for distance in range(130):
        far = exact + int(math.log(max(distance, 1) / exact) / math.log(128 / exact) * (half - exact) + 1e-9)
        buckets.append(distance if distance < exact else min(far, half - 1))
    assert computed.t5_edges(bidirectional) == [d for d in range(130) if d == 0 or buckets[d] != buckets[d - 1]]
    assert computed.t5_edges(bidirectional)[: exact + 1] == list(range(exact + 1))
    assert computed.t5_edges(bidirectional)[exact + 1] > exact + 1


def test_additive_bias() -> None:
    assert_rows(computed.additive(), [[0.707, -0.2, 0.407], [0.2, 0.707, 0.507], [1.007, 0.907, 1.414]])


def test_shaw() -> None:
    vectors = {-2: [-1, 0], -1: [-0.5, 0], 0: [0, 0], 1: [0.5, 0], 2: [1, 0]}
    rows = [[(dot(X[i], X[j]) + dot(X[i], vectors[i - j])) / ROOT2 for j in range(3)] for i in range(3)]
    assert_equal(computed.shaw(), rows)


def test_rope() -> None:
    turned = []
    for n, (x, y) in enumerate(X[:3]):
        c, s = math.cos(n * math.pi / 6), math.sin(n * math.pi / 6)
        turned.append([x * c - y * s, x * s + y * c])
    assert_equal(computed.turned(), turned)
    assert_equal(computed.rope(), [[dot(a, b) / ROOT2 for b in turned] for a in turned])
    assert_equal(computed.same_token(), [[math.cos((i - j) * math.pi / 6) / ROOT2 for j in range(3)] for i in range(3)])


def test_alibi() -> None:
    assert_rows(computed.alibi(both_ways=False), [[0.707, 0.1, 0.907], [-0.1, 0.707, 0.807], [0.507, 0.607, 1.414]])
    assert_rows(computed.alibi(both_ways=True), [[0.707, -0.1, 0.507], [-0.1, 0.707, 0.607], [0.507, 0.607, 1.414]])
    one, both = (computed.alibi_causal_weights(both_ways=ways) for ways in (False, True))
    torch.testing.assert_close(one, both, rtol=0, atol=1e-12)
    rows = computed.alibi(both_ways=False).tolist()
    for i, row in enumerate(rows):
        total = sum(math.exp(x) for x in row[: i + 1])
        assert_equal(both[i : i + 1], [[math.exp(x) / total if j <= i else 0.0 for j, x in enumerate(row)]])


def test_what_the_documents_print_is_told_from_what_is_right() -> None:
    wrong = layout.wrong_entries
    assert wrong(computed.without_position(), printed.WITHOUT_POSITION) == [(2, 3), (3, 2)]
    assert wrong(computed.absolute(), printed.ABSOLUTE) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 3)]
    assert wrong(computed.relative(), printed.RELATIVE) == [(0, 3), (1, 0), (1, 2), (1, 3), (2, 3), (3, 1), (3, 2)]
    assert wrong(computed.rope(), printed.ROPE) == [(0, 2), (1, 2), (2, 0), (2, 1)]
    assert wrong(computed.turned(), printed.TURNED) == [(2, 0)]
    for right, told in (
        (computed.clipped(), printed.CLIPPED),
        (computed.additive(), printed.ADDITIVE),
        (computed.shaw(), printed.SHAW),
        (computed.alibi(both_ways=False), printed.ALIBI),
    ):
        assert not wrong(right, told)


def test_the_page_is_what_its_code_makes() -> None:
    made = load("page").page()
    assert (DOCS / "examples.md").read_text(encoding="utf-8") == made, "run: python docs/examples"


def test_the_page_shows_both_figures_and_every_picture() -> None:
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    for figures in ("-0.366, 1.366", "0.366, 1.366", "1.061, 1.061, 2.298, 0.884", "1.061, 0.707, 1.414, 0.884"):
        assert f"[{figures}]" in text
    assert "(-2, -1)" not in text, "a 2 x 2 image has no such offset"
    pictures = re.findall(r"\]\((examples/\w+\.png)\)", text)
    assert sorted(pictures) == sorted(f"examples/{path.name}" for path in (DOCS / "examples").glob("*.png"))
    for picture in pictures:
        assert (DOCS / picture).stat().st_size > 5_000


def test_wrapped_lines_begin_no_list() -> None:
    # A paragraph that is wrapped before a minus sign or a number with a dot would turn into a list.
    for paragraph in (DOCS / "examples.md").read_text(encoding="utf-8").split("\n\n"):
        if re.match(r"[#|`!<-]|    ", paragraph):
            continue
        assert not re.search(r"^(?:[-+*]|\d+[.)]) ", paragraph, flags=re.MULTILINE), paragraph


def test_pictures_are_made_of_the_computed_numbers() -> None:
    figures = load("pictures").figures()
    assert set(figures) == {path.stem for path in (DOCS / "examples").glob("*.png")}
    override = [text.get_text() for axes in figures["override"].axes for text in axes.texts]
    assert "+4.95" in override
    assert "68%" in override, "weights are shares"
    assert "\N{MINUS SIGN}0.20" in override
