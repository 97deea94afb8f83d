"""What the tests of `replace_position` share: attention by hand, in plain PyTorch, and what must always hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relpos
from relpos.core import Coordinates
from relpos.core.terms import content

Call = Callable[[Any], Tensor]


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Any,
    queries: Coordinates,
    keys: Coordinates | None = None,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of `[B, H, N, D]` with the dense scores of a mechanism, `[B, N, H D]`; `allowed` broadcasts to them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    terms = relpos.Terms() if position is None else position.terms(queries, keys)
    if scale is None:
        scale = next((term.value for term in terms.of(relpos.Scale)), q.shape[-1] ** -0.5)
    turned_q, turned_k = content(terms, q, k)
    scores = scale * turned_q @ turned_k.mT
    for term in terms:
        if not isinstance(term, relpos.Rotation | relpos.Scale | relpos.QueryBias):
            scores = scores + term.scores(q, k, scale, allowed)  # type: ignore[attr-defined]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(x: Tensor, count: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def linear(x: Tensor, layer: Any) -> Tensor:
    """A linear layer's weights on tokens."""
    return F.linear(x, layer.weight, layer.bias)


def gradients(out: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the output, by parameter, of all that has one."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    found = torch.autograd.grad((out * weights).sum(), list(named.values()), allow_unused=True)
    return {name: x for name, x in zip(named, found, strict=True) if x is not None}


def require_same(model: nn.Module, own: Tensor, wanted: Tensor) -> None:
    """Outputs and gradients by name are those by hand; the mechanisms have some."""
    torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)
    first, second = gradients(own, model), gradients(wanted, model)
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-7, atol=1e-9, msg=name)


def require_round_trips(build: Callable[[], nn.Module], position: Any, call: Call, **options: Any) -> None:
    """Restored bits, a state dict in a fresh model, deepcopy, and frozen parameters of its own position."""
    model = build()
    before, state = call(model), {name: x.clone() for name, x in model.state_dict().items()}
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    idle = set(trained) - gradients(before, model).keys()  # a head that the call leaves out
    report = relpos.replace_position(model, position, init_std=0.5, **options)
    replaced = call(model)
    assert not torch.allclose(replaced, before)
    unused = {name for name, x in model.named_parameters() if x.requires_grad} - gradients(replaced, model).keys()
    assert unused == idle, f"{unused - idle} would stop DistributedDataParallel"
    torch.manual_seed(7)
    fresh = build()
    relpos.replace_position(fresh, position, **options)
    assert not torch.allclose(call(fresh), replaced)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(call(fresh), replaced)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    relpos.restore(model)
    assert torch.equal(call(model), before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [name for name, x in model.named_parameters() if x.requires_grad] == trained
    assert torch.equal(call(copied), replaced), "a copy has mechanisms of its own"
    assert torch.equal(call(pickled), replaced)
    relpos.restore(pickled)
    assert torch.equal(call(pickled), before)
    assert "off" in str(report)
    relpos.replace_position(model, position, **options)  # a second time, after restore
