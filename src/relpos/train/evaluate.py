"""Evaluate a trained model on test data in small batches: large images in all their placements would exhaust memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos.data import ImageProbe, ImageTask, Probe, Split, Task, Text, TextProbe
from relpos.data.text import IGNORED
from relpos.train.procedure import to_device
from relpos.train.scores import scores_of

AT_ONCE = 256
_SCORES = AT_ONCE * 256**2
"""Attention map entries per head in one batch: 256 images of 256 tokens, and fewer images with more tokens."""
_TOKENS_AT_ONCE = 8192
_LOGITS_AT_ONCE = 2**26
"""Tokens, and logits of a large vocabulary, in one batch."""
QUICK_BLOCKS = 2
"""Blocks of test text in a quick comparison."""
VALIDATION_BLOCKS = 2
"""Blocks of validation text during training."""
BINS = 32
"""Segments of an input for which bits are averaged separately."""


@torch.no_grad()
def predict(
    model: nn.Module, images: Float[Tensor, "n C height width"], device: torch.device, batch_size: int = AT_ONCE
) -> Int[Tensor, " n"]:
    """The most likely class of every image, -1 if a score is nan. Leaves the model in evaluation mode."""
    model.eval()
    return torch.cat([_likeliest(scores_of(model, batch.to(device))).cpu() for batch in images.split(batch_size)])


def _likeliest(scores: Float[Tensor, "n classes"]) -> Int[Tensor, " n"]:
    return scores.argmax(dim=-1).masked_fill(scores.isnan().any(dim=-1), -1)


def _at_once(probe: ImageProbe, task: ImageTask) -> int:
    """Number of a probe's images in one batch."""
    (height, width), (rows, columns) = probe.image_size, task.patch_size
    tokens = (height // rows) * (width // columns)
    return max(1, min(AT_ONCE, _SCORES // tokens**2))


def right(
    model: nn.Module,
    task: ImageTask,
    probe: ImageProbe,
    split: Split,
    device: torch.device,
    *,
    trials: int | None = None,
) -> Bool[Tensor, "n trials"]:
    """Whether the model predicts the class of each image of a probe, in each placement.

    Args:
        trials: use the first so many placements of each image; None for all.
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


@torch.no_grad()
def classified(model: nn.Module, task: Task, split: Split, device: torch.device) -> Bool[Tensor, "n trials"]:
    """Whether the model predicts the class of each input of a split, or of each of its tokens."""
    model.eval()
    found = [
        _likeliest(scores_of(model, inputs.to(device))).cpu() == classes
        for inputs, classes in task.once(split, AT_ONCE)
    ]
    return torch.cat(found).flatten(1) if found[0].dim() > 1 else torch.cat(found)[:, None]


@torch.no_grad()
def bits(
    model: nn.Module, task: Text, probe: TextProbe, split: Split, device: torch.device, *, blocks: int | None = None
) -> Float[Tensor, "n N"]:
    """The model's cross-entropy in bits for each token of each block, in pieces of the probe's length.

    The token that begins a packed document is not text, and has none.

    Args:
        blocks: use the first so many; None for all.
    """
    model.eval()
    read, follows = (x[:blocks] for x in task.blocks(split))
    pieces, wanted = (x.reshape(-1, probe.length) for x in (read, follows))
    step = max(1, min(_TOKENS_AT_ONCE, _LOGITS_AT_ONCE // task.vocabulary) // probe.length)
    found = []
    for piece, follow in zip(pieces.split(step), wanted.split(step), strict=True):
        logits = scores_of(model, to_device(task.inputs(piece), device)).float()
        each = F.cross_entropy(logits.mT, follow.to(device), reduction="none", ignore_index=IGNORED)
        found.append(each.cpu())
    return (torch.cat(found) / torch.log(torch.tensor(2.0))).view(read.shape)


def measured(
    model: nn.Module, task: Task, probe: Probe, device: torch.device, *, quick: bool = False
) -> dict[str, Any]:
    """The model's result on the test data of a probe, as the fields of a metric in `results.json`.

    Bits that are nan or inf are None, with a reason.

    Args:
        quick: for text, only the first blocks.
    """
    if isinstance(task, Text):
        assert isinstance(probe, TextProbe)
        blocks = QUICK_BLOCKS if quick else None
        each = bits(model, task, probe, "test", device, blocks=blocks)
        sizes = task.block_bytes("test")[:blocks].double()
        if not each.isfinite().all():
            return {"bits_per_byte": None, "reason": "the model's scores are not finite there"}
        bins, per_byte = min(BINS, probe.length), sizes.mean()  # a division by 1 for bytes
        by_place, there = (x.view(-1, probe.length).mean(dim=0).view(bins, -1).mean(dim=1) for x in (each, sizes))
        return {
            "bits_per_byte": round((each.mean() / per_byte).item(), 6),
            "values": [round(value, 6) for value in (each.mean(dim=1) / per_byte).tolist()],
            "by_place": [round(value, 4) for value in (by_place / there).tolist()],
        }
    if isinstance(task, ImageTask):
        assert isinstance(probe, ImageProbe)
        hits = right(model, task, probe, "test", device)
    else:
        hits = classified(model, task, "test", device)
    return {
        "accuracy": round(hits.float().mean().item(), 6),
        "trials": hits.shape[1],
        "correct": hits.sum(dim=1).tolist(),
    }


def validated(model: nn.Module, task: Task, device: torch.device) -> float:
    """The task's metric on validation data as in training, each unit once: enough to follow training."""
    probe = task.probes[0]
    if isinstance(task, Text):
        assert isinstance(probe, TextProbe)
        each = bits(model, task, probe, "validation", device, blocks=VALIDATION_BLOCKS)
        return (each.mean() / task.block_bytes("validation")[:VALIDATION_BLOCKS].double().mean()).item()
    if not isinstance(task, ImageTask):
        return classified(model, task, "validation", device).float().mean().item()
    assert isinstance(probe, ImageProbe)
    return right(model, task, probe, "validation", device, trials=1).float().mean().item()
