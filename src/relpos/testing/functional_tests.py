"""Given parameters: `terms_from` makes a mechanism's terms with other numbers, and leaves the mechanism as it is."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import Terms
from relpos.position import Mechanism
from relpos.testing.base import SuiteBase
from relpos.testing.calls import terms_of_case
from relpos.testing.cases import SuiteCase


class FunctionalTests(SuiteBase):
    """The mechanism as a function of its parameters."""

    def test_terms_from_its_own_parameters(self, case: SuiteCase) -> None:
        """They equal its terms bit for bit, with the same gradients; so do terms from no tensors."""
        mechanism = self.made(case)
        own: dict[str, Tensor] = dict(mechanism.named_parameters())
        for tensors in ({}, own):
            wanted = terms_of_case(mechanism, case.queries, case.keys)
            found = terms_of_case(mechanism, case.queries, case.keys, tensors)
            _require_equal(found, wanted, f"terms from {'its own parameters' if tensors else 'no tensors'}")
            _require_equal_gradients(found, own, wanted, own)

    def test_terms_from_other_numbers(self, case: SuiteCase) -> None:
        """All at once, each parameter alone, and in half precision, terms and gradients equal those of a copy that has
        loaded the numbers. Gradients reach the tensors. The mechanism is unchanged."""
        mechanism = self.made(case)
        own: dict[str, Tensor] = dict(mechanism.named_parameters())
        before = {name: x.detach().clone() for name, x in own.items()}
        wanted = terms_of_case(mechanism, case.queries, case.keys)
        other = {name: (x.detach() * 0.75 + 0.125).requires_grad_() for name, x in own.items()}
        half = {name: x.detach().bfloat16().requires_grad_() for name, x in other.items()}
        for tensors in (other, half, *({name: x} for name, x in other.items())):
            twin = copy.deepcopy(mechanism)
            if tensors is half:
                twin = twin.to(torch.bfloat16)
            loaded = dict(twin.named_parameters())
            with torch.no_grad():
                for name, x in tensors.items():
                    loaded[name].copy_(x)
            found = terms_of_case(mechanism, case.queries, case.keys, tensors)
            expected = terms_of_case(twin, case.queries, case.keys)
            _require_equal(found, expected, f"terms from other numbers for {', '.join(tensors)}")
            _require_equal_gradients(found, tensors, expected, {name: loaded[name] for name in tensors})
        _require_untouched(mechanism, own, before)
        _require_equal(terms_of_case(mechanism, case.queries, case.keys), wanted, "its own terms afterwards")


def _require_equal(found: Terms, wanted: Terms, what: str) -> None:
    """Assert that terms are the same bit for bit."""
    __tracebackhide__ = True
    ours, structure = pytree.tree_flatten(found)
    theirs, expected = pytree.tree_flatten(wanted)
    assert len(ours) == len(theirs), f"{what}: {structure} instead of {expected}"
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor)
            assert a.dtype == b.dtype, f"{what}: {a.dtype} instead of {b.dtype}"
            assert torch.equal(a, b), f"{what}: other numbers in {structure}"


def _require_equal_gradients(
    found: Terms, tensors: dict[str, Tensor], wanted: Terms, parameters: dict[str, Tensor]
) -> None:
    """Assert that the gradients of learned tensors in the terms are the same bit for bit."""
    __tracebackhide__ = True
    both = ((found, tensors), (wanted, parameters))
    ours, theirs = (_gradients(terms, list(leaves.values())) for terms, leaves in both)
    for name, a, b in zip(tensors, ours, theirs, strict=True):
        assert (a is None) == (b is None), f"the gradient of {name} is missing on one side"
        assert a is None or b is None or torch.equal(a, b), f"the gradient of {name} differs"


def _gradients(terms: Terms, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of a weighted sum of all learned tensors in the terms."""
    torch.default_generator.manual_seed(5)
    learned = [x for x in pytree.tree_leaves(terms) if isinstance(x, Tensor) and x.requires_grad]
    if not learned or not leaves:
        return tuple(None for _ in leaves)
    return torch.autograd.grad(learned, leaves, [torch.randn_like(x) for x in learned], allow_unused=True)


def _require_untouched(mechanism: Mechanism, own: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Assert that a mechanism has its original parameters, with their numbers and no gradients."""
    __tracebackhide__ = True
    now = dict(mechanism.named_parameters())
    assert list(now) == list(own)
    for name, x in now.items():
        assert x is own[name], f"{name} is another tensor after terms_from"
        assert torch.equal(x, before[name]), f"{name} has other numbers after terms_from"
        assert x.grad is None, f"{name} has a gradient after terms_from"
