"""The private parts of PyTorch that relpos uses. Every such name is looked up here, and nowhere else.

An operator is used only if its signature is the expected one; otherwise a slower path computes the same. Checks for an
active function transform have a public fallback, or PyTorch raises its own error later.
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
_FLASH_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
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

    It assumes that q, k and v `[B, H, N, D]` have one dtype and width, and that the last axis of each, and of the
    mask, is contiguous; other strides are free.
    """
    return _operator(_FLASH)


@cache
def flash_kernel_backward() -> Callable[..., Any] | None:
    """The gradients of `flash_kernel`, by one thread a head, from the same tensors, its results and their gradient."""
    return _operator(_FLASH_BACKWARD)


@cache
def softmax_backward() -> Callable[..., Any] | None:
    """PyTorch's backward of a softmax in one pass, from gradient, weights, axis and dtype."""
    return _operator(_SOFTMAX_BACKWARD)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU. If unknown, False: float32 copies are multiplied."""
    asked = _operator(_BFLOAT16)
    return asked is not None and bool(asked())


_swap: Callable[..., AbstractContextManager[Any]] | None = getattr(stateless, "_reparametrize_module", None)


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[Any] | None:
    """A context in which a module has these tensors as its parameters: that of `torch.func.functional_call`, which only
    calls `forward`. None if PyTorch no longer has it."""
    return None if _swap is None else _swap(module, tensors, tie_weights=True)


def inside_transform() -> bool:
    """Whether a transform of `torch.func` is being applied. If unknown, False: relpos's operators raise under all but
    forward mode, which `inside_forward_mode` detects."""
    try:
        return _peek() is not None
    except TypeError:  # a newer one takes arguments
        return False


def is_batched(x: Tensor) -> bool:
    """Whether a tensor is batched: a gradient that autograd computes for all rows of a Jacobian at once. If unknown,
    False: code that does not support such tensors raises."""
    keys = getattr(torch._C, "_dispatch_keys", None)
    return keys is not None and "Batched" in str(keys(x))  # PyTorch gives this key no name in Python


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers, as under `FakeTensorMode`. If unknown, False: reading its numbers
    raises PyTorch's error."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return isinstance(x, kind)


def real_numbers() -> AbstractContextManager[Any]:
    """A context in which new tensors have numbers, even under `FakeTensorMode`: for constants that are computed once
    and read as Python numbers."""
    unset = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "unset_fake_temporarily", nullcontext)
    context: AbstractContextManager[Any] = unset()
    return context


def inside_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
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
    """Whether `torch.fx.symbolic_trace` or `make_fx` traces this call. If unknown, False."""
    return bool(getattr(_symbolic_trace, "_is_fx_tracing_flag", False))


def constant_while_tracing(function: F) -> F:
    """Mark a function that a compiler calls while it traces, and whose result it takes for a constant.

    Like `torch.compiler.assume_constant_result`, which imports the compiler to set this attribute. If PyTorch renames
    the attribute, the function is traced like any other.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_tracing
def exporting() -> bool:
    """Whether a program is being exported. Dynamo of torch 2.10 and 2.11 says so for all that it traces, so it must not
    trace this function."""
    return torch.compiler.is_exporting()


_hooks: Callable[[bool], Any] | None = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)


def hooks_on_saved_tensors() -> bool:
    """Whether tensors saved for a gradient go through hooks, as in a checkpointed layer, or one whose tensors are
    offloaded to the CPU. If unknown, True."""
    return _hooks is None or _hooks(True) is not None


def writes(x: Tensor) -> int:
    """How often a tensor was written to in place, as autograd counts."""
    return x._version


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def any_size(x: Tensor, axis: int) -> None:
    """Tell `torch.compile` that this axis has another size at every call."""
    torch._dynamo.maybe_mark_dynamic(x, axis)
