"""An eager call is one node of autograd's graph, without an operator; what sees operators alone is given them."""

import contextlib
import gc
import importlib
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_steps import launches_of, with_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import relpos
from relpos import LineBias, Mask, Positions, Sequence, lines
from relpos.engines import operators
from relpos.engines.arguments import Arguments
from relpos.engines.packing import CallForm
from relpos.engines.triton.engine import TRITON
from relpos.testing.devices import attention
from relpos.testing.engines import INTERPRETED

N, HEADS, WIDTH = 12, 2, 8
LINE, PACKED = lines(Sequence(N)), Mask.packed(torch.arange(N) // 5)


def made() -> list[Tensor]:
    """The leaves of a call."""
    shapes = [*[(2, HEADS, N, WIDTH)] * 3, (HEADS, LINE.length)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def call(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, mask: Any = PACKED, beside: Any = None, backend: str = "streaming"
) -> Any:
    terms = relpos.Terms(LineBias(values, LINE)) + (beside or relpos.Terms())
    return attention(q, k, v, position=terms, mask=mask, backend=backend)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Seen(TorchDispatchMode):
    """The operators of ours that a mode is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "relpos":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_eager_calls_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the call was taken apart for an operator")

    monkeypatch.setattr(operators, "pack", refuse)
    monkeypatch.setattr(operators, "unpack", refuse)
    leaves = made()
    with_gradients(call(*leaves), leaves)
    with torch.no_grad():
        call(*leaves)


@pytest.mark.parametrize("forward", [True, False], ids=["around both", "around the backward alone"])
def test_a_mode_is_shown_operators_and_the_numbers_are_the_same(forward: bool) -> None:
    leaves = made()
    wanted = with_gradients(call(*leaves), leaves)
    with Seen() if forward else contextlib.nullcontext() as seen:
        output = call(*leaves)
    with seen or Seen() as seen:
        assert_same(with_gradients(output, leaves), wanted)
    assert seen.names == [*["relpos::streaming"] * forward, "relpos::streaming_backward"]


def test_a_subclass_is_shown_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Tensor):
        pass

    packed: list[Any] = []
    real = operators.pack
    monkeypatch.setattr(operators, "pack", lambda call: packed.append(call) or real(call))
    q, *rest = made()
    own = call(q.detach().as_subclass(Own), *rest)
    assert len(packed) == 1
    assert torch.equal(own.as_subclass(Tensor), call(q, *rest))


def test_weights_that_changed_before_the_backward_are_an_error() -> None:
    leaves = made()
    output = call(*leaves)
    with torch.no_grad():
        leaves[3].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with_gradients(output, leaves)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_where_it_is_computed_again(reentrant: bool) -> None:
    leaves = made()
    wanted = with_gradients(call(*leaves), leaves)
    output = checkpoint(call, *leaves, use_reentrant=reentrant)
    output.backward(2 * output.detach())
    assert_same([output.detach(), *(x.grad for x in leaves)], wanted)


def test_gradients_are_the_same_where_tensors_are_saved_elsewhere() -> None:
    leaves = made()
    with torch.autograd.graph.save_on_cpu():
        output = call(*leaves)
    assert_same(with_gradients(output, leaves), with_gradients(call(*leaves), leaves))


def test_the_table_alone_may_learn() -> None:
    *tensors, values = made()
    alone = with_gradients(call(*(x.detach() for x in tensors), values), [values])
    assert_same(alone, with_gradients(call(*tensors, values), [values]))


@pytest.mark.parametrize("backend", ["streaming", *INTERPRETED])
def test_no_tensor_outlives_its_graph(backend: str) -> None:
    leaves = made()
    output = call(*leaves, backend=backend)
    saved = [weakref.ref(x) for x in (output.grad_fn, *leaves)]
    gc.disable()
    try:
        del output, leaves
        assert [one() for one in saved] == [None] * 5
    finally:
        gc.enable()


def test_a_table_is_padded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's serves the backward, also a second one."""
    launched = launches_of(importlib.import_module("relpos.engines.triton.table_kernels"), "padded", monkeypatch)
    leaves = made()
    output = call(*leaves, backend="triton").sum()
    first, second = (torch.autograd.grad(output, leaves, retain_graph=True) for _ in range(2))
    assert_same(list(first), list(second))
    assert len(launched) == 1


def test_weights_that_changed_before_a_layer_is_computed_again() -> None:
    """Its gradients are those of the new weights, all of them: nothing of the first run is left in its node."""
    *tensors, values = made()
    found = []
    for backend in ("triton", "reference"):
        weights = values.detach().clone().requires_grad_()

        def layer(*tensors: Tensor, weights: Tensor = weights, backend: str = backend) -> Tensor:
            output: Tensor = call(*tensors, 2 * weights, mask=None, backend=backend)
            return output

        output = checkpoint(layer, *tensors, use_reentrant=False)
        with torch.no_grad():
            weights.neg_()
        found.append(torch.autograd.grad(output.square().sum(), [*tensors, weights]))
    torch.testing.assert_close(*found)


def test_what_a_forward_leaves_to_its_backward_is_no_part_of_a_call() -> None:
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v, values = (x.detach().to(here) for x in made())
    one = Arguments(q, k, v, LineBias(values, LINE.to(here))).call()
    packed, tensors = operators.pack(one), CallForm(one, as_packed=True).tensors(one)
    TRITON.run(one)
    assert one.prepared is not None
    assert replace(one, q=k).prepared is None  # of other tensors it would be wrong
    assert operators.pack(one)[1:] == packed[1:]
    assert list(map(id, CallForm(one, as_packed=True).tensors(one))) == list(map(id, tensors))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("rule", "backend"),
    [(False, "streaming"), (True, "streaming"), (False, "triton")],
    ids=["a line", "a row rule beside it", "a line, triton"],
)
def test_a_mode_in_half_of_a_step_that_is_computed_again(where: str, rule: bool, backend: str) -> None:
    """What is saved does not depend on who runs the call; a row rule checkpoints itself."""
    leaves, fire = made(), relpos.FIREBias(num_heads=HEADS)

    def run(*leaves: Tensor) -> Any:
        return call(*leaves, mask="causal", beside=fire.terms(Sequence(N)) if rule else None, backend=backend)

    def seen(here: str) -> Any:
        return FlopCounterMode(display=False) if where == here else contextlib.nullcontext()

    wanted = with_gradients(run(*leaves), leaves)
    with seen("forward"):
        out = run(*leaves) if rule else checkpoint(run, *leaves, use_reentrant=False)
    with seen("backward"):
        torch.testing.assert_close(with_gradients(out, leaves), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.traced
def test_compiled_autograd_traces_the_backward_of_an_eager_forward() -> None:
    compiled_autograd = importlib.import_module("torch._dynamo.compiled_autograd")
    leaves = made()
    _, *wanted = with_gradients(call(*leaves), leaves)
    total = call(*leaves).square().sum()
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        total.backward()
    torch.testing.assert_close([x.grad for x in leaves], wanted)


def test_a_mask_and_lines_made_in_inference_mode_are_trained_under() -> None:
    leaves, found = made(), []
    for inference in (True, False):
        with torch.inference_mode(inference):
            numbers = torch.arange(N)
            mask, line = Mask.packed(numbers // 5), lines(Positions(numbers, low=0, high=N - 1))
        output = attention(*leaves[:3], position=LineBias(leaves[3], line), mask=mask, backend="streaming")
        found.append(with_gradients(output, leaves))
    assert_same(*found)


@pytest.mark.parametrize("backend", ["streaming", "triton"])
def test_whichever_result_a_loss_is_made_of(backend: str) -> None:
    """Autograd hands the node no gradient of the other; calls of one structure in turn, the seldom one first."""
    leaves, weights = made(), (torch.randn(2, HEADS, N, WIDTH), torch.randn(2, HEADS, N))
    for mask in (PACKED, None):
        for used in ((1,), (0,), (0, 1), (0,)):
            gradients = []
            for engine in (backend, "reference"):
                terms = relpos.Terms(LineBias(leaves[3], LINE))
                results = attention(*leaves[:3], position=terms, mask=mask, backend=engine, return_lse=True)
                loss = sum((results[at] * weights[at]).sum() for at in used)
                assert isinstance(loss, Tensor)
                gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
            torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["streaming", "sdpa", *INTERPRETED])
def test_hooks_may_give_saved_tensors_other_strides(backend: str) -> None:
    """As `save_on_cpu` does from a GPU: the numbers are those saved, and where they lie is not."""
    qkv, values = torch.randn(2, N, 3, HEADS, WIDTH), torch.randn(HEADS, LINE.length)

    def gradients(context: Any) -> list[Tensor]:
        leaves = [qkv.clone().requires_grad_(), values.clone().requires_grad_()]
        with context:
            out = call(*leaves[0].permute(2, 0, 3, 1, 4), leaves[1], mask=None, backend=backend)
        return list(torch.autograd.grad((out * torch.arange(WIDTH)).sum(), leaves))

    wanted = gradients(contextlib.nullcontext())
    for _ in range(2):  # planned for the first, and from that plan
        moved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x)
        torch.testing.assert_close(gradients(moved), wanted)
