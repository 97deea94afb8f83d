"""A module like any other: state dict, casts, autocast, the same bits on every run, and its preset."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import Terms
from relpos.position import Preset, Site, find
from relpos.position.base.saved_settings import is_settings
from relpos.position.base.states import needs_states
from relpos.testing.base import SuiteBase
from relpos.testing.calls import BATCH, WIDTH, attend_under, gradients_of, make_inputs, states_of, terms_of_case
from relpos.testing.cases import SuiteCase


class ModuleTests(SuiteBase):
    """The mechanism as a module, its structure under casts, and how it is offered."""

    def fitting(self, test: str) -> list[SuiteCase]:
        """A preset serves tokens that are queries and keys at once."""
        if test == "test_preset":
            return [case for case in self.cases() if case.keys is None and not case.irregular]
        return super().fitting(test)

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """The preset, if one is named."""
        return {**super().asked(), "test_preset": cls.preset is not None and bool(cls().fitting("test_preset"))}

    def test_state_dict_round_trip(self, case: SuiteCase) -> None:
        """A module that loads its state dict is the same; that holds only parameters and declared settings."""
        mechanism = self.made(case)
        torch.manual_seed(99)
        other = self.at(case.queries, case.keys, case.heads)
        assert list(other.state_dict()) == list(mechanism.state_dict())
        other.load_state_dict(copy.deepcopy(mechanism.state_dict()), strict=True)
        given = make_inputs(case, torch.float32)
        first, second = (
            attend_under(each, given.q, given.k, given.v, queries=case.queries, keys=case.keys)
            for each in (mechanism, other)
        )
        assert torch.equal(first, second), "attention differs after the state dict was loaded into a second module"
        weights = {name for name in mechanism.state_dict() if not is_settings(name)}
        assert {name for name, _ in mechanism.named_parameters()} == weights, (
            "what is no parameter is computed, or named in saved_settings"
        )

    def test_every_parameter_matters(self) -> None:
        """Each parameter has a gradient in some case: what no case reaches, no other test can find wrong."""
        idle: set[str] | None = None
        for case in self.cases():
            mechanism, given = self.made(case), make_inputs(case, torch.float32)
            x = torch.randn(BATCH, case.queries.count, case.heads * WIDTH)
            attended = attend_under(mechanism, given.q, given.k, given.v, queries=case.queries, keys=case.keys)
            total = (attended * given.upstream).sum() + mechanism.embed(x, case.queries).square().sum()
            named = {name: one for name, one in mechanism.named_parameters() if one.requires_grad}
            used = named and total.requires_grad
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True) if used else [None] * len(named)
            still = {name for name, slope in zip(named, found, strict=True) if slope is None or not slope.any()}
            idle = still if idle is None else idle & still
            if not idle:
                return
        assert not idle, (
            f"{', '.join(sorted(idle or ()))} had no gradient in any case, so that no test can find it wrong; if "
            "it acts farther away than 13 tokens, return more cases: [*super().cases(), SuiteCase('far', Sequence(40))]"
        )

    def test_the_same_on_every_run(self, case: SuiteCase) -> None:
        """Bit for bit, values and gradients."""
        results = []
        for _ in range(2):
            mechanism, given = self.made(case), make_inputs(case, torch.float32)
            leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
            output = attend_under(mechanism, *leaves, queries=case.queries, keys=case.keys)
            results.append({"output": output, **gradients_of(output, given, mechanism, leaves)})
        for name in results[0]:
            assert torch.equal(results[0][name], results[1][name]), f"two runs differ in {name}"

    def test_structure_survives_a_cast(self, case: SuiteCase) -> None:
        """Cast to bfloat16, only learned numbers are rounded: all else in the terms stays as it was."""
        mechanism = self.made(case)
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter.copy_(parameter.bfloat16())  # so that the cast itself loses nothing
        before = _leaves(terms_of_case(mechanism, case.queries, case.keys))
        after = _leaves(terms_of_case(copy.deepcopy(mechanism).to(torch.bfloat16), case.queries, case.keys))
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype, (
                    f"terms in {a.dtype} became {b.dtype}; compute them from relpos.at_least_float32(parameter)"
                )
                assert torch.equal(a, b), (
                    "terms were rounded by a cast that rounds no parameter; compute them from "
                    "relpos.at_least_float32(parameter)"
                )

    def test_float64_is_not_rounded(self, case: SuiteCase) -> None:
        """In float64 the terms depend on digits of every used parameter that float32 would round away."""
        mechanism = self.made(case, torch.float64)
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter.copy_(parameter.bfloat16())
        own = dict(mechanism.named_parameters())
        learned = _learned(terms_of_case(mechanism, case.queries, case.keys))
        before = [x.detach().clone() for x in learned]  # a term may be a parameter itself
        total = torch.stack([x.sum() for x in learned]).sum() if learned else torch.zeros((), requires_grad=True)
        slopes = torch.autograd.grad(total, list(own.values()), allow_unused=True) if own else ()
        for (name, parameter), slope in zip(own.items(), slopes, strict=True):
            if slope is None or not (slope * parameter).any():
                continue
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.mul_(1 + 2**-27)  # float32 rounds this away
            after = _learned(terms_of_case(mechanism, case.queries, case.keys))
            assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
                f"in float64, terms round {name} to float32; compute them from relpos.at_least_float32({name}), which "
                f"leaves float64 as it is, and not from {name}.float()"
            )
            with torch.no_grad():
                parameter.copy_(kept)

    def test_terms_do_not_heed_autocast(self, case: SuiteCase) -> None:
        """Under autocast the terms are the same numbers."""
        mechanism = self.made(case)
        plain = _leaves(terms_of_case(mechanism, case.queries, case.keys))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = _leaves(terms_of_case(mechanism, case.queries, case.keys))
        for a, b in zip(plain, cast, strict=True):
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype, f"terms in {a.dtype} become {b.dtype} under autocast"
                assert torch.equal(a, b), "terms are other numbers under autocast"

    def test_autocast_is_a_cast_of_q_k_v(self, case: SuiteCase) -> None:
        """Under autocast the output is, bit for bit, that of q, k and v in bfloat16."""
        mechanism, given = self.made(case), make_inputs(case, torch.float32)
        arguments: dict[str, Any] = {"queries": case.queries, "keys": case.keys}
        if needs_states(mechanism):
            arguments["states"] = states_of(mechanism, given.q, given.k)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = attend_under(mechanism, given.q, given.k, given.v, **arguments)
        own = attend_under(mechanism, *(x.bfloat16() for x in (given.q, given.k, given.v)), **arguments)
        assert cast.dtype == torch.bfloat16
        assert torch.equal(cast, own), "autocast to bfloat16 differs from q, k and v in bfloat16"

    def test_preset(self, case: SuiteCase) -> None:
        """The preset builds the mechanism for queries and keys that are the same tokens, and it serves them."""
        assert self.preset is not None
        preset = self.preset if isinstance(self.preset, Preset) else find(self.preset)
        if case.axes not in preset.token_axes:
            return
        usual = preset.make(Site(case.heads, WIDTH, case.heads * WIDTH, case.queries, causal=self.causal))
        assert type(usual) is type(self.made(case))
        given = make_inputs(case, torch.float32)
        attend_under(usual, given.q, given.k, given.v, queries=case.queries)
        x = torch.randn(BATCH, case.queries.count, case.heads * WIDTH)
        assert usual.embed(x, case.queries).shape == x.shape
        for name in ("title", "summary", "source"):
            assert getattr(preset, name), f"the preset {preset.name} has no {name}"


def _learned(terms: Terms) -> list[Tensor]:
    return [x for x in _leaves(terms) if isinstance(x, Tensor) and x.requires_grad]


def _leaves(terms: Terms) -> list[Any]:
    return pytree.tree_leaves(terms)
