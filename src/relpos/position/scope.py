"""A scope in which weights do not change, so that what a bias makes of them is made once and not at every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from relpos.core.checks import fail, shape_of
from relpos.position.held import Held
from relpos.position.mechanism import Mechanism


@contextmanager
def decoding(*modules: nn.Module) -> Iterator[None]:
    """While tokens are decoded one by one, biases of these modules are read from what was made for the first token.

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
    for module in modules:
        if not isinstance(module, nn.Module):
            fail("modules to decode with", shape_of(module), "Pass the model.")
    inside = [part for module in modules for part in module.modules() if isinstance(part, Mechanism)]
    entered = [part for part in inside if part._held is None]  # of scopes inside one another the outer one counts
    for part in entered:
        part.__dict__["_held"] = Held(part)
    try:
        yield
    finally:
        for part in entered:
            part.__dict__.pop("_held", None)
