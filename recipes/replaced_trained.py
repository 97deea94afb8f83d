"""200 steps of training for every family that `replace_position` serves, beside the published model.

    python recipes/replaced_trained.py          a few minutes on one core; writes the table of docs/replace.md

Small models in float64 and training mode without dropout: images are handwritten digits, texts are bytes of Python's
documentation. Each is trained four times from the same weights on the same batches: as published; with a mechanism that
says what it knew itself, which must give the same losses, until training magnifies their rounding; without position;
and with another mechanism, at ten times the rate of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import relpos
from relpos.adapters.common.libraries import imported

PAGE = Path(__file__).parents[1] / "docs" / "replace.md"
HEAD = (
    "| model | first 20 | last 20 | own position by relpos: difference in the first 20, in all | without | another |\n"
    "|---|---|---|---|---|---|"
)
STEPS, LAST, RATE = 200, 20, 3e-3
LENGTH, MASK = 32, 256
"""Bytes of a text, and the token that hides one."""
Batch = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Family:
    """A small model of others, and how it is trained.

    Attributes:
        build: the model with its own random weights. batches: of training, each from a model to a loss.
        position: another mechanism.
        own: the mechanism that says what the model knew itself, None where it knew nothing; `fill` copies what it
            starts from. options: further arguments of `replace_position` for it. always: those of every replacement.
    """

    build: Callable[[], Any]
    batches: Callable[[], Iterator[Batch]]
    position: str
    own: Any = None
    fill: Callable[[Any], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    always: dict[str, Any] = field(default_factory=dict)

    def made(self, position: Any = "own", **options: Any) -> Any:
        """The model, the same at every call but for its position."""
        torch.manual_seed(0)
        model = self.build().double()
        relpos.replace_position(model, position, **self.always, **options)
        return model.train()


def digits(classify: Callable[[Any, Tensor], Tensor]) -> Iterator[Batch]:
    """Cross-entropy of 32 digits of 8 x 8 pixels."""
    data = load_digits()
    pixels, labels = torch.from_numpy(data.images / 8 - 1)[:, None], torch.from_numpy(data.target)
    for step in range(STEPS):
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:32]
        yield lambda model, rows=rows: F.cross_entropy(classify(model, pixels[rows]), labels[rows])


def texts(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Iterator[Batch]:
    """A loss on 16 texts of 32 bytes, and on numbers between 0 and 1 for each byte."""
    text = torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=generator)
        ids, chance = text[starts + torch.arange(LENGTH)].long(), torch.rand(16, LENGTH, generator=generator)
        yield lambda model, ids=ids, chance=chance: loss(model, ids, chance)


def images() -> Iterator[Batch]:
    return digits(lambda model, x: getattr(out := model(x), "logits", out))


def following() -> Iterator[Batch]:
    """The next byte."""
    return texts(lambda model, ids, _: model(ids, labels=ids).loss)


def hidden() -> Iterator[Batch]:
    """The bytes that are hidden, 15 in a hundred."""

    def loss(model: Any, ids: Tensor, chance: Tensor) -> Tensor:
        scores = getattr(out := model(ids.masked_fill(chance < 0.15, MASK)), "logits", out)
        return F.cross_entropy(scores[chance < 0.15], ids[chance < 0.15])

    return texts(loss)


def answered() -> Iterator[Batch]:
    """The second half of a text from its first."""
    half = LENGTH // 2
    return texts(lambda model, ids, _: model(input_ids=ids[:, :half], labels=ids[:, half:].contiguous()).loss)


class Bytes(nn.Module):
    """`nn.TransformerEncoder` between an embedding of bytes and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 32), nn.Linear(32, 257)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(ids)))
        return scores


def of_timm(path: str, **settings: Any) -> Callable[[], Any]:
    """A vision transformer of timm for digits."""
    file, _, name = path.partition(".")
    sizes = {"img_size": 8, "in_chans": 1, "num_classes": 10, **settings}
    return lambda: getattr(getattr(imported("timm").models, file), name)(**sizes)


def of_transformers(kind: str, config: str, **settings: Any) -> Callable[[], Any]:
    """A model of transformers."""

    def build() -> Any:
        transformers = imported("transformers")
        return getattr(transformers, kind)(getattr(transformers, config)(**settings))

    return build


