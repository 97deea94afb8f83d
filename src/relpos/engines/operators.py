"""An engine's forward and backward as one graph node: an autograd node in eager mode, custom operators otherwise.

Two custom operators take a call as `packing.pack` makes it, for compilers, modes and subclasses, which only see
operators. Packing costs more than launching the kernels of a call, so an eager call is passed on as it is. The backward
is not differentiable: a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core import at_least_float32
from relpos.core.checks import without_autocast
from relpos.core.private import hooks_on_saved_tensors, inside_forward_mode, inside_transform
from relpos.engines.call import Call
from relpos.engines.packing import CallForm, Packed, pack, unpack

T = TypeVar("T")


class Gradients:
    """The gradients of some of a call's tensors, as a list in the order of the tensors; each tensor occurs once.

    Args:
        tensors: those whose gradients are wanted. A tensor is known by its identity.
        kind: says which of a call's tensors they are, if calls of one structure are asked for several such sets.

    Attributes:
        complete: whether all were added, contiguous and in their tensors' dtypes; whoever adds them may say so.
    """

    __slots__ = ("_ids", "complete", "kind", "sums", "tensors")

    def __init__(self, tensors: Sequence[Tensor], kind: Hashable = None) -> None:
        self.tensors, self.kind, self.complete = tensors, kind, False
        self.sums: list[Tensor | None] = [None] * len(tensors)
        self._ids = list(map(id, tensors))  # few: searching takes less time than a dict

    def wants(self, x: Tensor | None) -> bool:
        """Whether a tensor is among them."""
        return id(x) in self._ids

    def add(self, x: Tensor | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a tensor, which may occur in several parts of a call, if its gradient is wanted."""
        if gradient is not None and id(x) in self._ids:
            index = self._ids.index(id(x))
            known = self.sums[index]
            self.sums[index] = gradient if known is None else known + gradient

    def buffer(self, x: Tensor) -> Tensor:
        """The buffer to add to in place: zeros at first, in float32 or wider."""
        index = self._ids.index(id(x))
        known = self.sums[index]
        if known is None:
            known = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            self.sums[index] = known
        return known

    def of(self, x: Tensor) -> Tensor | None:
        """The gradient of a tensor so far; None means zeros."""
        return self.sums[self._ids.index(id(x))] if id(x) in self._ids else None

    def finished(self) -> list[Tensor]:
        """All of them, each in its tensor's dtype, contiguous or token by token."""
        if self.complete:
            return self.sums  # type: ignore[return-value]
        return [_finished(gradient, x) for gradient, x in zip(self.sums, self.tensors, strict=True)]


def _finished(gradient: Tensor | None, x: Tensor) -> Tensor:
    gradient = torch.zeros_like(x) if gradient is None else gradient
    return gradient if gradient.dtype is x.dtype and _is_dense(gradient) else gradient.to(x.dtype).contiguous()


def _is_dense(x: Tensor) -> bool:
    """Whether a gradient is contiguous, or would be with the tokens before the heads."""
    return x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous())


RunForward = Callable[[Call], tuple[Tensor, Tensor]]
"""Output and log-sum-exp of a call."""
RunBackward = Callable[[Call, Tensor, Tensor, Tensor, Tensor | None, Gradients], None]
"""Takes a call, its output and log-sum-exp and their gradients, and adds to the gradients that are wanted. The
gradient of the log-sum-exp is None where nothing was made of it, as in most calls."""


def joined(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one softmax over disjoint sets of keys, from those of each set."""
    if len(results) == 1:
        return results[0]
    lse = torch.stack([part for _, part in results])
    peak = lse.detach().amax(dim=0)
    shares = torch.exp(lse - torch.where(peak == -torch.inf, 0, peak))
    total = shares.sum(dim=0)
    blank = total == 0
    total = total.masked_fill(blank, 1)  # not later: infinity times 0 is no gradient
    shares = shares / total
    first, *others = (at_least_float32(part) for part, _ in results)
    out = first * shares[0, ..., None]
    for part, share in zip(others, shares[1:], strict=True):
        out.addcmul_(part, share[..., None])
    return out.to(results[0][0].dtype), torch.where(blank, -torch.inf, peak + total.log())


def of_each(*forwards: RunForward) -> RunForward:
    """The forward of a call with `others`, from a forward for each; one alone is for all."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        if not call.others:
            return forwards[0](call)
        calls = call.each()
        return joined([run(one) for run, one in zip(_for_all(forwards, calls), calls, strict=True)])

    return forward


def back_of_each(*backwards: RunBackward) -> RunBackward:
    """The backward of a call with `others`: that of each, from the results of all."""

    def backward(call: Call, *results: Any) -> None:
        if not call.others:
            backwards[0](call, *results)
            return
        calls = call.each()
        for run, one in zip(_for_all(backwards, calls), calls, strict=True):
            run(one, *results)

    return backward


def _for_all(runs: Sequence[T], calls: Sequence[Call]) -> Sequence[T]:
    return runs if len(runs) == len(calls) else [runs[0]] * len(calls)


FORWARD_MODE = "forward-mode derivatives"


def lacks_transform() -> str | None:
    """The active function transform, which custom operators do not support, or None."""
    if torch.compiler.is_compiling():
        return None
    if inside_forward_mode():
        return FORWARD_MODE
    return "torch.func (vmap, grad, ...)" if inside_transform() else None


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, each as a separate object: a compiler may have merged two that hold the same."""
    return [x.detach() if any(x is y for y in tensors[:index]) else x for index, x in enumerate(tensors)]


def _seen_by_operators(tensors: Sequence[Tensor]) -> bool:
    """Whether something is active that only sees operators: a compiler, a mode, a tracer, a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or not _OWN.issuperset(map(type, tensors))
    )


