"""The Swin Transformer of a comparison on images."""

from __future__ import annotations

import pytest
import torch

from relpos.data import find_task
from relpos.train import ImageRecipe, build_swin


@pytest.mark.parametrize("position", ["own", "none", "learned+relative_2d", "rotary_2d"])
def test_it_takes_the_images_of_a_task(position: str) -> None:
    task = find_task("digits")
    model = build_swin(position, task)
    images, labels = next(task.batches(8, 0))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    assert [window.sizes for window in model.windows] == [(4, 4), (4, 4)]
    groups = ImageRecipe().groups(model)
    assert {id(x) for group in groups for x in group["params"]} == {id(x) for x in model.parameters()}
    owned = {id(x) for x in model.position_parameters()}
    assert owned == {id(x) for group in groups if group["multiplier"] > 1 for x in group["params"]}


def test_text_has_no_windows() -> None:
    with pytest.raises(ValueError, match=r"expected images for a Swin Transformer; got the task 'text'\. "):
        build_swin("none", find_task("text"))
