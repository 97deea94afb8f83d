"""What the conformance tests call and compare: attention under a mechanism, its inputs, its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos import engines
from relpos.core import Coordinates, Terms
from relpos.position import Mechanism
from relpos.position.base.states import States, needs_states, terms_of
from relpos.testing import devices, oracle
from relpos.testing.cases import SuiteCase

WIDTH = 4
"""Width of a head."""
BATCH = 2


@dataclass
class AttentionInputs:
    """q, k, v and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    def to(self, dtype: torch.dtype) -> AttentionInputs:
        """The same in a dtype."""
        return AttentionInputs(*(x.to(dtype) for x in (self.q, self.k, self.v, self.upstream)))


def make_inputs(case: SuiteCase, dtype: torch.dtype, batch: int = BATCH) -> AttentionInputs:
    """Random inputs of a case, the same in every call."""
    keys = case.queries if case.keys is None else case.keys
    groups = case.heads if case.groups is None else case.groups
    torch.default_generator.manual_seed(7)
    return AttentionInputs(
        torch.randn(batch, case.heads, case.queries.count, WIDTH).to(dtype),
        torch.randn(batch, groups, keys.count, WIDTH).to(dtype),
        torch.randn(batch, groups, keys.count, WIDTH).to(dtype),
        torch.randn(batch, case.heads, case.queries.count, WIDTH).to(dtype),
    )


def states_of(position: Mechanism, q: Tensor, k: Tensor) -> States | None:
    """Hidden states of queries and keys for a mechanism that needs some: q and k as if projected by the identity."""
    if not needs_states(position):
        return None
    own, others = (oracle.heads_of(x, q.shape[1]).transpose(1, 2).flatten(2) for x in (q, k))
    return own, others


def terms_of_case(
    position: Mechanism, queries: Coordinates, keys: Coordinates | None = None, tensors: Any = None
) -> Terms:
    """The terms of a mechanism; by `terms_from` where tensors are given. Where it needs hidden states, of random ones
    that are the same in every call."""
    states = states_at(position, queries, keys)
    if tensors is None:
        return terms_of(position, queries, keys, states)
    return position.terms_from(tensors, queries, keys, **({} if states is None else {"states": states}))


def states_at(position: Mechanism, queries: Coordinates, keys: Coordinates | None = None) -> States | None:
    """Random states of tokens, the same in every call, for a mechanism that needs some."""
    if not needs_states(position):
        return None
    width: Any = next(part.embed_dim for part in position.parts() if needs_states(part))
    generator = torch.Generator().manual_seed(11)
    own, others = (
        torch.randn(BATCH, side.count, width, generator=generator).double() for side in (queries, keys or queries)
    )
    return own, others


def attend_under(position: Mechanism, *tensors: Tensor, **arguments: Any) -> Tensor:
    """`relpos.attention` under a mechanism; under its terms, which are empty, if it acts on tokens alone."""
    given: Any = position
    if position.acts_on_tokens and not position.acts_in_attention:
        with pytest.raises(ValueError, match=r"embed\(\)"):
            engines.attention(*tensors, position=position, **arguments)
        given = position.terms(arguments.pop("queries"), arguments.pop("keys", None))
    if needs_states(position) and "states" not in arguments:
        arguments["states"] = states_of(position, *tensors[:2])
    output = devices.attention(*tensors, position=given, **arguments)
    assert isinstance(output, Tensor)
    return output


def gradients_of(output: Tensor, given: AttentionInputs, module: Mechanism, leaves: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of q, k, v and every parameter by name, zeros for one on which nothing depends."""
    names = ["q", "k", "v", *(f"parameter {name}" for name, _ in module.named_parameters())]
    tensors = [*leaves, *module.parameters()]
    found = torch.autograd.grad(output, tensors, given.upstream.to(output.dtype), allow_unused=True)
    return {
        name: (torch.zeros_like(x) if gradient is None else gradient).cpu()
        for name, x, gradient in zip(names, tensors, found, strict=True)
    }


def require_close(one: Tensor, other: Tensor, slack: float, what: str) -> None:
    """Assert that two tensors agree up to a relative and absolute error of `slack`; `what` opens the message."""
    __tracebackhide__ = True
    torch.testing.assert_close(one, other, rtol=slack, atol=slack, msg=lambda text: f"{what}: {text}")


def require_near(one: Tensor, other: Tensor, what: str) -> None:
    """Assert that two tensors agree up to the order of sums: about 4,000 units in the last place of 1."""
    __tracebackhide__ = True
    require_close(one, other, 2**12 * torch.finfo(one.dtype).eps, what)


def require_same_gradients(one: Tensor, other: Tensor, leaves: dict[str, Tensor], what: str) -> None:
    """Assert that two outputs and their gradients by name agree up to the order of sums."""
    __tracebackhide__ = True
    require_near(one, other, what)
    upstream = torch.randn_like(one)
    pairs = [torch.autograd.grad(x, list(leaves.values()), upstream, allow_unused=True) for x in (one, other)]
    for name, a, b in zip(leaves, *pairs, strict=True):
        assert (a is None) == (b is None), f"{what}: the gradient of {name} is missing on one side"
        if a is not None and b is not None:
            require_near(a, b, f"{what}, gradient of {name}")


def with_parameters(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """q, k, v and every parameter by name."""
    parameters = {f"parameter {name}": x for name, x in mechanism.named_parameters()}  # a parameter may be named v
    return {"q": q, "k": k, "v": v, **parameters}