def vectors(of: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    """Copies an embedding of positions."""

    def fill(model: Any) -> None:
        holder = next(one for one in model.modules() if "positions" in one._modules)
        holder.positions[0].mechanisms[0].pos_embed.copy_(of(model))

    return fill


def tables(model: Any) -> None:
    """Copies the tables of offsets of each layer."""
    for holder in (one for one in model.modules() if "positions" in one._modules):
        for block, position in zip(holder.blocks, holder.positions, strict=True):
            position.mechanisms[0].relative_position_bias_table.copy_(block.attn.relative_position_bias_table)


def buckets(model: Any) -> None:
    """Copies the table of each stack."""
    for stack in (model.encoder, model.decoder):
        own = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        stack.positions[0].mechanisms[0].relative_attention_bias.copy_(own.weight)


DIGITS = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 2}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LONG = {"max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES: dict[str, Family] = {
    "timm's ViT": Family(
        of_timm("vision_transformer.VisionTransformer", **DIGITS),
        images, "relative_2d", "learned", vectors(lambda model: model.pos_embed),
    ),
    "timm's DeiT, distilled": Family(
        of_timm("deit.VisionTransformerDistilled", **DIGITS),
        lambda: digits(lambda model, x: sum(out) / 2 if isinstance(out := model(x), tuple) else out),
        "relative_2d", "learned", vectors(lambda model: model.pos_embed),
    ),
    "timm's BEiT": Family(
        of_timm("beit.Beit", **DIGITS, use_rel_pos_bias=True, use_abs_pos_emb=False),
        images, "rotary_2d", "relative_2d", tables,
    ),
    "timm's Swin": Family(
        of_timm(
            "swin_transformer.SwinTransformer", patch_size=1, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
            window_size=4, drop_path_rate=0.0,
        ),
        images, "rotary_2d", "relative_2d", tables,
    ),
    "transformers' ViT": Family(
        of_transformers(
            "ViTForImageClassification", "ViTConfig", **SMALL, **DRY, image_size=8, patch_size=2, num_channels=1,
            num_labels=10,
        ),
        images, "relative_2d", "learned",
        vectors(lambda model: model.vit.embeddings._parameters["position_embeddings"]),
    ),
    "transformers' BERT": Family(
        of_transformers("BertForMaskedLM", "BertConfig", **SMALL, **DRY, vocab_size=257, max_position_embeddings=32),
        hidden, "relative_1d", "learned", vectors(lambda model: model.bert.embeddings.position_embeddings.weight),
    ),
    "transformers' GPT-2": Family(
        of_transformers(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        following, "relative_1d", "learned", vectors(lambda model: model.transformer.wpe.weight),
    ),
    "transformers' Llama": Family(
        of_transformers("LlamaForCausalLM", "LlamaConfig", **SMALL, **LONG, vocab_size=256, num_key_value_heads=2),
        following, "relative_1d", lambda site: relpos.RotaryEmbedding(site.head_dim, layout="half"),
    ),
    "transformers' T5": Family(
        of_transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=257, d_model=32, d_kv=8, d_ff=64, num_layers=2,
            num_heads=4, dropout_rate=0.0, decoder_start_token_id=MASK, pad_token_id=MASK, eos_token_id=None,
        ),
        answered, "relative_1d", lambda site: relpos.T5Bias(site.num_heads, bidirectional=not site.causal), buckets,
        {"shared": True},
    ),
    "`nn.TransformerEncoder`": Family(
        Bytes, hidden, "relative_1d", always={"coordinates": relpos.Sequence(LENGTH)},
    ),
}  # fmt: skip


def trained(model: Any, batches: Iterator[Batch], rate: float = 1.0) -> list[float]:
    """The loss of every step; mechanisms learn at `rate` times the rate of the rest."""
    learning = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    groups = [
        {"params": [x for name, x in learning if "positions." not in name], "lr": RATE},
        {"params": [x for name, x in learning if "positions." in name], "lr": RATE * rate},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = batch(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True)
class Figures:
    """The losses of a family's four trainings; `same` is None where a model knew nothing of position."""

    published: list[float]
    same: list[float] | None
    without: list[float]
    other: list[float]

    @property
    def apart(self) -> tuple[float, float] | None:
        """The largest difference of the published losses from those of the same position by relpos: early, in all."""
        if self.same is None:
            return None
        differences = [abs(a - b) for a, b in zip(self.published, self.same, strict=True)]
        return max(differences[:LAST]), max(differences)


def measure(family: Family) -> Figures:
    """Train a family's model four times."""
    same = None
    if family.own is not None:
        model = family.made(family.own, **family.options)
        with torch.no_grad():
            family.fill(model)
        same = trained(model, family.batches())
    return Figures(
        trained(family.made(), family.batches()),
        same,
        trained(family.made(None), family.batches()),
        trained(family.made(family.position), family.batches(), rate=10.0),
    )


def row(name: str, family: Family, found: Figures) -> str:
    """A line of the table."""

    def end(losses: list[float]) -> str:
        return f"{sum(losses[-LAST:]) / LAST:.3f}"

    apart = "no own position" if found.apart is None else ", ".join(f"{one:.0e}" for one in found.apart)
    start = f"{sum(found.published[:LAST]) / LAST:.3f}"
    cells = [name, start, end(found.published), apart, end(found.without), f"{end(found.other)}, `{family.position}`"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Train all, and write the table as it grows."""
    torch.set_num_threads(1)
    rows: list[str] = []
    for name, family in FAMILIES.items():
        rows.append(row(name, family, measure(family)))
        print(rows[-1], flush=True)
        table = "\n".join(["<!-- trained -->", HEAD, *rows, "<!-- end -->"])
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            re.sub(r"<!-- trained -->.*?<!-- end -->", lambda _, table=table: table, page, flags=re.DOTALL), "utf-8"
        )


if __name__ == "__main__":
    main()
