"""What a trained model says of images, a few at a time: large images, all their placements at once, fill any memory."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos.data import Probe, Split, Task

AT_ONCE = 256
_SCORES = AT_ONCE * 256**2
"""Entries of an attention map that are held at once, a head: 256 images of 256 tokens, and fewer of more."""


@torch.no_grad()
def predict(
    model: nn.Module, images: Float[Tensor, "n C height width"], device: torch.device, batch_size: int = AT_ONCE
) -> Int[Tensor, " n"]:
    """The most likely class of every image; the model is left in evaluation mode."""
    model.eval()
    return torch.cat([model(batch.to(device)).argmax(dim=-1).cpu() for batch in images.split(batch_size)])


def _at_once(probe: Probe, task: Task) -> int:
    """How many images of a probe are looked at together."""
    (height, width), (rows, columns) = probe.image_size, task.patch_size
    tokens = (height // rows) * (width // columns)
    return max(1, min(AT_ONCE, _SCORES // tokens**2))


def right(
    model: nn.Module, task: Task, probe: Probe, split: Split, device: torch.device, *, trials: int | None = None
) -> Bool[Tensor, "n trials"]:
    """Whether the model names the class of each image of a probe, in each placement.

    Args:
        trials: how many placements of each image, the first ones; None for all.
    """
    trials = probe.trials if trials is None else trials
    at_once = _at_once(probe, task)
    step = max(1, at_once // trials)
    found = []
    for start in range(0, len(task.labels(split)), step):
        images, labels = task.examples(probe, split, slice(start, start + step))
        named = predict(model, images[:, :trials].flatten(0, 1), device, at_once)
        found.append(named.unflatten(0, (-1, trials)) == labels[:, None])
    return torch.cat(found)