_OWN = {Tensor, torch.nn.Parameter}


Saved = Sequence[Any]
"""The output, the log-sum-exp and their gradients; the last may be None."""
_StepBack = Callable[[Call, list[Tensor], Saved, tuple[int, ...]], list[Tensor]]
"""Takes a call, its tensors, what `Saved` has and which tensors want gradients: these gradients."""

_LEADING = 2
"""Arguments of `_Node.apply` before the tensors. Not a class attribute, which compiled autograd cannot read."""
_NONE_LEADING = (None,) * _LEADING


class _ByNode(NamedTuple):
    """How calls of one structure are computed by an autograd node.

    Attributes:
        needed: which tensors want gradients, by what autograd says of the node's arguments.
        hooked: whether hooks on saved tensors may give back others than were saved, as those of a checkpoint do once
            its weights have changed, or with other strides.
    """

    forward: RunForward
    step_back: _StepBack
    form: CallForm
    needed: dict[tuple[bool, ...], tuple[int, ...]]
    hooked: bool

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, with a gradient."""
        out, lse = _Node.apply(self, call, *self.form.tensors(call))  # type: ignore[no-untyped-call]
        return out, lse

    def learns(self, call: Call) -> bool:
        """Whether a gradient is wanted, now."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.form.tensors(call))


