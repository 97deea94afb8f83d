"""What follows from shapes is made once, and never where it could be wrong or outlive what it follows from."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import relpos
from loaded import Loaded
from relpos.core import Grid, Positions, Sequence, cached, lines
from relpos.core.cache import FEW_BYTES

CPU = torch.device("cpu")


class Owner:
    """Something that keeps."""


def made(owner: object, key: object = "x", size: int = 0) -> torch.Tensor:
    return cached(owner, key, CPU, lambda: torch.randn(3), lambda: size)


def test_made_once_for_a_key() -> None:
    owner = Owner()
    assert made(owner) is made(owner)
    assert made(owner, "y") is not made(owner)
    assert made(Owner()) is not made(owner)


def test_the_oldest_goes() -> None:
    owner = Owner()
    first, last = made(owner, 0), made(owner, 15)
    for key in range(1, 17):
        made(owner, key)
    assert made(owner, 15) is last
    assert made(owner, 0) is not first


def test_what_is_large_is_made_anew() -> None:
    owner = Owner()
    for size, stays in ((FEW_BYTES, True), (FEW_BYTES + 1, False)):
        assert (made(owner, size, size) is made(owner, size, size)) is stays
    for tokens, stays in ((1000, True), (100_000, False)):  # a mechanism's lines and what hangs on them
        bias = relpos.T5Bias(2)
        assert (bias._lines(Sequence(tokens)) is bias._lines(Sequence(tokens))) is stays


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "flatten": lambda x: pytree.tree_unflatten(*pytree.tree_flatten(x)),
    "to": lambda x: x.to("cpu"),
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_start_with_nothing(how: str) -> None:
    line = lines(Sequence(5))
    assert line.offsets() is line.offsets()
    twins = [COPIES[how](line)]
    if how != "replace":  # which keeps the same lines
        terms = relpos.LineBias(torch.zeros(2, 9), line) + relpos.Scale(1.0)
        twins.append(COPIES[how](terms).items[0].lines)
    for twin in twins:
        assert not twin.__dict__.get("_shape_cache")
        assert twin.offsets() is not line.offsets()


def test_a_mechanism_keeps_its_lines_until_a_setting_changes() -> None:
    bias = relpos.RotaryEmbedding(8)
    (before,) = bias.terms(Sequence(5))
    bias.base = 100.0
    (after,) = bias.terms(Sequence(5))
    wanted = relpos.RotaryEmbedding(8, base=100.0).terms(Sequence(5))
    q = torch.randn(1, 1, 5, 8)
    assert torch.equal(relpos.attention(q, q, q, position=after), relpos.attention(q, q, q, position=wanted))
    assert not torch.equal(relpos.attention(q, q, q, position=after), relpos.attention(q, q, q, position=before))


@pytest.mark.parametrize("where", [Sequence(6), Grid(2, 3), Grid(2, 3, prefix=1)])
def test_lines_are_one_object_from_call_to_call(where: Sequence | Grid) -> None:
    bias = relpos.T5Bias(2)
    first, again = (bias.terms(where).items[0] for _ in range(2))
    assert first.lines is again.lines
    same = Grid(*where.sizes, prefix=where.prefix) if isinstance(where, Grid) else Sequence(where.length)
    assert bias.terms(same).items[0].lines is first.lines  # equal coordinates, not the same object
    assert bias.double().terms(where).items[0].lines is not first.lines  # it may have moved


def test_positions_may_change_in_place_and_are_not_kept() -> None:
    bias, places = relpos.T5Bias(2), torch.tensor([0, 1, 2])
    where = Positions(places, low=0, high=9)
    bias.terms(where)
    places.copy_(torch.tensor([0, 5, 9]))
    line = bias.terms(where).items[0].lines
    assert torch.equal(line.query, lines(where).query)


def test_a_changed_weight_is_seen() -> None:
    bias, q = relpos.RelativePositionBias(2, seq_len=6), torch.randn(1, 2, 6, 8)

    def attended(position: relpos.Mechanism) -> torch.Tensor:
        with torch.no_grad():
            return relpos.attention(q, q, q, position=position, queries=Sequence(6))

    before = attended(bias)
    bias.relative_position_bias_table.data.mul_(-30)
    assert torch.equal(attended(bias), attended(copy.deepcopy(bias)))
    assert not torch.equal(attended(bias), before)


@pytest.mark.parametrize(
    "position",
    [relpos.T5Bias(2), relpos.RotaryEmbedding(8), relpos.RelativePositionBias(2, (2, 3))],
    ids=lambda position: type(position).__name__,
)
def test_what_inference_mode_made_can_be_trained_with(position: relpos.Mechanism) -> None:
    q = torch.randn(1, 2, 6, 8, requires_grad=True)
    given = {"position": position, "queries": Grid(2, 3)}
    with torch.inference_mode():
        relpos.attention(q, q, q, **given)
    relpos.attention(q, q, q, **given).sum().backward()
    assert q.grad is not None


@pytest.mark.traced
def test_nothing_is_kept_of_fake_tensors_or_a_transform() -> None:
    given = {"position": relpos.T5Bias(2), "queries": Sequence(6), "backend": "reference"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        given["position"].terms(Sequence(6))
    torch.func.grad(lambda x: relpos.attention(x, x, x, **given).sum())(torch.randn(1, 2, 6, 8))
    assert not given["position"].__dict__.get("_shape_cache")


THREADS = """
from concurrent.futures import ThreadPoolExecutor
import sys, torch, relpos
q = torch.randn(1, 2, 7, 8)
def attended(number):
    with torch.no_grad():
        return relpos.attention(q, q, q, position=shared, queries=relpos.Sequence(7))
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as pool:
    for _ in range(10):
        shared = relpos.T5Bias(2)
        outs = list(pool.map(attended, range(16)))
        assert all(torch.equal(out, outs[0]) for out in outs)
"""


@pytest.mark.slow
def test_threads_agree(loaded: Loaded) -> None:
    """In a process of its own: the checker of shapes in tests is not made for threads that interrupt each other."""
    done = loaded.run("-c", THREADS)
    assert done.returncode == 0, done.stderr


def test_a_file_holds_no_more_than_before() -> None:
    bias, sizes = relpos.RotaryEmbedding(8), []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(bias, file)
        sizes.append(file.tell())
        bias.terms(Sequence(2000))
    assert sizes[1] < sizes[0] + 1000


COMPILED = """
import torch, relpos
from torch._dynamo.testing import CompileCounter
for position in (relpos.RotaryEmbedding(16), relpos.T5Bias(2)):
    counter = CompileCounter()
    torch._dynamo.reset()
    def attended(q, n):
        return relpos.attention(q, q, q, position=position, queries=relpos.Sequence(n))
    compiled = torch.compile(attended, backend=counter, dynamic=True)
    for n in (7, 255, 256, 257, 300):
        q = torch.randn(1, 2, n, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, n), attended(q, n), rtol=1e-4, atol=1e-5)
    print(counter.frame_count)
"""


@pytest.mark.traced
@pytest.mark.slow
def test_a_compiled_graph_knows_nothing_of_what_is_kept(loaded: Loaded) -> None:
    """No length at which something else is kept makes it compile again. A process, for types are not checked there."""
    done = loaded.run("-c", COMPILED, needs=["compiler"])
    assert done.stdout.split() == ["1", "1"], done.stderr
