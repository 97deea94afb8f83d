"""What relpos uses of PyTorch that is not public. Every such name is looked up here, and nowhere else.

An operator is used only if its signature is the one that was read when this was written; otherwise another path
computes the same, more slowly. The questions whether a function transform is active have a public fallback, or PyTorch
raises an error of its own later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.utils import stateless

_FLASH = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
)
_SOFTMAX_BACKWARD = (
    "aten::_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"
)
_BFLOAT16 = "mkldnn::_is_mkldnn_bf16_supported() -> bool _0"


F = TypeVar("F", bound=Callable[..., Any])

_peek: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def _operator(signature: str) -> Callable[..., Any] | None:
    """The operator with exactly this signature, or None."""
    namespace, _, name = signature.partition("(")[0].partition("::")
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)
    return found if str(getattr(found, "_schema", None)) == signature else None


@cache
def flash_kernel() -> Callable[..., Any] | None:
    """PyTorch's flash attention on CPU with the log-sum-exp, which no public function returns.

    It believes that q, k and v `[B, H, N, D]` are of one dtype and width, and that the last axis of each,
    and of the mask, is contiguous; the other strides may be any.
    """
    return _operator(_FLASH)


@cache
def softmax_backward() -> Callable[..., Any] | None:
    """What PyTorch computes in the backward of a softmax, in one pass, of gradient, weights, axis and dtype."""
    return _operator(_SOFTMAX_BACKWARD)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU. Where nobody tells, False: float32 copies are multiplied."""
    asked = _operator(_BFLOAT16)
    return asked is not None and bool(asked())


_swap: Callable[..., AbstractContextManager[Any]] | None = getattr(stateless, "_reparametrize_module", None)


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[Any] | None:
    """A scope in which a module has these tensors for its parameters: that of `torch.func.functional_call`, which calls
    `forward` alone. Where PyTorch has it no more, None."""
    return None if _swap is None else _swap(module, tensors, tie_weights=True)


def inside_transform() -> bool:
    """Whether a transform of `torch.func` is being applied. Where nobody tells, False: an operator of ours raises
    under every one but forward mode, which `inside_forward_mode` knows."""
    try:
        return _peek() is not None
    except TypeError:  # it takes arguments now
        return False


def is_batched(x: Tensor) -> bool:
    """Whether a tensor stands for many: a gradient that autograd takes for all rows of a Jacobian at once. Where nobody
    tells, False: what does not know such tensors raises."""
    keys = getattr(torch._C, "_dispatch_keys", None)
    return keys is not None and "Batched" in str(keys(x))  # PyTorch gives this key no name in Python


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers, as all have under `FakeTensorMode`. Where nobody tells, False: who
    asks for its numbers gets PyTorch's error."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return isinstance(x, kind)


def real_numbers() -> AbstractContextManager[Any]:
    """While this lasts, tensors that are made have numbers, under `FakeTensorMode` too: for constants that are computed
    once and read as Python numbers."""
    unset = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "unset_fake_temporarily", nullcontext)
    context: AbstractContextManager[Any] = unset()
    return context


def inside_forward_mode() -> bool:
    """Whether derivatives are being pushed forward."""
    level = getattr(forward_ad, "_current_level", None)
    if isinstance(level, int):
        return level >= 0
    nothing = torch.zeros(())
    try:  # the public way, which takes an error to say no
        forward_ad.make_dual(nothing, nothing)
    except RuntimeError:
        return False
    return True


def symbolically_traced() -> bool:
    """Whether `torch.fx.symbolic_trace`, or `make_fx`, runs the call under way. Where nobody tells, False."""
    return bool(getattr(_symbolic_trace, "_is_fx_tracing_flag", False))


def asked_while_tracing(function: F) -> F:
    """Mark a function that a compiler calls while it makes a graph, and takes the answer of for a constant.

    As `torch.compiler.assume_constant_result`, which imports the compiler to set this attribute. Where it has another
    name the function is traced like any other.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@asked_while_tracing
def exporting() -> bool:
    """Whether a program is being exported. Dynamo of torch 2.10 and 2.11 says so of all that it traces, so it does not
    trace this question."""
    return torch.compiler.is_exporting()


_hooks: Callable[[bool], Any] | None = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)


def hooks_on_saved_tensors() -> bool:
    """Whether what is saved for a gradient goes through hooks: in a layer that is checkpointed, or whose tensors are
    kept on the CPU. Where nobody tells, True."""
    return _hooks is None or _hooks(True) is not None


def writes(x: Tensor) -> int:
    """How often a tensor was written to in place, as autograd counts."""
    return x._version
