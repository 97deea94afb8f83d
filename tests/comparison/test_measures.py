"""What is measured on a trained model, against the model itself: probes by growth rule, learned positions, maps."""

import math
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch

from relpos.comparison.learned import attention_over_examples, learned
from relpos.comparison.run import metrics
from relpos.data import Digits
from relpos.layers import MultiHeadAttention
from relpos.models import VisionTransformer
from relpos.models.vit import PositionChoice
from relpos.position import RelativePositionBias, Site
from relpos.results import Metric

CPU = torch.device("cpu")


class Few(Digits):
    """Of which the probes show a handful."""

    @cached_property
    def _splits(self) -> Any:
        images, labels = super()._splits["test"]
        return {**super()._splits, "test": (images[:40], labels[:40])}


class Fixed(RelativePositionBias):
    """A mechanism that stays at the grid it was built for."""

    growth: ClassVar[tuple[str, ...]] = ()


def build(position: PositionChoice, **changes: Any) -> VisionTransformer:
    small = {
        "img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 10, "global_pool": "max", "embed_dim": 16,
        "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "class_token": False, "shared_position": True,
        "position_init_std": 0.5,
    }  # fmt: skip
    torch.manual_seed(3)
    model = VisionTransformer(**{**small, "position": position, **changes}).eval()
    task = Digits()
    with torch.no_grad():  # an untrained model always says the same class; without its mean score it does not
        model.head.bias -= model(task.examples(task.probes[0], "validation")[0][:, 0]).mean(dim=0)
    return model


