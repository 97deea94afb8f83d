"""Tiles along rows of cells in the Triton engine: which are alike, where they begin, and what they compute."""

import importlib
import itertools
from typing import Any

import pytest
import test_streaming
import torch
from test_streaming import biased, check
from test_triton import small_tiles  # noqa: F401

from relpos import Grid, LineBias, Mask, Sequence, Terms, lines
from relpos.core import Coordinates
from relpos.engines.call import Call
from relpos.testing.devices import attention

grids = importlib.import_module("relpos.engines.triton.grids")
kernels = importlib.import_module("relpos.engines.triton.kernels")
table = importlib.import_module("relpos.engines.triton.table")
launch = importlib.import_module("relpos.engines.triton.launch")
variant = importlib.import_module("relpos.engines.self_check.variant")

LAYOUTS: dict[str, tuple[Coordinates, Coordinates | None, bool]] = {
    "sequence": (Sequence(40), None, True),
    "class token": (Sequence(33, prefix=1), None, True),
    "rows of half a tile": (Grid(5, 8), None, True),
    "rows of two tiles": (Grid(2, 32, prefix=2), Grid(2, 32), True),
    "unequal grids": (Grid(2, 16, prefix=3), Grid(3, 8, prefix=1), True),
    "columns of one cell": (Grid(20, 1), None, True),
    "three axes": (Grid(2, 4, 8), Grid(2, 2, 8, prefix=1), True),
    "planes of a tile": (Grid(3, 2, 8, prefix=1), None, True),
    "rows of other lengths": (Grid(3, 12, prefix=1), None, False),
    "planes of other lengths": (Grid(2, 3, 8), None, False),
    "short rows": (Grid(4, 4), None, False),
    "many prefix tokens": (Grid(2, 16, prefix=5), None, False),
    "rows far apart": (Grid(2, 8), Grid(2, 4096), False),
}
"""Queries, keys, and whether all tiles of 16 tokens are alike."""
SIZE = 16


