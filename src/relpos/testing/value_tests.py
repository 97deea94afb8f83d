"""Values and gradients: attention under the mechanism and what it adds to tokens, against the oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from relpos.position import Mechanism
from relpos.testing.base import SuiteBase, SuiteRun
from relpos.testing.calls import (
    BATCH,
    WIDTH,
    AttentionInputs,
    attend_under,
    gradients_of,
    make_inputs,
    require_close,
)
from relpos.testing.cases import SuiteCase
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import assert_close, rms, yardstick_dtype


class ValueTests(SuiteBase):
    """Values and gradients in every engine and dtype."""

    def fitting(self, test: str) -> list[SuiteCase]:
        """Numerical derivatives are taken of short cases."""
        if test == "test_gradcheck":
            return [case for case in self.cases() if case.queries.count <= 13]
        return super().fitting(test)

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Numerical derivatives where a case is short."""
        return {**super().asked(), "test_gradcheck": bool(cls().fitting("test_gradcheck"))}

    def test_values_and_gradients(self, run: SuiteRun) -> None:
        """The output and the gradients of q, k, v and every parameter."""
        case, dtype = run.case, run.dtype
        keys = case.queries if case.keys is None else case.keys
        given, mechanism = make_inputs(case, dtype), self.made(case, dtype)
        leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
        output = self.attend(run.engine, *leaves, position=mechanism, queries=case.queries, keys=case.keys)
        if output is None:
            return
        assert output.dtype == dtype, f"the output is {output.dtype}, q, k and v are {dtype}"
        found = {"output": output, **gradients_of(output, given, mechanism, leaves)}

        def by_loops(wide: torch.dtype) -> dict[str, Tensor]:
            own, twin = given.to(wide), copy.deepcopy(mechanism).cpu().to(wide)
            q, k, v = leaves = [x.detach().requires_grad_() for x in (own.q, own.k, own.v)]
            output = self.oracle_attention(twin, q, k, v, case.queries, keys, None)
            return {"output": output, **gradients_of(output, own, twin, leaves)}

        exact, cost = by_loops(torch.float64), in_orders(lambda: by_loops(yardstick_dtype(dtype)))
        self.compared(run, mechanism, found, exact)
        size = max(rms(exact[name]) for name in exact if name != "output")
        for name, actual in found.items():
            what, terms = ("output", 0.0) if name == "output" else (f"gradient of {name}", size)
            assert_close(actual, exact[name], cost[name], what=f"{what} ({run})", terms=terms, dtype=dtype)

    def test_embedding(self, case: SuiteCase) -> None:
        """What is added to tokens, and its gradients."""
        mechanism = self.made(case, torch.float64)
        x = torch.randn(BATCH, case.queries.count, case.heads * WIDTH, dtype=torch.float64, requires_grad=True)
        twin = copy.deepcopy(mechanism)
        ours, theirs = mechanism.embed(x, case.queries), self.oracle_embed(twin, x, case.queries)
        require_close(ours, theirs, 1e-14, "tokens with their position")
        changes = not torch.equal(ours, x)
        assert mechanism.acts_on_tokens == changes, f"acts_on_tokens is {mechanism.acts_on_tokens}; changed: {changes}"
        if not mechanism.acts_on_tokens:
            return
        upstream = torch.randn_like(ours)
        mine = torch.autograd.grad(ours, [x, *mechanism.parameters()], upstream, allow_unused=True)
        other = torch.autograd.grad(theirs, [x, *twin.parameters()], upstream, allow_unused=True)
        names = ["tokens", *(name for name, _ in mechanism.named_parameters())]
        for name, a, b in zip(names, mine, other, strict=True):
            if b is None:
                assert a is None or not a.any(), f"gradient of {name}: the oracle has none"
            else:
                assert a is not None, f"gradient of {name}: missing"
                require_close(a, b, 1e-14, f"gradient of {name}")

    def test_gradcheck(self, case: SuiteCase) -> None:
        """Numerical derivatives of attention with respect to every parameter, in float64."""
        mechanism = self.made(case, torch.float64)
        parameters = dict(mechanism.named_parameters())
        if not parameters or not mechanism.acts_in_attention:
            return
        given = make_inputs(case, torch.float64, batch=1)

        def run(*values: Tensor) -> Any:
            swapped = {f"own.{name}": x for name, x in zip(parameters, values, strict=True)}
            return torch.func.functional_call(AttentionOfCase(mechanism), swapped, (given, case))

        leaves = [x.detach().clone().requires_grad_() for x in parameters.values()]
        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


class AttentionOfCase(torch.nn.Module):
    """Attention under a mechanism as a module, so that `functional_call` can swap the mechanism's parameters."""

    def __init__(self, own: Mechanism) -> None:
        super().__init__()
        self.own = own

    def forward(self, given: AttentionInputs, case: SuiteCase) -> Tensor:
        """The output in the reference."""
        return attend_under(
            self.own, given.q, given.k, given.v, queries=case.queries, keys=case.keys, backend="reference"
        )
