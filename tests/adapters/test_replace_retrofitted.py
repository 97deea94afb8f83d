"""`replace_position` and `retrofit` on one model, in either order."""

import copy
import pickle
from typing import Any

import pytest
import torch
from replaced_models import FAMILIES, swin, t5
from torch import nn

import relpos
from relpos.adapters.replacements.repositioned import Repositioned, is_retrofitted

pytestmark = pytest.mark.usefixtures("unchecked")
SERVED_BY_BOTH = ["T5", "BEiT", "Swin"]


class Two(nn.Module):
    """Two models in one."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second


@pytest.mark.parametrize("name", SERVED_BY_BOTH)
def test_a_retrofitted_model_is_restored_first(name: str) -> None:
    family = FAMILIES[name]
    wanted, plain = family.called(family.replaced()), family.published()
    expected = family.called(plain)
    model = family.published()
    relpos.retrofit(model, verify=False, border=0)
    retrofitted = [key for key, module in model.named_modules() if is_retrofitted(module)]
    assert retrofitted
    own = relpos.replace_position(model, "own")
    assert own.restored == ()
    assert [key for key, module in model.named_modules() if is_retrofitted(module)] == retrofitted
    report = relpos.replace_position(model, family.position, init_std=0.5, **family.options)
    assert report.restored == tuple(retrofitted)
    assert f"  restored  {len(retrofitted)} retrofitted modules, from {retrofitted[0]}" in str(report)
    assert not any(map(is_retrofitted, model.modules()))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(family.called(one), wanted)
    relpos.restore(model)
    assert torch.equal(family.called(model), expected)


@pytest.mark.parametrize("name", SERVED_BY_BOTH)
def test_what_was_replaced_is_nothing_to_retrofit(name: str) -> None:
    family = FAMILIES[name]
    model = family.replaced()
    before = family.called(model)
    with pytest.raises(ValueError, match=r"relpos\.retrofit supports; got .*already relpos's, by replace_position"):
        relpos.retrofit(model, border=0)
    assert torch.equal(family.called(model), before)


def test_what_was_not_replaced_is_retrofitted_beside_it() -> None:
    first, second = t5().eval(), swin()
    both, family = Two(first, second), FAMILIES["T5"]
    relpos.replace_position(first, "alibi")
    wanted, images = family.called(first), FAMILIES["Swin"].inputs()["x"]
    published = second(images)
    report = relpos.retrofit(both, border=0)
    assert report.verified
    assert all(one.module.startswith("second") for one in (*report.replaced, *report.verified))
    assert {one.reason for one in report.left} == {"its position is already relpos's, by replace_position"}
    assert all(one.module.startswith("first") for one in report.left)
    assert torch.equal(family.called(first), wanted)
    torch.testing.assert_close(second(images), published)
    assert any(isinstance(module, Repositioned) for module in first.modules())
    relpos.restore(both)
    assert not any(is_retrofitted(module) or isinstance(module, Repositioned) for module in both.modules())


def test_a_retrofit_that_fails_leaves_what_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from relpos.adapters import retrofitting

    replaced, other = FAMILIES["T5"].replaced(), FAMILIES["BEiT"].published()
    both = Two(replaced, other)
    before, published = FAMILIES["T5"].called(replaced), FAMILIES["BEiT"].called(other)

    def disagrees(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(retrofitting, "verify_model", disagrees)
    with pytest.raises(RuntimeError, match="planted"):
        relpos.retrofit(both, border=0)
    assert torch.equal(FAMILIES["T5"].called(replaced), before)
    assert torch.equal(FAMILIES["BEiT"].called(other), published)
    assert not any(map(is_retrofitted, both.modules()))