class _Node(torch.autograd.Function):
    """A call in eager mode. It saves the call's tensors and its lines, which hold a cache, but not the call."""

    @staticmethod
    def forward(ctx: Any, way: _ByNode, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = way.forward(call)
        ctx.set_materialize_grads(False)
        if True in map(Tensor.is_inference, tensors):  # a mask, or lines: they cannot be saved themselves
            tensors = tuple([x.clone() if x.is_inference() else x for x in tensors])
        ctx.save_for_backward(*tensors, out, lse)
        ctx.kept = way, way.form.whole(call), None if way.hooked else call.prepared
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        way, lines, prepared = ctx.kept
        call = way.form.call(tensors, lines)
        call.prepared = prepared
        wanted = ctx.needs_input_grad
        needed = way.needed.get(wanted)
        if needed is None:
            needed = way.needed[wanted] = tuple(at for at, wants in enumerate(wanted[_LEADING:]) if wants)
        found = way.step_back(call, tensors, (out, lse, d_out, d_lse), needed)
        if len(found) == len(tensors):
            return (*_NONE_LEADING, *found)
        gradients: list[Tensor | None] = [None] * len(wanted)
        for index, gradient in zip(needed, found, strict=True):
            gradients[_LEADING + index] = gradient
        return tuple(gradients)


class Operator:
    """A call with its gradient: in eager mode directly, else by `relpos::<engine>`.

    Both are given calls with `others`, as from `of_each` and `back_of_each`.

    The forward is called with autocast off, as `relpos.attention` runs engines. The backward is called by autograd, so
    it switches autocast off itself.
    """

    def __init__(self, engine: str, forward: RunForward, backward: RunBackward) -> None:
        self._forward, self._backward = forward, backward
        self._attend, self._attend_backward = _register(engine, self._forward, self._backward)

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of any call."""
        if torch.compiler.is_compiling():
            return self._by_operator(call)
        form = CallForm(call, as_packed=True)
        if _seen_by_operators(form.tensors(call)):
            return self._by_operator(call)
        way = self._by_node(self._forward, self._backward, form, hooked=hooks_on_saved_tensors())
        return way.run(call) if way.learns(call) else way.forward(call)

    def planned(self, prepare: Callable[[Call], tuple[RunForward, RunBackward]] | None = None) -> RunForward:
        """A function for calls of one structure in eager mode, when nothing is active that only sees operators.

        Args:
            prepare: makes forward and backward from the first such call; default those of this operator.
        """
        ready: RunForward | None = None

        def compute(call: Call) -> tuple[Tensor, Tensor]:
            nonlocal ready
            if ready is None:
                forward, backward = self._forward, self._backward
                if prepare is not None:
                    forwards, backwards = zip(*map(prepare, call.each()), strict=True)
                    forward, backward = forwards[0], backwards[0]
                    if call.others:
                        forward, backward = of_each(*forwards), back_of_each(*backwards)
                way = self._by_node(forward, backward, CallForm(call, as_packed=False), hooked=False)
                of_any = self._by_node(forward, self._backward, CallForm(call, as_packed=True), hooked=True)

                def run(call: Call) -> tuple[Tensor, Tensor]:
                    return (of_any if hooks_on_saved_tensors() else way).run(call)

                ready = run if way.learns(call) else forward
            return ready(call)

        return compute

    def _by_operator(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = self._attend(*pack(call))
        return out, lse

    def _by_node(self, forward: RunForward, backward: RunBackward, form: CallForm, *, hooked: bool) -> _ByNode:
        return _ByNode(forward, partial(self._step_back, backward, hooked), form, {}, hooked)

    def _step_back(
        self, backward: RunBackward, hooked: bool, call: Call, tensors: list[Tensor], saved: Saved,
        needed: tuple[int, ...],
    ) -> list[Tensor]:  # fmt: skip
        out, lse, d_out, d_lse = saved
        unknown = (*tensors, out, lse, d_out) if hooked else (d_out,)  # whose class the forward did not see
        if torch.is_grad_enabled() or _seen_by_operators(unknown):  # create_graph, compiled autograd
            d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
            packed, *others = pack(call)
            indices = [next(at for at, x in enumerate(packed) if x is tensors[index]) for index in needed]
            found: list[Tensor] = self._attend_backward(packed, *others, out, lse, d_out, d_lse, indices)
            return found
        return _gradients(backward, tensors, call, saved, needed)


def _gradients(
    backward: RunBackward, tensors: list[Tensor], call: Call, saved: Saved, needed: tuple[int, ...]
) -> list[Tensor]:
    """The gradients of the tensors at `needed` indices."""
    out, lse, d_out, d_lse = saved
    wanted = tensors if len(needed) == len(tensors) else [tensors[index] for index in needed]
    gradients = Gradients(wanted, needed)
    with without_autocast(out.device):
        backward(call, out, lse, d_out, d_lse, gradients)
    return gradients.finished()


def _register(engine: str, forward: RunForward, backward: RunBackward) -> tuple[Any, Any]:
    """The operators `relpos::<engine>` and `relpos::<engine>_backward`."""

    @torch.library.custom_op(
        f"relpos::{engine}",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure) -> (Tensor, Tensor)",
    )
    def attend(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        out, lse = forward(unpack(tensors, numbers, structure))
        return out.contiguous(), lse.contiguous()

    @attend.register_fake
    def _(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        call = unpack(tensors, numbers, structure)
        shape = call.q.shape[:3]
        wide = torch.promote_types(call.q.dtype, torch.float32)
        return call.q.new_empty(*shape, call.v.shape[3]), call.q.new_empty(shape, dtype=wide)

    @torch.library.custom_op(
        f"relpos::{engine}_backward",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure, Tensor out, Tensor lse, Tensor d_out, "
        "Tensor d_lse, int[] needed) -> Tensor[]",
    )
    def attend_backward(tensors: list[Tensor], numbers: list[int], structure: str, *rest: Any) -> list[Tensor]:
        *saved, needed = rest
        tensors = _distinct(tensors)
        found = _gradients(backward, tensors, unpack(tensors, numbers, structure), saved, tuple(needed))
        return [x.contiguous() for x in found]

    @attend_backward.register_fake
    def _(tensors: list[Tensor], numbers: list[int], structure: str, *rest: Any) -> list[Tensor]:
        return [torch.empty_like(tensors[index], memory_format=torch.contiguous_format) for index in rest[-1]]

    def keep(ctx: Any, inputs: Packed, output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.numbers, ctx.structure = inputs
        ctx.save_for_backward(*tensors, *output)

    def run_backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[list[Tensor | None], None, None]:
        *tensors, out, lse = ctx.saved_tensors
        needed = [index for index, needs_gradient in enumerate(ctx.needs_input_grad[0]) if needs_gradient]
        found = attend_backward(tensors, ctx.numbers, ctx.structure, out, lse, d_out, d_lse, needed)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for index, gradient in zip(needed, found, strict=True):
            gradients[index] = gradient
        return gradients, None, None

    def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"expected first derivatives only; got a second derivative of backend {engine!r}, which lacks it. "
            "Use backend='reference'."
        )

    attend.register_autograd(run_backward, setup_context=keep)
    attend_backward.register_autograd(no_second_derivative, setup_context=lambda ctx, inputs, output: None)
    return attend, attend_backward
