"""An eager call is one node of autograd's graph, without an operator; what sees operators alone is given them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import relpos
from relpos import LineBias, Mask, Positions, Sequence, attention, lines
from relpos.engines import operators

N, HEADS, WIDTH = 12, 2, 8


def made() -> tuple[list[Tensor], Any]:
    """Leaves of a call, and what computes it."""
    line = lines(Sequence(N))
    leaves = [torch.randn(2, HEADS, N, WIDTH, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(HEADS, line.length, requires_grad=True))

    def call(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        packed = Mask.packed(torch.arange(N) // 5)
        output = attention(q, k, v, position=LineBias(values, line), mask=packed, backend="streaming")
        assert isinstance(output, Tensor)
        return output

    return leaves, call


def gradients(leaves: list[Tensor], output: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, leaves, torch.linspace(-1, 1, output.numel()).view_as(output))


class Seen(TorchDispatchMode):
    """The operators of ours that a mode is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "relpos":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the call was taken apart for an operator")

    monkeypatch.setattr(operators, "pack", refuse)
    monkeypatch.setattr(operators, "unpack", refuse)


def test_eager_calls_are_not_packed(no_operator: None) -> None:
    leaves, call = made()
    gradients(leaves, call(*leaves))
    with torch.no_grad():
        call(*leaves)


def test_a_mode_is_shown_operators_and_the_numbers_are_the_same() -> None:
    leaves, call = made()
    output = call(*leaves)
    wanted = [output, *gradients(leaves, output)]
    with Seen() as seen:
        output = call(*leaves)
        found = [output, *gradients(leaves, output)]
    assert seen.names == ["relpos::streaming", "relpos::streaming_backward"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_mode_around_the_backward_alone_is_shown_that() -> None:
    leaves, call = made()
    wanted = gradients(leaves, call(*leaves))
    output = call(*leaves)
    with Seen() as seen:
        found = gradients(leaves, output)
    assert seen.names == ["relpos::streaming_backward"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_subclass_is_shown_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Tensor):
        pass

    packed: list[Any] = []
    real = operators.pack
    monkeypatch.setattr(operators, "pack", lambda call: packed.append(call) or real(call))
    leaves, call = made()
    own = call(leaves[0].detach().as_subclass(Own), *leaves[1:])
    assert len(packed) == 1
    torch.testing.assert_close(own.as_subclass(Tensor), call(*leaves), rtol=0, atol=0)


def test_weights_that_changed_before_the_backward_are_an_error() -> None:
    leaves, call = made()
    output = call(*leaves)
    with torch.no_grad():
        leaves[3].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(leaves, output)


@pytest.mark.parametrize("way", ["saved on the CPU", "checkpointed", "checkpointed, reentrant", "only the table"])
def test_gradients_are_the_same_by_any_way_of_saving(way: str) -> None:
    leaves, call = made()
    wanted = gradients(leaves, call(*leaves))
    if way == "saved on the CPU":
        with torch.autograd.graph.save_on_cpu():
            output = call(*leaves)
    elif way == "only the table":
        leaves, wanted = [leaves[3]], wanted[3:]
        output = call(*(x.detach() for x in made_again()), leaves[0])
    else:
        output = checkpoint(call, *leaves, use_reentrant="reentrant" in way)  # type: ignore[no-untyped-call]
    if "reentrant" in way:
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        found = tuple(x.grad for x in leaves if x.grad is not None)
    else:
        found = gradients(leaves, output)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def made_again() -> list[Tensor]:
    """q, k and v of `made`: tests start from one seed."""
    torch.manual_seed(0)
    return made()[0][:3]


def test_no_tensor_outlives_its_graph() -> None:
    leaves, call = made()
    output = call(*leaves)
    saved = weakref.ref(output.grad_fn)
    tensors = [weakref.ref(x) for x in leaves]
    gc.disable()
    try:
        del output, leaves
        assert saved() is None
        assert [one() for one in tensors] == [None] * 4
    finally:
        gc.enable()


@contextlib.contextmanager
def _seen(where: str, here: str) -> Iterator[None]:
    """A mode that sees operators, in one half of a step."""
    with FlopCounterMode(display=False) if where == here else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rule", [False, True], ids=["a line", "a row rule beside it"])
def test_a_mode_in_half_of_a_step_that_is_computed_again(where: str, rule: bool) -> None:
    """What is saved does not depend on who runs the call; a row rule checkpoints itself."""
    line = lines(Sequence(9))
    leaves = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, line.length, requires_grad=True))
    fire = relpos.FIREBias(num_heads=2)

    def run(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        terms = LineBias(values, line)
        position = fire.terms(Sequence(9)) + terms if rule else terms
        found = attention(q, k, v, position=position, mask="causal", backend="streaming")
        assert isinstance(found, Tensor)
        return found

    wanted = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    with _seen(where, "forward"):
        out = run(*leaves) if rule else checkpoint(run, *leaves, use_reentrant=False)
    with _seen(where, "backward"):
        found = torch.autograd.grad(out.square().sum(), leaves)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.traced
def test_compiled_autograd_traces_the_backward_of_an_eager_forward() -> None:
    compiled_autograd = importlib.import_module("torch._dynamo.compiled_autograd")
    line = lines(Sequence(9))
    q, values = torch.randn(1, 2, 9, 8, requires_grad=True), torch.randn(2, line.length, requires_grad=True)

    def run() -> Tensor:
        found = attention(q, q, q, position=LineBias(values, line), backend="streaming")
        assert isinstance(found, Tensor)
        return found.square().sum()

    wanted = torch.autograd.grad(run(), (q, values))
    total = run()
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        total.backward()
    for ours, theirs in zip((q.grad, values.grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_mask_and_lines_made_in_inference_mode_are_trained_under() -> None:
    q, values = torch.randn(2, HEADS, N, WIDTH, requires_grad=True), torch.randn(HEADS, 2 * N - 1, requires_grad=True)
    found = []
    for inference in (True, False):
        with torch.inference_mode(inference):
            numbers = torch.arange(N)
            mask, line = Mask.packed(numbers // 5), lines(Positions(numbers, low=0, high=N - 1))
        output = attention(q, q, q, position=LineBias(values, line), mask=mask, backend="streaming")
        assert isinstance(output, Tensor)
        found.append(gradients([q, values], output))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