def coordinate(t: int, side: Any) -> int:
    _, inner, jump, plane, far = side
    return t + (t // inner * jump if inner else 0) + (t // plane * far if plane else 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_are_alike_where_coordinates_are(name: str) -> None:
    """By the coordinates of all tokens: those of a tile from that of its first one, in tables with room for a tile."""
    queries, keys, alike = LAYOUTS[name]
    line = lines(queries, keys)
    sides = grids.sides(line.layout, SIZE, SIZE, SIZE)
    assert (sides is not None) == alike
    if sides is None:
        return
    apart, *prefixes = grids.starts(line.layout)
    begins = []
    for side, coordinates, ramp, prefix in zip(
        sides, (line.query, line.key), (line.layout.query, line.layout.key), prefixes, strict=True
    ):
        count = len(coordinates)
        steps = range(0, grids.steps(count, side, SIZE), SIZE)
        begin = [max(step // SIZE, step - side[0] * (SIZE - 1)) for step in steps]
        tokens = [list(range(x, x + 1 if x < ramp.prefix else min(x + SIZE, count))) for x in begin]
        assert list(itertools.chain(*tokens)) == list(range(count)), "each token is in one tile"
        of_tile = [prefix if x < ramp.prefix else coordinate(x - ramp.prefix, side) for x in begin]
        for first, own in zip(of_tile, tokens, strict=True):
            found = [first + coordinate(r, side) + ramp.start for r in range(len(own))]
            assert found == coordinates[own].tolist()
        begins.append(of_tile)
    entries = [line.origin + apart + query - key for query in begins[0] for key in begins[1]]
    pad = grids.padding(line.layout, SIZE)
    reach = max(coordinate(SIZE - 1, side) for side in sides)
    assert min(entries) - reach >= -pad
    assert max(entries) + reach < line.length + pad


RIGHT: dict[str, dict[str, Any]] = {
    "class token": {"mask": Mask.causal() & Mask.packed(torch.arange(34) // 16)},
    "rows of half a tile": {"mask": Mask.packed(torch.arange(40) // 11), "dtypes": (torch.bfloat16,)},
    "rows of two tiles": {},
    "unequal grids": {"groups": 1},
    "three axes": {},
    "planes of a tile": {"mask": Mask.window(30, 14)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_values_and_gradients(name: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    given = dict(RIGHT[name])
    monkeypatch.setattr(test_streaming, "H", 2 if "groups" in given else 1)
    monkeypatch.setattr(test_streaming, "B", 1)
    queries, keys, _ = LAYOUTS[name]
    position, shapes = biased(queries, keys)
    given.setdefault("dtypes", (torch.float32,))
    counts = queries.count, (queries if keys is None else keys).count
    check(position, shapes, *counts, backend="triton", **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(Sequence(9, prefix=18), Sequence(14, prefix=2)), (Sequence(0, prefix=2), Sequence(0, prefix=1))],
    ids=["several tiles", "alone"],
)
def test_a_prefix_in_parts_of_a_batch(
    queries: Sequence,
    keys: Sequence,
    small_tiles: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, value in ((test_streaming, "H", 1), (test_streaming, "B", 3), (table, "PROGRAMS", 4)):
        monkeypatch.setattr(module, name, value)
    position, shapes = biased(queries, keys)
    check(position, shapes, queries.count, keys.count, backend="triton", dtypes=(torch.float32,))


@pytest.mark.parametrize("kernel", ["forward", "backward_queries", "backward_keys"])
def test_a_program_writes_its_own_rows(kernel: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """That of the first prefix token alone is run: the interpreter runs programs in turn, a GPU at once."""
    real = getattr(kernels, kernel)
    made: list[torch.Tensor] = []

    class First:
        def __getitem__(self, grid: Any) -> Any:
            def launched(*arguments: Any, **constants: Any) -> None:
                made.extend(x.fill_(torch.nan) for x in arguments[:2] if isinstance(x, torch.Tensor))
                real[1, 1, 1](*arguments, **constants)

            return launched

    monkeypatch.setattr(kernels, kernel, First())
    where = Grid(1, 32, prefix=2)
    q, k, v = (torch.randn(1, 1, where.count, 8, requires_grad=True) for _ in range(3))
    line = lines(where)
    out = attention(q, k, v, position=LineBias(torch.randn(1, line.length), line), backend="triton")
    out.sum().backward()
    for x in made:
        assert not x[:, :, 0].isnan().any()
        assert x[:, :, 1:].isnan().all()


KINDS = ("forward", "queries", "keys")


@pytest.mark.parametrize(
    ("where", "width"),
    [
        (Sequence(699, prefix=1), 64),
        (Grid(27, 8), 64),
        (Grid(9, 64, prefix=1), 64),
        (Grid(9, 64, prefix=5), 64),
        (Grid(24, 24, prefix=1), 128),
        (Grid(4, 192), 64),
        (Grid(16, 16), 64),
        (Grid(8, 16, 16), 32),
        (Grid(20, 3, 8, prefix=2), 64),
        (Grid(4, 4, 7, 7), 64),
    ],
    ids=str,
)
def test_small_calls_have_the_tiles_of_the_call_they_stand_for(where: Coordinates, width: int) -> None:
    """Whether tiles are alike, the prefixes, and whether rows of cells are shorter than a tile, in every kernel."""

    def tiles(call: Call) -> list[Any]:
        launches = launch.Launches(call)
        found = []
        for kind in KINDS:
            shape = launches.shape(kind)
            tiled = launches.tiled(shape)
            short = [
                [length < shape[size] and length for length in tiled[side][1::2] if length]
                for side, size in (("QUERIES", "ROWS"), ("KEYS", "COLUMNS"))
            ]
            found.append((tiled["ALIKE"], tiled["QUERIES"][0], tiled["KEYS"][0], short))
        return found

    q, line = torch.zeros(1, 2, where.count, width, dtype=torch.bfloat16), lines(where)
    call = Call(q, q, q, Terms(LineBias(torch.zeros(2, line.length), line)), None, 0.1)
    known = variant.variant_of(call)
    for size in ("odd", "full"):
        small = variant.small_call(known, size)
        assert tiles(small) == tiles(call), size
        assert variant.variant_of(small).few == known.few
        assert size == "odd" or variant.variant_of(small) == known