@pytest.fixture(scope="module")
def stretching() -> tuple[VisionTransformer, list[Metric]]:
    """A model whose mechanism has two rules, and what is measured on it."""
    model = build("relative_2d")
    return model, metrics(model, Few(), Few().probes, CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "rules"), [("none", ["as is"]), ("learned+relative_2d", ["interpolated", "clipped"])]
)
def test_every_probe_by_every_rule_the_mechanisms_have(position: str, rules: list[str]) -> None:
    found = metrics(build(position), Few(), Few().probes, CPU)
    expected: list[tuple[str, str | None]] = []
    for probe in Few().probes:
        expected += [(probe.id, rule) for rule in (rules if probe.group == "canvas" else [None])]
    assert [(one.probe, one.growth) for one in found] == expected
    for one in found:
        assert len(one.correct) == 40
        assert all(0 <= count <= one.trials for count in one.correct)
        assert one.accuracy == pytest.approx(sum(one.correct) / (40 * one.trials), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("probe_id", ["test", "shift/2", "canvas/20/anywhere", "canvas/24/zoomed"])
def test_counts_are_what_the_model_says_image_by_image(
    probe_id: str, stretching: tuple[VisionTransformer, list[Metric]]
) -> None:
    model, found = stretching
    probe = next(one for one in Few().probes if one.id == probe_id)
    images, labels = Few().examples(probe, "test")
    for one in found:
        if one.probe != probe_id:
            continue
        tested = model if one.growth is None else model.grow(probe.image_size, one.growth)
        with torch.no_grad():
            for place, (trials, label) in enumerate(zip(images[:10], labels, strict=False)):
                assert one.correct[place] == int((tested(trials).argmax(dim=-1) == label).sum())


@pytest.mark.slow
def test_rules_differ_and_leave_the_model_alone(stretching: tuple[VisionTransformer, list[Metric]]) -> None:
    model, found = stretching
    stretched, clipped = ([one.correct for one in found if one.growth == rule] for rule in ("interpolated", "clipped"))
    assert stretched != clipped
    for name, tensor in build("relative_2d").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert model.patch_embed.grid_size == (8, 8)


def fixed(site: Site) -> Fixed:
    return Fixed.from_site(site)


@pytest.mark.parametrize("choice", [fixed, lambda site: fixed(site) + RelativePositionBias.from_site(site)])
def test_a_mechanism_without_a_rule_gets_a_reason(choice: PositionChoice) -> None:
    found = metrics(build(choice), Few(), Few().probes, CPU)
    canvases = [one for one in found if one.probe.startswith("canvas/")]
    assert len(canvases) == 6
    for one in canvases:
        assert one.growth is None
        assert one.accuracy is None
        assert "no rule" in one.reason
    assert all(one.accuracy is not None for one in found if not one.probe.startswith("canvas/"))


def test_learned_values_are_the_tables_entries() -> None:
    model = build("relative_2d", class_token=True)
    (table,) = (one.detach() for one in model.position_parameters())
    (entry,) = learned(model)
    assert (entry.kind, entry.layer, entry.axes) == ("bias", "shared", 2)
    assert entry.offsets == [[-7, 7], [-7, 7]]
    for head in range(2):
        for row in range(-7, 8):
            for column in range(-7, 8):
                value = table[(row + 7) * 15 + column + 7, head].item()
                assert entry.values[head][row + 7][column + 7] == pytest.approx(value, abs=6e-5)


def test_prefix_values_are_named_by_what_sees_what() -> None:
    model = build("relative_2d", class_token=True)
    (entry,) = learned(model)
    bias = model.attention_position[0].mechanisms[0]()  # [H, 65, 65], the class token first
    for head in range(2):
        to_token, to_prefix, of_prefix = (bias[head, query, key].item() for query, key in ((0, 5), (5, 0), (0, 0)))
        assert entry.prefix[head] == pytest.approx([to_token, to_prefix, of_prefix], abs=6e-5)


def test_learned_without_prefix_in_one_dimension() -> None:
    (entry,) = learned(build("relative_1d"))
    assert (entry.axes, entry.offsets, entry.prefix) == (1, [[-63, 63]], None)
    assert [len(values) for values in entry.values] == [127, 127]


def test_tables_of_their_own_are_listed_by_layer() -> None:
    model = build("relative_2d", shared_position=False)
    found = learned(model)
    assert [entry.layer for entry in found] == [0, 1]
    assert found[0].values != found[1].values


def test_similarity_of_learned_places() -> None:
    model = build("learned", class_token=True)
    (entry,) = learned(model)
    assert (entry.kind, entry.grid) == ("embedding", [8, 8])
    (vectors,) = (one.detach()[0, 1:].tolist() for one in model.position_parameters())
    mean = [sum(column) / 64 for column in zip(*vectors, strict=True)]
    centred = [[value - middle for value, middle in zip(vector, mean, strict=True)] for vector in vectors]
    for first, second in ((0, 0), (0, 1), (3, 60), (60, 3)):
        a, b = centred[first], centred[second]
        cosine = sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        assert entry.similarity[first][second] == pytest.approx(cosine, abs=6e-4)


def test_sums_show_every_part_and_none_shows_nothing() -> None:
    assert learned(build("none")) == []
    assert [entry.kind for entry in learned(build("learned+relative_2d"))] == ["embedding", "bias"]


def test_attention_over_examples_is_the_models() -> None:
    task, model = Digits(), build("relative_2d")
    found = attention_over_examples(model, task)
    assert len(found.image) == len(found.label) == len(set(found.label)) == 3
    assert found.query == [4, 4]
    assert found.grid == [8, 8]
    grey = torch.tensor(found.image)
    assert grey.min() == 0
    assert grey.max() == 1
    # by hand: rebuild the first layer's weights from its parts
    images, labels = task.examples(task.probes[0], "test")
    first = int((labels == int(found.label[0])).nonzero()[0])
    with torch.no_grad():
        x = model.patch_embed(images[first : first + 1, 0])
        block = model.blocks[0]
        attention = block.attn
        assert isinstance(attention, MultiHeadAttention)
        qkv = attention.qkv(block.norm1(x))[0].view(64, 3, 2, 8).permute(1, 2, 0, 3)
        score = qkv[0] @ qkv[1].mT / math.sqrt(8) + model.attention_position[0].mechanisms[0]()
        wanted = score.softmax(dim=-1)[:, 4 * 8 + 4].view(2, 8, 8)
    torch.testing.assert_close(torch.tensor(found.maps[0][0]), wanted, atol=1e-4, rtol=0)
    predicted = model(images[first : first + 1, 0]).argmax().item()
    assert found.predicted[0] == str(predicted)
