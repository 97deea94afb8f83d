"""What a trained model's positions became, as plain numbers for pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.core import Grid, LineBias
from relpos.data import Task
from relpos.models import VisionTransformer
from relpos.position import Sum
from relpos.train import trained_grid

EXAMPLES = 3


def _rounded(x: Tensor, digits: int = 4) -> Any:
    return [_rounded(row, digits) for row in x] if x.dim() else round(x.item(), digits)


def _bias(term: LineBias, layer: str | int) -> dict[str, Any] | None:
    """A line bias over its offsets; None for more than two axes, which no picture shows."""
    layout, line = term.lines.layout, term.lines
    if len(layout.spans) > 2:
        return None
    values = term.values.detach()
    prefix = None
    if line.length == 2 * layout.tokens + line.origin + 2:
        places = torch.tensor([layout.tokens, layout.tokens + line.origin + 1, line.length - 1], device=values.device)
        prefix = _rounded(values[:, places])
    return {
        "kind": "bias",
        "layer": layer,
        "axes": len(layout.spans),
        "offsets": [[low, low + span - 1] for low, span in zip(layout.low, layout.spans, strict=True)],
        "values": _rounded(values[:, : layout.tokens].reshape(-1, *layout.spans)),
        "prefix": prefix,
    }


@torch.no_grad()
def learned(model: VisionTransformer) -> list[dict[str, Any]]:
    """Every line bias as a table over offsets, and every absolute position's similarity to the others."""
    grid = trained_grid(model)
    found: list[dict[str, Any]] = []
    for part in model.token_position.parts():
        vectors = part.embed(torch.zeros(1, grid.count, model.norm.normalized_shape[0], device=part.device), grid)
        places = vectors[0, grid.prefix :].float()
        centred = F.normalize(places - places.mean(dim=0), dim=-1)
        found.append({"kind": "embedding", "grid": list(grid.sizes), "similarity": _rounded(centred @ centred.T, 3)})
    for layer, position in enumerate(model.attention_position):
        assert isinstance(position, Sum)
        for part in position.parts():
            for term in part.terms(grid).of(LineBias):
                entry = _bias(term, "shared" if model.shared_position else layer)
                if entry is not None:
                    found.append(entry)
    return found


@torch.no_grad()
def attention_over_examples(model: VisionTransformer, task: Task) -> dict[str, Any]:
    """Attention of the patch in the middle, in every layer and head, over a few test images of different classes."""
    probe = task.probes[0]
    images, labels = task.examples(probe, "test")
    wanted = torch.linspace(0, len(task.classes) - 1, EXAMPLES + 2).round().long()[1:-1]
    chosen = [int((labels == label).nonzero()[0]) for label in wanted]
    batch = images[chosen, 0]
    grid = Grid(*model.patch_embed.grid_size, prefix=model.prefix)
    rows, columns = model.patch_embed.grid_size
    query = (rows // 2, columns // 2)
    token = grid.prefix + query[0] * columns + query[1]
    device = next(model.parameters()).device
    model.eval()
    maps = [
        weights[:, :, token, grid.prefix :].float().unflatten(-1, (rows, columns)).cpu()
        for weights in model.attention_maps(batch.to(device))
    ]
    stacked = torch.stack(maps, dim=1)  # [image, layer, head, row, column]
    grey = batch.mean(dim=1)
    low, high = grey.amin(), grey.amax()
    return {
        "image": _rounded((grey - low) / (high - low), 3),
        "label": [task.classes[label] for label in labels[chosen].tolist()],
        "predicted": [task.classes[label] for label in model(batch.to(device)).argmax(dim=-1).tolist()],
        "query": list(query),
        "grid": [rows, columns],
        "maps": _rounded(stacked),
    }
