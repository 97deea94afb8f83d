"""Training a language model on text, and what is measured on it."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.data import Text
from relpos.data.documents import Documents
from relpos.models import LanguageModel
from relpos.train import OF_THE_MODEL, Recipe, TextRecipe, bits, measured, train, validated

CPU = torch.device("cpu")
TINY = replace(TextRecipe(), steps=3, warmup_steps=1, batch_size=2, embed_dim=16, depth=1, num_heads=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A short text of one's own: four blocks to test, two to validate."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = b"the cat sat on the mat and the dog sat on the cat. "
    path.write_bytes((words * 2400)[:120_000])
    return Text(path)


class Counting(nn.Module):
    """Gives each byte the logits of a table, and another at positions from `beyond` on."""

    def __init__(self, beyond: int) -> None:
        super().__init__()
        self.beyond = beyond
        self.table = nn.Parameter(torch.randn(256, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.table[tokens]
        far = torch.arange(tokens.shape[1]) >= self.beyond
        return torch.where(far[:, None], 0.0, logits)


def test_the_recipe_of_a_task(text: Text) -> None:
    recipe = Recipe.of(text)
    assert recipe == TextRecipe()
    model = recipe.build(text, "none")
    assert isinstance(model, LanguageModel)
    assert model.coordinates.count == 256
    assert recipe.build(text, "alibi", grid=(512,)).coordinates.count == 512


def test_what_a_recipe_has_of_the_model_reaches_it(text: Text) -> None:
    asked = {"embed_dim": 24, "depth": 3, "num_heads": 6, "num_kv_heads": 2, "mlp_ratio": 3.0, "mlp": "gelu",
             "attention": "linear", "norm": "groupnorm", "qk_norm": "layernorm", "shared_position": False,
             "position_init_std": 0.3, "window": None}  # fmt: skip
    model = replace(TextRecipe(), **asked).build(text, "none")  # type: ignore[arg-type]
    assert {name: model.arguments[name] for name in asked} == asked
    assert {*asked, "global_pool", "class_token"} == OF_THE_MODEL
    assert replace(TextRecipe(), window=(8, None)).build(text, "none").windows == [8, None, 8, None]


def test_training_repeats_bit_for_bit(text: Text) -> None:
    first, curve = train(text, "relative_1d", TINY, seed=0, device=CPU)
    again, _ = train(text, "relative_1d", TINY, seed=0, device=CPU)
    other, _ = train(text, "relative_1d", TINY, seed=1, device=CPU)
    for (name, one), two in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(first.state_dict()["token_embed.weight"], other.state_dict()["token_embed.weight"])
    assert curve.step[-1] == curve.validation_step[-1] == 3
    assert all(0 < value < 16 for value in curve.validation)


def test_loss_falls(text: Text) -> None:
    recipe = replace(TINY, steps=30, warmup_steps=3, embed_dim=32, learning_rate=1e-2)
    _, curve = train(text, "alibi", recipe, seed=0, device=CPU, points=30)
    assert curve.loss[0] == pytest.approx(math.log(256), abs=0.6)
    assert curve.loss[-1] < 0.8 * curve.loss[0]
    assert curve.validation[-1] < curve.loss[0] / math.log(2)


@pytest.mark.parametrize("index", [0, 2])
def test_bits_of_every_byte_in_pieces_of_the_probes_length(text: Text, index: int) -> None:
    model, probe = Counting(beyond=300), text.probes[index]
    found = bits(model, text, probe, "test", CPU)
    read, follows = text.blocks("test")
    assert found.shape == read.shape
    for index in (0, 255, 256, 299, 300, 700, 1023, 1024, 2047):
        if index % probe.length >= 300:
            assert found[0, index] == pytest.approx(8.0), "nothing is known there: eight bits"
        else:
            nats = -F.log_softmax(model.table[read[0, index]], dim=-1)[follows[0, index]]
            assert found[0, index].item() == pytest.approx(nats.item() / math.log(2), rel=1e-5)


def test_a_metric_of_text(text: Text) -> None:
    model, probe = Counting(beyond=512), text.probes[-1]
    each = bits(model, text, probe, "test", CPU)
    found = measured(model, text, probe, CPU)
    assert found["bits_per_byte"] == pytest.approx(each.mean().item(), abs=1e-5)
    assert found["values"] == pytest.approx(each.mean(dim=1).tolist(), abs=1e-5)
    assert len(found["by_place"]) == 32
    assert found["by_place"][8:] == pytest.approx([8.0] * 24), "from byte 512 on"
    assert sum(found["by_place"]) / 32 == pytest.approx(found["bits_per_byte"], abs=1e-3)


def test_validation_is_on_validation_text(text: Text) -> None:
    model = Counting(beyond=10_000)
    expected = bits(model, text, text.probes[0], "validation", CPU)[:2].mean().item()
    assert validated(model, text, CPU) == pytest.approx(expected)


class Pairs:
    """A tokenizer of one or two letters a token."""

    vocab_size = 960
    words = (*"_abcdefghijklmnopqrstuvwxyz. \n", "")

    def encode(self, text: str) -> list[int]:
        pairs = re.findall(r"[a-z]{1,2}|[^a-z]", text)
        return [31 * self.words.index(pair[:-1]) % 930 + self.words.index(pair[-1]) for pair in pairs]

    def decode(self, ids: list[int]) -> str:
        return "".join((self.words[one // 31] if one >= 31 else "") + self.words[one % 31] for one in ids)


class Flat(nn.Module):
    """Gives every token the same logits, by its number."""

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return torch.linspace(0, 3, Pairs.vocab_size + (segments is not None)).expand(*tokens.shape, -1)


TALES = [("the wolf and the seven kids. " * 12)[: 200 + 10 * number] for number in range(60)]


@pytest.mark.parametrize("documents", ["cut", "packed"])
def test_bits_per_byte_are_all_nats_over_all_bytes_of_text(documents: str) -> None:
    splits = {"train": TALES, "validation": TALES[:40], "test": TALES[10:]}
    task = Text(Documents(splits, "tales", "Tales"), tokenizer=Pairs(), documents=documents)
    found = measured(Flat(), task, task.probes[1], CPU)
    text = [token for tale in splits["test"] for token in [*([None] if documents == "packed" else []), *Pairs().encode(
        tale if documents == "packed" else f"{tale}\n\n"
    )]]  # fmt: skip
    count = (len(text) - 1) // 2048 * 2048
    predicted = [token for token in text[1 : count + 1] if token is not None]  # a document's beginning is not text
    chance = F.log_softmax(torch.linspace(0, 3, task.vocabulary).double(), dim=0)
    nats = -sum(chance[token].item() for token in predicted)
    size = len(Pairs().decode(predicted).encode())
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert len(found["values"]) == count // 2048
    assert sum(found["values"]) / len(found["values"]) == pytest.approx(found["bits_per_byte"], abs=1e-5)
    assert validated(Flat(), task, CPU) == pytest.approx(found["bits_per_byte"], rel=0.02)


@pytest.mark.slow
def test_attention_stays_within_packed_documents() -> None:
    tales = dict.fromkeys(("train", "validation", "test"), TALES)
    task = Text(Documents(tales, "tales", "Tales"), documents="packed")
    model, _ = train(task, "relative_1d", TINY, seed=0, device=CPU)
    assert model.arguments["vocab_size"] == 257
    read, follows = task.blocks("test")
    found = bits(model.grow(512, model.growth()[0]), task, task.probes[1], "test", CPU, blocks=1)[0, :512]
    begins = [0, *(read[0, 1:512] == 256).nonzero()[:, 0].add(1).tolist(), 512]
    assert len(begins) > 3
    longer = model.grow(512, model.growth()[0])
    for low, high in itertools.pairwise(begins):  # each document alone
        with torch.no_grad():
            nats = F.cross_entropy(longer(read[:1, low:high])[0], follows[0, low:high], reduction="none")
        torch.testing.assert_close(found[low:high], nats / math.log(2), rtol=1e-4, atol=1e-4)
    assert found[begins[1] - 1] == 0, "what begins a document has no bits"
