"""200 steps of training beside the published model: timm's ViT on digits, GPT-2 on bytes of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

import relpos
from relpos.adapters.libraries import imported

pytestmark = [pytest.mark.usefixtures("timm"), pytest.mark.slow]
STEPS = 200


def vit() -> Any:
    torch.manual_seed(0)
    model = imported("timm").models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    return model.double()


def gpt2() -> Any:
    transformers = imported("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout)).double()


def _digits() -> Iterator[Callable[[Any], Tensor]]:
    data = load_digits()
    pixels, labels = torch.from_numpy(data.images / 8 - 1)[:, None], torch.from_numpy(data.target)
    for step in range(STEPS):
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:32]
        yield lambda model, rows=rows: F.cross_entropy(model(pixels[rows]), labels[rows])


def _bytes() -> Iterator[Callable[[Any], Tensor]]:
    text = torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    for step in range(STEPS):
        starts = torch.randint(len(text) - 32, (16, 1), generator=torch.Generator().manual_seed(step))
        ids = text[starts + torch.arange(32)].long()
        yield lambda model, ids=ids: model(ids, labels=ids).loss


def trained(model: Any, batches: Iterator[Callable[[Any], Tensor]], rate: float = 1.0) -> list[float]:
    """The loss of every step; mechanisms learn at `rate` times the rate of the rest."""
    model.train()
    learning = {name: x for name, x in model.named_parameters() if x.requires_grad}
    mechanisms = [x for name, x in learning.items() if "positions." in name]
    rest = [x for name, x in learning.items() if "positions." not in name]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 3e-3}, {"params": mechanisms, "lr": 3e-3 * rate}])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = batch(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(losses) == STEPS
    return losses


@pytest.mark.parametrize(
    ("build", "batches", "position", "own"),
    [(vit, _digits, "relative_2d", "pos_embed"), (gpt2, _bytes, "relative_1d", "transformer.wpe.weight")],
    ids=["timm ViT on digits", "GPT-2 on bytes"],
)
def test_it_learns_beside_the_published_model(build: Any, batches: Any, position: str, own: str) -> None:
    published = build()
    losses = trained(published, batches())
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])

    same = build()
    relpos.replace_position(same, "learned")
    holder = getattr(same, "transformer", same)
    with torch.no_grad():
        holder.positions[0].mechanisms[0].pos_embed.copy_(same.get_parameter(own))
    torch.testing.assert_close(trained(same, batches()), losses, rtol=1e-6, atol=1e-6)

    model, start, bag = build(), build(), build()
    relpos.replace_position(bag, None)
    without = trained(bag, batches())
    relpos.replace_position(model, position)
    replaced = trained(model, batches(), rate=10.0)
    assert torch.isfinite(torch.tensor(replaced)).all()
    assert replaced[0] == pytest.approx(without[0]), "tables start as nothing"
    assert sum(replaced[-20:]) < 0.98 * sum(without[-20:]), "and learn where tokens are"
    assert sum(replaced[-20:]) < 0.8 * sum(replaced[:20])
    assert torch.equal(model.get_parameter(own), start.get_parameter(own)), "its own embedding is off"
