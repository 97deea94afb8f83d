"""Scopes in which a mechanism makes its terms once: while weights do not change, and within a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from relpos.core.checks import fail, shape_of
from relpos.position.base.cached_terms import (
    DecodingTerms,
    TermsOfForward,
    begin_forward,
    drop_terms_of_forward,
    end_forward,
)
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.states import needs_states


@contextmanager
def decoding(*modules: nn.Module) -> Iterator[None]:
    """While tokens are decoded one by one, biases of these modules are parts of the terms that the first token made.

    `LanguageModel.generate` is in such a scope. Inside it no weight of a position mechanism may change in place; where
    gradients are taken, and where `torch.func.functional_call` hands in other weights, nothing is kept.

    Args:
        modules: models or mechanisms.

    Examples:
        >>> model = relpos.LanguageModel(vocab_size=16, embed_dim=32, depth=2, num_heads=2, position="t5").eval()
        >>> cache, token = relpos.KeyValueCache(depth=2), torch.tensor([[3]])
        >>> with torch.no_grad(), relpos.decoding(model):
        ...     for _ in range(4):
        ...         token = model(token, cache=cache)[:, -1:].argmax(dim=-1)
        ...
        >>> cache.length
        4
    """
    inside = _mechanisms(modules, "modules to decode with")
    # of scopes inside one another the outer one counts
    entered = [part for part in inside if part._decoding_terms is None]
    for part in entered:
        part.__dict__["_decoding_terms"] = DecodingTerms(part)
    try:
        yield
    finally:
        for part in entered:
            part.__dict__.pop("_decoding_terms", None)


@contextmanager
def reading_once(*models: nn.Module) -> Iterator[None]:
    """In each forward of these models, a mechanism that several layers share makes its terms once for all of them.

    For a stack of layers that each ask their mechanism: twelve of them that share T5's table read it once, and its
    gradient is summed once. relpos's own models hand terms down, and need no scope. What is made goes when the forward
    ends, so a training loop may stand inside as a whole. Terms are made anew, as without the scope, in a layer under
    `torch.utils.checkpoint`, which is to make all again; in compiled code; and where weights, settings or coordinates
    differ. Changes through `.data`, and of tensors that are neither parameters nor buffers, are not noticed.

    Do not use it for a forward that itself computes gradients of its layers twice: the shared graph is freed by the
    first. After Ctrl-C in a forward, call the model again before its layers. A copy made inside keeps two hooks that do
    nothing.

    Args:
        models: whose forwards count: the module that is called, not one inside.

    Raises:
        ValueError: something else than a module.

    Examples:
        >>> class Stack(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.position, self.where = relpos.T5Bias(num_heads=2), relpos.Sequence(6)
        ...
        ...     def forward(self, x):  # [B, H, N, D]
        ...         for _ in range(12):
        ...             x = x + relpos.attention(x, x, x, position=self.position, queries=self.where)
        ...         return x
        ...
        >>> model, x = Stack(), torch.randn(1, 2, 6, 8)
        >>> with relpos.reading_once(model):
        ...     out = model(x)
        >>> out.shape
        torch.Size([1, 2, 6, 8])
    """
    inside = _mechanisms(models, "models whose forwards count")
    entered = [part for part in inside if "terms" not in part.__dict__ and not needs_states(part)]
    handles = []
    try:
        for model in models:
            handles.append(model.register_forward_pre_hook(begin_forward))
            handles.append(model.register_forward_hook(end_forward, always_call=True))
        for part in entered:
            part.__dict__["terms"] = TermsOfForward(part, part.terms)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in entered:
            drop_terms_of_forward(part.__dict__)


def _mechanisms(modules: tuple[nn.Module, ...], wanted: str) -> list[Mechanism]:
    for module in modules:
        if not isinstance(module, nn.Module):
            fail(wanted, shape_of(module), "Pass the model.")
    return list({part: None for module in modules for part in module.modules() if isinstance(part, Mechanism)})
