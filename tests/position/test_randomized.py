"""Randomized positions: evenly spread in evaluation, by loops; what is drawn in training."""

from typing import Any

import torch
from torch import Tensor

from position.rotations import RotationSuite
from relpos import (
    LanguageModel,
    LearnedPositionEmbedding,
    Positions,
    RandomizedPositions,
    RotaryEmbedding,
    Rotation,
    Sequence,
    Site,
    T5Bias,
    YaRN,
)
from relpos.core import Coordinates
from relpos.testing import oracle


class TestRandomized(RotationSuite):
    """In evaluation the mechanism alone."""

    alike = True
    axes = (1, 2)
    preset = "rotary_randomized"
    every = 4

    def build(self, site: Site) -> RandomizedPositions:
        return RandomizedPositions(RotaryEmbedding(site.head_dim, base=100.0), 50).eval()

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        return oracle.rotated(x, oracle.raster(side), 1, x.shape[-1] // 2, 100.0, "half")


def drawn(own: RandomizedPositions, *tokens: Coordinates) -> list[list[int]]:
    """The places of queries and keys, by a rotation of one radian a place."""
    rotation = own.terms(*tokens).one(Rotation)
    assert rotation is not None
    return [x[0, 0, :, 0].round().long().tolist() for x in (rotation.query, rotation.key)]


def test_what_training_draws() -> None:
    own = RandomizedPositions(RotaryEmbedding(4), 20).train()
    torch.manual_seed(0)
    every = [drawn(own, Sequence(6))[0] for _ in range(60)]
    assert all(places == sorted(set(places)) and len(places) == 6 for places in every), "in order, each once"
    assert {place for places in every for place in places} == set(range(20)), "anywhere"
    assert len({tuple(places) for places in every}) > 50, "anew in each call"
    for _ in range(9):
        queries, keys = drawn(own, Sequence(2, start=4, prefix=1), Sequence(6))
        assert queries == [0, *keys[4:]], "queries and keys are at places of one draw"
    for count in (20, 30):
        assert drawn(own, Sequence(count))[0] == list(range(count)), "all of them, and all there are"
    batch = Positions(torch.tensor([[0, 1, 2], [5, 0, 1]]), low=0, high=5)
    places = own.places(batch).values[..., 0]
    assert torch.equal(places[0, :2], places[1, 1:]), "one draw for the batch"


def test_layers_that_share_it_share_the_draw() -> None:
    def after(shared: bool) -> Tensor:
        torch.manual_seed(3)
        model = LanguageModel(
            7, context=9, embed_dim=8, depth=2, num_heads=2, shared_position=shared,
            position=lambda site: RandomizedPositions(T5Bias(site.num_heads, bidirectional=False), 64),
        )  # fmt: skip
        torch.manual_seed(4)
        model.train()(torch.zeros(1, 9, dtype=torch.long))
        return torch.rand(1)

    torch.manual_seed(4)
    torch.randperm(64)
    once = torch.rand(1)
    assert torch.equal(after(True), once)
    assert not torch.equal(after(False), once)


def test_tokens_get_the_vectors_of_their_places() -> None:
    own = RandomizedPositions(LearnedPositionEmbedding(4, seq_len=12, init_std=1.0), 12)
    table = own.mechanism.embed(torch.zeros(1, 12, 4), Sequence(12))
    torch.manual_seed(1)
    places = own.places(Sequence(4)).values[:, 0]
    torch.manual_seed(1)
    assert torch.equal(own.embed(torch.zeros(1, 4, 4), Sequence(4)), table[:, places])
    assert torch.equal(own.eval().embed(torch.zeros(1, 4, 4), Sequence(4)), table[:, :4])


def test_it_grows_as_its_mechanism() -> None:
    own = RandomizedPositions(RotaryEmbedding(8, trained_length=4), 20).eval()
    assert own.growth == own.mechanism.growth
    assert repr(own.grow(Sequence(8), "yarn")) == (
        "RandomizedPositions(mechanism=RotaryEmbedding(head_dim=8, scaling=" + repr(YaRN(2.0, 4)) + "), longest=20)"
    )
