"""80 or 50 steps of training beside the published model: timm's ViT on digits, GPT-2 on bytes of text.

`recipes/replaced_trained.py` has these and the other families, trains them longer, and writes what they reach into
docs/replace.md.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import replaced_trained
from replaced_trained import FAMILIES, LAST, Batch, trained

pytestmark = pytest.mark.slow
RATE = 1e-2  # higher than the recipe's, so that few steps show what is learned
MECHANISM = 30.0  # times that


@pytest.mark.parametrize(
    ("name", "own", "steps"), [("timm's ViT", "pos_embed", 80), ("transformers' GPT-2", "transformer.wpe.weight", 50)]
)
def test_it_learns_beside_the_published_model(name: str, own: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]

    def batches(count: int) -> Iterator[Batch]:
        return itertools.islice(family.batches(), count)

    same = family.made(family.own, **family.options)
    with torch.no_grad():
        family.fill(same)
    torch.testing.assert_close(trained(same, batches(10)), trained(family.made(), batches(10)), rtol=1e-6, atol=1e-6)

    monkeypatch.setattr(replaced_trained, "RATE", RATE)
    model, start = family.made(family.position), family.made()
    without = trained(family.made(None), batches(steps))
    replaced = trained(model, batches(steps), rate=MECHANISM)
    assert len(replaced) == steps
    assert torch.isfinite(torch.tensor(replaced)).all()
    assert replaced[0] == pytest.approx(without[0]), "tables start as nothing"
    assert sum(replaced[-LAST:]) < 0.98 * sum(without[-LAST:]), "and learn where tokens are"
    assert sum(replaced[-LAST:]) < 0.95 * sum(replaced[:LAST])
    assert torch.equal(model.get_parameter(own), start.get_parameter(own)), "its own embedding is off"
