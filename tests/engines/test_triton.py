"""The Triton engine where it differs from the others: tiles, spans of masks, the table's gradient, compiled code.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py sets it).
"""

import copy
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import test_streaming
import torch
from engine_steps import assert_as_reference, call_of, step
from test_streaming import COORDINATES, MASKS, B, D, N, biased, check
from torch import Tensor
from torch._subclasses import FakeTensorMode

from loaded import Loaded
from relpos import (
    Blocks,
    CABLEBias,
    ForgetGate,
    Grid,
    LineBias,
    LowRank,
    Mask,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    explain,
    lines,
)
from relpos.core import Coordinates
from relpos.engines.call import Call
from relpos.engines.packing import pack
from relpos.engines.triton import TRITON
from relpos.testing.devices import attention

limits = importlib.import_module("relpos.engines.triton.limits")
launch = importlib.import_module("relpos.engines.triton.launch")
spans = importlib.import_module("relpos.engines.triton.spans")
table = importlib.import_module("relpos.engines.triton.table")
H = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MORE = {
    "long": (Sequence(50), Sequence(37, prefix=1)),
    "wide rows": (Grid(2, 19), None),
    "queries in one row": (Grid(1, 5), Grid(3, 4)),
    "one column on both sides": (Grid(5, 1), Grid(4, 1, prefix=1)),
    "one cell": (Grid(1, 1), Grid(1, 1)),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tiles there are, so that small calls have many of each, and no tokens are few."""
    monkeypatch.setattr(limits, "FEW", 0)
    for key in launch.SHAPES:
        monkeypatch.setitem(launch.SHAPES, key, launch._shape(16, 16, 4, 1))
    monkeypatch.setattr(spans, "COARSE", 16)
    monkeypatch.setattr(test_streaming, "H", 1)  # the interpreter takes 20 ms a tile


def assert_right(queries: Coordinates | None, keys: Coordinates | None = None, **given: Any) -> None:
    """As the definition, in float64 where no dtype is asked for; `queries` are N tokens without a bias where None."""
    position, shapes = biased(queries, keys) if queries else (Terms, [])
    n = N if queries is None else queries.count
    dtypes = given.pop("dtypes", (torch.float64,))
    check(position, shapes, n, n if keys is None else keys.count, backend="triton", dtypes=dtypes, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in COORDINATES if name != "irregular"), *MORE])
def test_every_layout(name: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_streaming, "H", H if name in ("prefix", "long") else 1)
    assert_right(*(COORDINATES | MORE)[name], dtypes=DTYPES[::2] if name == "prefix" else DTYPES[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(Grid(3, 6, 4), Grid(6, 3, 4)), (Grid(2, 3, 8), Grid(4, 3, 4))])
def test_a_window_over_grids_of_other_shapes(
    queries: Grid, keys: Grid, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By numbers, which are then not equally far apart where cells are."""
    monkeypatch.setattr(test_streaming, "B", 1)
    assert_right(queries, keys, mask=Mask.window(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "given"),
    [
        (Grid(4, 5), {"dtypes": DTYPES[::2]}),
        (COORDINATES["prefix"][0], {}),
        (COORDINATES["irregular"], {}),
        (Sequence(10), {"groups": 1, "mask": Mask.packed(torch.arange(10) // 4) & Mask.causal(), "dtypes": DTYPES[:2]}),
    ],
    ids=["grid", "prefix", "irregular", "packed with grouped keys"],
)
def test_few_tokens(where: Any, given: dict[str, Any], small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that the table's gradient is summed pair by pair, by more programs than one: each takes several elements
    of the batch, the last one fewer."""
    monkeypatch.setattr(limits, "FEW", 256)
    monkeypatch.setattr(table, "PROGRAMS", 4)
    for name, count in (("H", H), ("B", 5)):
        monkeypatch.setattr(test_streaming, name, count)
    assert_right(*where if isinstance(where, tuple) else [where], **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "few", "factors", "sinks"),
    [
        ("prefix", 0, (1, "H"), (1, "H")),
        ("unequal grids", 0, ("B", 1), ("B", "H")),
        ("irregular", 256, ("B", "H"), (1, 1)),
    ],
)
def test_a_factor_and_a_sink_of_each_query(
    name: str, few: int, factors: tuple[Any, Any], sinks: tuple[Any, Any], small_tiles: None, monkeypatch: Any
) -> None:
    """The factor is on the bias too, and learned, and so is the sink."""
    monkeypatch.setattr(limits, "FEW", few)
    monkeypatch.setattr(test_streaming, "H", H)
    queries, keys = COORDINATES[name]
    position, shapes = biased(queries, keys)
    sizes = {"B": B, "H": H, 1: 1}
    of_queries = [(*(sizes[size] for size in own), queries.count) for own in (factors, sinks)]

    def terms(values: Tensor, factor: Tensor, logits: Tensor) -> Terms:
        return position(values) + QueryScale(factor, "scores") + Sinks(logits)

    counts = queries.count, (keys or queries).count
    given = {"mask": Mask.window(7, 3) if counts[0] == counts[1] else None, "groups": 1, "dtypes": DTYPES[:1]}
    check(terms, shapes + of_queries, *counts, backend="triton", **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "few", "mask", "dtypes"),
    [
        (None, 0, Mask.causal(), DTYPES[1:3]),
        ("prefix", 0, Mask.packed(torch.arange(22) // 9) & Mask.causal(), DTYPES[:1]),
        ("unequal grids", 0, None, DTYPES[:1]),
        ("irregular", 256, None, DTYPES[:1]),
    ],
)
def test_low_rank_biases(
    name: str | None, few: int, mask: Mask | None, dtypes: Any, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, whose axes broadcast in every way, beside a line bias, whose gradient needs them, and a factor on all."""
    monkeypatch.setattr(limits, "FEW", few)
    monkeypatch.setattr(test_streaming, "H", H)
    queries, keys = (Sequence(N), None) if name is None else COORDINATES[name]
    n, m = queries.count, (keys or queries).count
    biases, shapes = (lambda *_: Terms(), []) if name is None else biased(queries, keys)
    sides = [(H, n, 3), (B, 1, m, 3), (B, H, n, 2), (1, m, 2)]

    def terms(a: Tensor, b: Tensor, c: Tensor, d: Tensor, factor: Tensor, *values: Tensor) -> Terms:
        return LowRank(a, b) + biases(*values) + LowRank(c, d) + QueryScale(factor, "scores")

    check(terms, [*sides, (1, H, n), *shapes], n, m, 1, backend="triton", dtypes=dtypes, mask=mask, width=6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sign", "error"), [(ForgetGate, -1, 2e-6), (CABLEBias, 1, 1e-5)])
def test_sums_that_cancel_are_as_exact_as_their_differences(
    kind: Any, sign: int, error: float, small_tiles: None
) -> None:
    """Sums near -40,000, where float32 has steps of 0.004. The scale is no power of two, by which they could be divided
    without rounding."""
    q, k, v = torch.randn(3, 1, H, N, 6)
    states, made = torch.randn(1, N, 4), kind(H, 4)
    states[:, 0] = sign * 1e5
    for parameter in made.parameters():
        parameter.data.fill_(0.1)
    found = [
        attention(*(x.to(dtype) for x in (q, k, v)), position=copy.deepcopy(made).to(dtype), queries=Sequence(N),
                  states=states.to(dtype), mask="causal", backend=backend)
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference"))
    ]  # fmt: skip
    torch.testing.assert_close(found[0].double(), found[1], rtol=0, atol=error)


SERVED = [name for name, mask in MASKS.items() if not mask.has_globals and mask.blocks is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_every_mask(name: str, small_tiles: None) -> None:
    assert_right(Grid(3, 9, prefix=2), mask=MASKS[name])
    assert_right(None, mask=MASKS[name], dtypes=DTYPES[1:2])


@pytest.mark.parametrize("window", [Mask.window(None, 2**31 - 1), Mask.window(2**31 - 1, 0), Mask.window(2**40, 1)])
def test_windows_wider_than_any_length(window: Mask, small_tiles: None) -> None:
    assert_right(Sequence(5), mask=window, dtypes=DTYPES[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, 24])
def test_widths_are_padded(width: int, small_tiles: None) -> None:
    assert_right(Sequence(N), dtypes=DTYPES[1:2], width=width)


@pytest.mark.slow
def test_full_tiles_and_the_shapes_that_users_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_streaming, "H", 1)
    assert_right(Sequence(128), dtypes=DTYPES[1:2])
    assert_right(Sequence(150, prefix=3), dtypes=DTYPES[2:3], mask=Mask.causal())


@pytest.mark.slow
def test_what_stands_beside_a_bias(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for all heads, which share keys, in every dtype."""
    monkeypatch.setattr(test_streaming, "H", H)
    line = lines(Sequence(N))
    check(
        lambda values, logits, angles, u: (
            LineBias(values, line) + Sinks(logits) + Rotation(angles, angles, "half") + QueryBias(u)
        ),
        [(1, line.length), (H,), (1, 1, N, D // 2), (1, D)], N, N, 1, mask=Mask.packed(torch.arange(N) // 8),
        backend="triton", dtypes=DTYPES,
    )  # fmt: skip


@pytest.mark.slow
def test_dropout_drops_the_pairs_that_the_definition_drops(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda *_, device: torch.tensor(12345, device=device))  # the same on a GPU
    position, shapes = biased(Sequence(N - 2, prefix=2))
    leaves = [*torch.randn(3, B, H, N, D), torch.randn(shapes[0])]
    assert_as_reference("triton", leaves, position, dropout=0.3, mask=Mask.causal(), rtol=1e-4, atol=1e-5)


def test_a_sink_of_nothing_under_a_row_that_sees_nothing(small_tiles: None) -> None:
    mask = Mask.padding(torch.tensor([True, True, False, True, False]))
    assert_as_reference("triton", [*torch.randn(3, 1, 1, 5, 4), torch.tensor([-torch.inf])], Sinks, mask=mask)


@pytest.mark.slow
def test_inputs_and_gradients_in_other_memory(small_tiles: None) -> None:
    """Heads behind tokens, as projections leave them, columns first, and spread out of one number."""
    position, shapes = biased(Sequence(N))
    *plain, upstream = torch.randn(4, B, H, N, D)
    values = torch.randn(shapes[0])

    def behind(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def across(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    def results(tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
        return step("triton", [*tensors, values], position, upstream)

    wanted, one = results(plain, upstream), torch.ones(()).expand(B, H, N, D)
    for order in (behind, across):
        found = results([order(x) for x in plain], order(upstream))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(results(plain, one), results(plain, one.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("name", SERVED)
def test_spans_hold_all_that_is_allowed_and_skip_the_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "COARSE", 4)
    mask = MASKS[name]
    allowed, of_queries, of_keys = spans.allowed(mask, N, N, torch.device("cpu"))
    if of_queries.at is None:
        assert (allowed.left, allowed.right) == (mask.left, mask.right)
        return
    pairs = mask.dense(N, N)[:, 0]
    for found, seen in ((of_queries, pairs), (of_keys, pairs.mT)):
        inside = torch.zeros_like(seen)
        for batch in range(seen.shape[0]):
            for stretch, (first, stop) in enumerate(found.at[batch if len(found.at) > 1 else 0].tolist()):
                inside[batch, 4 * stretch : 4 * stretch + 4, first:stop] = True
        assert not (seen & ~inside).any()
        if name in ("packed", "packed and causal", "intervals"):
            assert not inside.all(), "nothing was skipped"


def test_it_says_what_it_lacks() -> None:
    """Irregular lines are read, where no gradient is wanted."""
    line, values = lines(Sequence(6)), torch.randn(2, 11)
    places, many = (lines(Positions(torch.arange(n).flip(0), low=0, high=n - 1)) for n in (6, 300))
    for given, n, width, words in (
        ({"position": Softcap(2.0)}, 6, 4, "Softcap"),
        ({"mask": Mask(left=1, query_global=torch.arange(6) == 0)}, 6, 4, "globals"),
        ({"mask": Mask(blocks=Blocks(torch.ones(1, 2, 2, dtype=torch.bool), 3))}, 6, 4, "blocks"),
        ({"position": LineBias(values, line) + LineBias(values, places)}, 6, 4, "several line biases"),
        ({"position": LineBias(torch.zeros(2, 599, requires_grad=True), many)}, 300, 4, "irregular lines of over 256"),
        ({"position": LowRank(torch.zeros(2, 6, 9), torch.zeros(2, 6, 9))}, 6, 4, "ranks above 8"),
        ({}, 3, 320, "above 256"),
    ):
        x = torch.randn(1, 2, n, width)
        with pytest.raises(NotImplementedError, match=words):
            attention(x, x, x, backend="triton", **given)
    q = torch.randn(1, 2, 6, 4)
    ours, theirs = (attention(q, q, q, position=LineBias(values, places), backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("room", "width", "dtype", "word"),
    [
        (48, 64, torch.float32, "99 KiB"),
        (99, 128, torch.bfloat16, None),
        (99, 160, torch.bfloat16, "160 KiB"),
        (99, 64, torch.float64, "160 KiB"),
        (163, 256, torch.float64, None),
    ],
)
def test_gpus_with_less_shared_memory(
    room: int, width: int, dtype: torch.dtype, word: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits by what `compile_kernels.py --arch 89 --all` says of every kernel."""
    monkeypatch.setattr(limits, "shared_memory", lambda device: room * 1024)
    with FakeTensorMode():
        q = torch.empty(1, 1, 600, width, dtype=dtype, device="cuda")
        lack = TRITON.unsupported(call_of(q, q, q))
    assert (lack is None) if word is None else (word in str(lack))


def test_a_part_of_a_mask_that_kernels_do_not_know_is_refused() -> None:
    @dataclass(frozen=True, eq=False)
    class Dilated(Mask):
        stride: Tensor | None = None

    q = torch.zeros(1, 1, 4, 16, device=HERE)
    masks = (Dilated(left=2), Dilated(left=2, stride=torch.tensor([2])))
    lacks = [TRITON.unsupported(replace(call_of(q, q, q), mask=mask)) for mask in masks]
    assert lacks == [None, "a mask with stride"]


def test_the_interpreter_beside_a_gpu_has_the_tiles_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert limits.shared_memory(torch.device("cpu")) == limits.HOPPERS


def test_tiles_of_gpus_with_less_shared_memory_are_those_of_wider_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 600, 64, dtype=torch.bfloat16)
    call = launch.Launches(Call(q, q, q, Terms(), None, 1.0))
    assert call.shape("queries") == launch.SHAPES["queries", "half", 64]
    monkeypatch.setattr(launch, "shared_memory", lambda device: 99 * 1024)
    assert call.shape("queries") == {**launch.SHAPES["queries", "half", 128], "num_stages": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 2048, 8)
    assert "interpreter" in explain(q, q, q).passed_over["triton"]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "a CUDA device" in explain(q, q, q).passed_over["triton"]
    with pytest.raises(NotImplementedError, match="a CUDA device"):
        attention(q, q, q, backend="triton")


@pytest.mark.traced
def test_operators_are_sound(small_tiles: None) -> None:
    position, shapes = biased(Sequence(N))
    q, k, v = (torch.randn(1, 2, N, D, requires_grad=True, device=HERE) for _ in range(3))
    values = torch.randn(2, shapes[0][1], requires_grad=True, device=HERE)
    call = call_of(q, k, v, position=position(values).to(HERE), mask=Mask.causal()).rotated()
    torch.library.opcheck(torch.ops.relpos.triton.default, pack(call), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_every_kernel_runs_in_the_smallest_calls(loaded: Loaded) -> None:
    """What a tool that watches memory is given on a GPU."""
    done = loaded.run(Path(__file__).with_name("smallest_kernels.py"), "--half", needs=["kernels"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every kernel has run" in done.stdout


@pytest.mark.traced
@pytest.mark.slow
def test_kernels_compiled_without_a_gpu() -> None:
    """In a process of its own without the interpreter: all compile and spill no registers, for Hopper and, some of
    them, for Ampere; and what is launched again is what Triton would launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    scripts = "import sys; sys.path.insert(0, sys.argv.pop(1)); import compile_kernels, launch_kernels"
    scripts += "; sys.exit(compile_kernels.main() or launch_kernels.main())"
    command = [sys.executable, "-c", scripts, str(Path(__file__).parent), "--few", "80"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [done.stdout.count(said) for said in ("ok ", " 80: ", "launches compared")] == [94, 20, 1], done.stdout
