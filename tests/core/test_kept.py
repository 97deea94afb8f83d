"""What follows from shapes is made once, and never where it could be wrong or outlive what it follows from."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import relpos
from loaded import Loaded
from relpos.core import Grid, Lines, Positions, Sequence, keep, lines
from relpos.core.kept import FEW_BYTES

CPU = torch.device("cpu")


class Owner:
    """Something that keeps."""


def made(owner: object, key: object = "x") -> torch.Tensor:
    return keep(owner, key, CPU, lambda: torch.randn(3))


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
        first, again = (keep(owner, size, CPU, lambda: torch.randn(3), lambda size=size: size) for _ in range(2))
        assert (first is again) is stays
    for tokens, stays in ((1000, True), (100_000, False)):  # a mechanism's lines and what hangs on them
        bias = relpos.T5Bias(2)
        assert (bias._lines(Sequence(tokens)) is bias._lines(Sequence(tokens))) is stays


def unflattened(x: object) -> object:
    leaves, structure = torch.utils._pytree.tree_flatten(x)
    return torch.utils._pytree.tree_unflatten(leaves, structure)


COPIES: dict[str, Callable[[object], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "flatten": unflattened,
    "replace": lambda x: dataclasses.replace(x),  # type: ignore[type-var]
    "to": lambda x: x.to("cpu"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_start_with_nothing(how: str) -> None:
    line = lines(Sequence(5))
    assert line.offsets() is line.offsets()
    twin = COPIES[how](line)
    assert isinstance(twin, Lines)
    assert not twin.__dict__.get("_kept")
    assert twin.offsets() is not line.offsets()


@pytest.mark.parametrize("how", [how for how in COPIES if how != "replace"])  # which keeps the same lines
def test_copies_of_terms_start_with_nothing(how: str) -> None:
    with torch.no_grad():  # what hangs in a graph is not copied deeply
        terms = relpos.T5Bias(2).terms(Sequence(5))
    assert terms.items[0].lines.offsets() is terms.items[0].lines.offsets()
    twin = COPIES[how](terms)
    assert isinstance(twin, relpos.Terms)
    assert not twin.items[0].lines.__dict__.get("_kept")


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
    q = torch.randn(1, 2, 6, 8)
    bias = relpos.RelativePositionBias(2, seq_len=6)
    with torch.no_grad():
        before = relpos.attention(q, q, q, position=bias, queries=Sequence(6))
        bias.relative_position_bias_table.data.mul_(-30)
        after = relpos.attention(q, q, q, position=bias, queries=Sequence(6))
        wanted = relpos.attention(q, q, q, position=copy.deepcopy(bias), queries=Sequence(6))
    assert torch.equal(after, wanted)
    assert not torch.equal(after, before)


def test_what_inference_mode_made_can_be_trained_with() -> None:
    q = torch.randn(1, 2, 6, 8)
    for position in (relpos.T5Bias(2), relpos.RotaryEmbedding(8), relpos.RelativePositionBias(2, (2, 3))):
        where = Grid(2, 3)
        with torch.inference_mode():
            relpos.attention(q, q, q, position=position, queries=where)
        own = q.clone().requires_grad_()
        out = relpos.attention(own, own, own, position=position, queries=where)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        assert own.grad is not None


@pytest.mark.traced
def test_nothing_is_kept_of_fake_tensors_or_a_transform() -> None:
    bias = relpos.T5Bias(2)
    q = torch.randn(1, 2, 6, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        bias.terms(Sequence(6))
    torch.func.grad(lambda x: relpos.attention(x, x, x, position=bias, queries=Sequence(6), backend="reference").sum())(
        q
    )
    assert not bias.__dict__.get("_kept")


THREADS = """
from concurrent.futures import ThreadPoolExecutor
import sys, torch, relpos
q = torch.randn(1, 2, 7, 8)
def attended(number):
    with torch.no_grad():
        return relpos.attention(q, q, q, position=shared, queries=relpos.Sequence(7))
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as pool:
    for _ in range(20):
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
    bias = relpos.RotaryEmbedding(8)
    fresh = io.BytesIO()
    torch.save(bias, fresh)
    bias.terms(Sequence(2000))
    used = io.BytesIO()
    torch.save(bias, used)
    assert used.tell() < fresh.tell() + 1000


COMPILED = """
import torch, relpos
from torch._dynamo.testing import CompileCounter
for position in (relpos.RotaryEmbedding(16), relpos.T5Bias(2), relpos.RelativePositionBias(2, seq_len=300)):
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
    assert done.stdout.split() == ["1", "1", "1"], done.stderr
