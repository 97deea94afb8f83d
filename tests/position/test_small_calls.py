"""What is kept and held between calls, and computed in one node: where a shorter way once was a wrong one."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import relpos
from loaded import Loaded
from relpos.core import Grid, Rotation, Sequence


def total(position: relpos.Mechanism, where: Sequence | Grid, q: Tensor, backend: str = "auto") -> Tensor:
    return relpos.attention(q, q, q, position=position, queries=where, backend=backend).sum()


def test_a_copy_made_while_decoding_is_not_in_the_scope() -> None:
    bias = relpos.T5Bias(2)
    with torch.no_grad(), relpos.decoding(bias):
        bias.terms(Sequence(1, start=3), Sequence(4))
        twin = copy.deepcopy(bias)
    with torch.no_grad():
        twin.relative_attention_bias.fill_(7)
        (line, _) = twin.terms(Sequence(1, start=3), Sequence(4))
    assert (line.values == 7).all()  # type: ignore[attr-defined]


class Learned(relpos.RotaryEmbedding):
    """A rotation whose angles are learned."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.factor = torch.nn.Parameter(torch.ones(dim // 2))

    def angles(self, coordinates: relpos.Coordinates, length: int | None = None) -> Any:
        return super().angles(coordinates, length) * self.factor


@pytest.mark.parametrize("where", [Sequence(4), Grid(2, 2)], ids=str)
def test_a_subclass_may_learn_its_angles(where: Any) -> None:
    position, q = Learned(8), torch.randn(1, 2, 4, 8)
    for _ in range(2):
        total(position, where, q).backward()
    before = position.terms(where).items[0]
    with torch.no_grad():
        position.factor.mul_(2)
    assert not torch.equal(position.terms(where).items[0].query, before.query)


THREADS = """
import sys, threading, torch, relpos
bias = relpos.T5Bias(2)
def decode():
    for step in range(200):
        with torch.no_grad(), relpos.decoding(bias):
            bias.terms(relpos.Sequence(1, start=step), relpos.Sequence(step + 1))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_threads_may_decode_with_one_model(loaded: Loaded) -> None:
    """In a process of its own: the checker of shapes in tests is not made for threads that interrupt each other."""
    done = loaded.run("-c", THREADS)
    assert done.returncode == 0
    assert not done.stderr, "an error in a thread"


def test_decoding_far_out_takes_no_line_from_the_beginning() -> None:
    bias, far = relpos.T5Bias(2), Sequence(64, start=2**20)
    wanted = bias.terms(far)
    with torch.no_grad(), relpos.decoding(bias):
        held = bias.terms(far)
    assert held.items[0].values.shape[1] < 1000
    q = torch.randn(1, 2, 64, 8)
    torch.testing.assert_close(relpos.attention(q, q, q, position=held), relpos.attention(q, q, q, position=wanted))


@pytest.mark.parametrize(("backend", "heads"), [("reference", 2), ("sdpa", 2), ("sdpa", 1)])
def test_second_derivatives_of_a_table(backend: str, heads: int) -> None:
    torch.manual_seed(0)
    bias = relpos.T5Bias(2, init_std=1.0, scaled=True).double()
    table = bias.relative_attention_bias
    q, g = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    k = torch.randn(1, heads, 6, 8, dtype=torch.float64)
    where, along = Sequence(6), torch.randn_like(table)
    index = bias.bucket(torch.arange(6)[:, None] - torch.arange(6))

    def second(attended: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((attended * g).sum(), table, create_graph=True)
        return torch.autograd.grad((first * along).sum(), table)[0]

    keys = k.repeat_interleave(2 // heads, dim=1)
    plain = torch.softmax(q @ keys.mT * 8**-0.5 + table[index].permute(2, 0, 1), dim=-1) @ keys
    out = relpos.attention(q, k, k, position=bias, queries=where, backend=backend)
    torch.testing.assert_close(second(out), second(plain))


def test_a_backward_inside_autocast() -> None:
    bias, q = relpos.T5Bias(2), torch.randn(1, 2, 8, 8, requires_grad=True)
    found = []
    for inside in (False, True):
        loss = total(bias, Sequence(8), q, "sdpa")
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(loss, (q, bias.relative_attention_bias)))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)


def test_turning_numbers_that_begin_at_an_odd_place() -> None:
    x, angles = torch.randn(193)[1:].view(2, 3, 4, 8), torch.rand(1, 1, 4, 4)
    turned = relpos.rotate(x, angles, layout="interleaved")
    assert torch.equal(turned, relpos.rotate(x.clone(), angles, layout="interleaved"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_through_a_rotation() -> None:
    x, along, angles = torch.randn(1, 1, 4, 8, requires_grad=True), torch.randn(1, 1, 4, 8), torch.rand(1, 1, 4, 4)
    with forward_ad.dual_level():
        turned = relpos.rotate(forward_ad.make_dual(x, along), angles, layout="half")
        tangent = forward_ad.unpack_dual(turned).tangent
    torch.testing.assert_close(tangent, relpos.rotate(along, angles, layout="half"))


@pytest.mark.parametrize(
    "position",
    [
        relpos.T5Bias(2),
        relpos.RotaryEmbedding(8),
        relpos.RotaryEmbedding(8, layout="interleaved", rotary_dim=4),
    ],
    ids=repr,
)
def test_a_jacobian_of_all_rows_at_once(position: relpos.Mechanism) -> None:
    x = torch.randn(1, 2, 4, 8)
    one, all_at_once = (
        torch.autograd.functional.jacobian(
            lambda q: relpos.attention(q, x, x, position=position, queries=Sequence(4)), x, vectorize=how
        )
        for how in (False, True)
    )
    torch.testing.assert_close(one, all_at_once)


def test_a_mechanism_that_was_moved_by_hand() -> None:
    position = relpos.RotaryEmbedding(8)
    position.terms(Sequence(4))
    position._buffers["_device_marker"] = torch.empty(0, device="meta")
    assert position.terms(Sequence(4)).items[0].query.device.type == "meta"


@pytest.mark.slow
def test_rotations_are_let_go_without_the_garbage_collector() -> None:
    position = relpos.RotaryEmbedding(8)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(x) is Rotation for x in gc.get_objects())
        for start in range(100):
            position.terms(Sequence(4, start=start, prefix=1))
            position.terms(Grid(2, 2 + start))
            position.terms(Sequence(1 + start))
        assert sum(type(x) is Rotation for x in gc.get_objects()) - before <= 20
    finally:
        gc.enable()


def test_a_step_between_two_backwards() -> None:
    position, q = relpos.RelativePositionBias(2, (2, 2)), torch.randn(1, 2, 4, 8)
    first, second = (total(position, Grid(2, 2), q) for _ in range(2))
    first.backward()
    with torch.no_grad():
        position.relative_position_bias_table.add_(1)
    second.backward()
