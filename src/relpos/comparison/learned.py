"""The learned positions of a trained model, as plain numbers for pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.core import Grid, LineBias
from relpos.data import ImageTask, Text
from relpos.models import LanguageModel, VisionTransformer
from relpos.position import Sum
from relpos.position.base.states import needs_states
from relpos.results import Attention, Learned, Sample
from relpos.train import Model

EXAMPLES = 3
PIXELS = 112
"""Upper limit for the larger of height and width of an example's picture; more adds nothing on a page."""
SEQUENCE_POSITIONS = 64
"""How many evenly spaced positions of a sequence have their similarity stored, at most."""
TOKENS = 1024
"""With more positions no similarity is stored."""


def _rounded(x: Tensor, digits: int = 4) -> Any:
    return [_rounded(row, digits) for row in x] if x.dim() else round(x.item(), digits)


def _bias(term: LineBias, layer: str | int, *, unit: str | None) -> Learned | None:
    """A line bias over its offsets, for a text only past ones; None for more than two axes, which no picture shows."""
    layout, line = term.lines.layout, term.lines
    if len(layout.spans) > 2:
        return None
    values = term.values.detach()
    prefix = None
    if line.length == 2 * layout.tokens + line.origin + 2:
        of_prefix = [layout.tokens, layout.tokens + line.origin + 1, line.length - 1]
        prefix = _rounded(values[:, torch.tensor(of_prefix, device=values.device)])
    offsets = [[low, low + span - 1] for low, span in zip(layout.low, layout.spans, strict=True)]
    table = values[:, : layout.tokens].reshape(-1, *layout.spans)
    if unit is not None:
        table, offsets = table[:, -offsets[0][0] :], [[0, offsets[0][1]]]
    return Learned(
        "bias",
        layer=layer,
        axes=len(layout.spans),
        along="raster order" if unit is None else unit,
        offsets=offsets,
        values=_rounded(table),
        prefix=prefix,
    )


@torch.no_grad()
def learned(model: Model, unit: str = "bytes") -> list[Learned]:
    """Every line bias as a table over offsets, and the similarity of absolute positions to one another.

    Above `TOKENS` positions, similarities are left out: there is one number per pair.

    Args:
        unit: of a language model's offsets, bytes or tokens.
    """
    grid, of_text = model.coordinates, unit if isinstance(model, LanguageModel) else None
    shared = model.shared_position and model.positions.period == 1  # else the first layer of its entry is named
    entries: list[Learned] = []
    for part in model.token_position.parts() if grid.count <= TOKENS else ():
        vectors = part.embed(torch.zeros(1, grid.count, model.block_config.dim, device=part.device), grid)
        vectors = vectors[0, grid.prefix :].float()
        every = 1 if isinstance(grid, Grid) else max(1, len(vectors) // SEQUENCE_POSITIONS)
        vectors = vectors[::every]
        sizes = list(grid.sizes) if isinstance(grid, Grid) else [len(vectors)]
        centred = F.normalize(vectors - vectors.mean(dim=0), dim=-1)
        entries.append(Learned("embedding", grid=sizes, every=every, similarity=_rounded(centred @ centred.T, 3)))
    for layer, position in enumerate(model.attention_position):
        assert isinstance(position, Sum)
        for part in position.parts():
            if needs_states(part):  # one number an offset would not say what it learned
                continue
            for term in part.terms(grid).of(LineBias):
                bias = _bias(term, "shared" if shared else layer, unit=of_text)
                if bias is not None:
                    entries.append(bias)
    return entries


def _grey(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Images as grey values from 0 to 1; large ones get fewer pixels per patch."""
    grey = images.mean(dim=1)
    if max(grey.shape[1:]) > PIXELS:
        pixels = max(1, PIXELS // max(grid))
        grey = F.interpolate(grey[:, None], size=[count * pixels for count in grid], mode="area")[:, 0]
    low, high = grey.amin(), grey.amax()
    return (grey - low) / (high - low).clamp(min=1e-6)  # images may all have one colour


@torch.no_grad()
def attention_over_examples(model: VisionTransformer, task: ImageTask) -> Attention:
    """Attention of the middle patch, in every layer and head, over a few test images of different classes."""
    labels = task.labels("test")
    there = labels.unique()
    wanted = there[torch.linspace(0, len(there) - 1, EXAMPLES + 2).round().long()[1:-1]]
    if len(there) < EXAMPLES + 2:  # too few to be spread over
        wanted = there[:EXAMPLES]
    chosen = [int((labels == label).nonzero()[0]) for label in wanted]
    batch = torch.cat([task.examples(task.probes[0], "test", slice(one, one + 1))[0][:, 0] for one in chosen])
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
    return Attention(
        image=_rounded(_grey(batch, (rows, columns)), 3),
        label=[task.classes[label] for label in labels[chosen].tolist()],
        predicted=[task.classes[label] for label in model(batch.to(device)).argmax(dim=-1).tolist()],
        query=list(query),
        grid=[rows, columns],
        maps=_rounded(stacked),
    )


PROMPT, WRITTEN = 64, 320
"""Tokens that a language model is given, and tokens that it writes; together they exceed the trained length."""


@torch.no_grad()
def sample(model: LanguageModel, task: Text) -> Sample:
    """Let the model continue the beginning of a test block, greedily, so that the result is reproducible.

    Beyond the trained length it uses its first growth rule, or stops if it has none.
    """
    device = next(model.parameters()).device
    prompt = task.blocks("test")[0][:1, :PROMPT].to(device)
    whole = model.generate(prompt, task.length - PROMPT, temperature=0.0)
    if rules := model.growth():
        grown = model.grow(PROMPT + WRITTEN, rules[0])
        whole = grown.generate(whole, PROMPT + WRITTEN - task.length, temperature=0.0)
    whole = whole[0]
    parts = {"prompt": whole[:PROMPT], "within": whole[PROMPT : task.length], "beyond": whole[task.length :]}
    return Sample(**{name: task.decode(part.tolist()) for name, part in parts.items()})
