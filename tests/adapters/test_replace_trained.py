"""200 steps of training beside the published model: timm's ViT on digits, GPT-2 on bytes of text.

`recipes/replaced_trained.py` has these and the other families, and writes what they reach into docs/replace.md.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

from replaced_trained import FAMILIES, LAST, STEPS, trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "own"), [("timm's ViT", "pos_embed"), ("transformers' GPT-2", "transformer.wpe.weight")]
)
def test_it_learns_beside_the_published_model(name: str, own: str) -> None:
    family = FAMILIES[name]
    same = family.made(family.own, **family.options)
    with torch.no_grad():
        family.fill(same)
    few = list(itertools.islice(family.batches(), STEPS // 4))
    torch.testing.assert_close(trained(same, iter(few)), trained(family.made(), iter(few)), rtol=1e-6, atol=1e-6)

    model, start = family.made(family.position), family.made()
    without = trained(family.made(None), family.batches())
    replaced = trained(model, family.batches(), rate=10.0)
    assert len(replaced) == STEPS
    assert torch.isfinite(torch.tensor(replaced)).all()
    assert replaced[0] == pytest.approx(without[0]), "tables start as nothing"
    assert sum(replaced[-LAST:]) < 0.98 * sum(without[-LAST:]), "and learn where tokens are"
    assert sum(replaced[-LAST:]) < 0.8 * sum(replaced[:LAST])
    assert torch.equal(model.get_parameter(own), start.get_parameter(own)), "its own embedding is off"
