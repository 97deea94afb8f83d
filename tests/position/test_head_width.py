"""A rotation knows the head width that it was built for: heads of another width are refused, not turned in part."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import relpos
from relpos import (
    DynamicNTK,
    Grid,
    Mechanism,
    MultiHeadAttention,
    MultimodalRotary,
    NoPosition,
    RotaryDINOv3,
    RotaryEmbedding,
    RotaryMixed,
    Rotation,
    Sequence,
    XPos,
    attention,
)

GRID = Grid(2, 3)
TURNED: dict[str, Any] = {
    "rotary": lambda width, **partial: RotaryEmbedding(width, **partial),
    "rotary on a grid": lambda width, **partial: RotaryEmbedding(width, axes=2, **partial),
    "dynamic": lambda width, **partial: RotaryEmbedding(width, scaling=DynamicNTK(1.0, 2), **partial),
    "xpos": lambda width, **partial: XPos(width, **partial),
    "dinov3": lambda width: RotaryDINOv3(width),
    "mixed": lambda width: RotaryMixed(2, width),
    "multimodal": lambda width: MultimodalRotary(width, (2, 1, 1)),
}
CALLS: dict[str, Any] = {
    "attention": lambda own, *qkv: attention(*qkv, position=own, queries=GRID),
    "the reference": lambda own, *qkv: attention(*qkv, position=own, queries=GRID, backend="reference"),
    "terms": lambda own, *qkv: attention(*qkv, position=own.terms(GRID), backend="streaming"),
    "explain": lambda own, *qkv: relpos.explain(*qkv, position=own, queries=GRID),
    "weights": lambda own, q, k, v: relpos.attention_weights(q, k, position=own, queries=GRID),
    "linear attention": lambda own, *qkv: relpos.linear_attention(*qkv, position=own.terms(GRID)),
    "rotate": lambda own, q, k, v: relpos.rotate(k, own.angles(Sequence(6)), layout="half", width=own.head_dim),
}


def heads(width: int) -> list[Tensor]:
    return [torch.randn(1, 2, 6, width) for _ in range(3)]


def rotation(mechanism: Mechanism) -> Rotation:
    found = mechanism.terms(GRID).one(Rotation)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "call"), [*((name, "attention") for name in TURNED), *(("rotary", call) for call in CALLS)]
)
def test_heads_of_another_width_are_refused(name: str, call: str) -> None:
    mechanism = TURNED[name](8)
    assert rotation(mechanism).width == 8
    CALLS[call](mechanism, *heads(8))
    for width in (6, 16):
        with pytest.raises(ValueError, match=rf"expected heads 8 wide for this Rotation; got {width}\. "):
            CALLS[call](mechanism, *heads(width))


@pytest.mark.parametrize("name", ["rotary", "rotary on a grid", "dynamic", "xpos"])
def test_part_of_a_head_is_turned_where_that_is_asked_for(name: str) -> None:
    mechanism = TURNED[name](16, rotary_dim=8)
    term = rotation(mechanism)
    assert (term.width, term.query.shape[-1]) == (16, 4)
    attention(*heads(16), position=mechanism, queries=GRID)
    with pytest.raises(ValueError, match="expected heads 16 wide"):
        attention(*heads(8), position=mechanism, queries=GRID)


def test_an_odd_width_is_its_own() -> None:
    mechanism = RotaryEmbedding(7)
    assert rotation(mechanism).width == 7
    attention(*heads(7), position=mechanism, queries=GRID)


@pytest.mark.parametrize("kind", ["softmax", "linear", "flash"])
def test_layers_refuse_it(kind: Any) -> None:
    with pytest.raises(ValueError, match="expected heads 8 wide"):
        MultiHeadAttention(32, 2, position=RotaryEmbedding(8), kind=kind)(torch.randn(1, 6, 32))


def test_a_rotation_of_no_width_turns_what_it_has_angles_for() -> None:
    angles = torch.randn(1, 1, 6, 4)
    assert Rotation(angles, angles, "half").width is None
    attention(*heads(16), position=Rotation(angles, angles, "half"))


def test_what_is_made_of_a_rotation_keeps_the_width() -> None:
    term = rotation(XPos(8))
    leaves, structure = pytree.tree_flatten(term)
    file = io.BytesIO()
    torch.save(term, file)
    file.seek(0)
    for made in (
        term.narrow(slice(1, 3), slice(0, 6)),
        (XPos(8) + NoPosition()).terms(GRID).one(Rotation),
        pytree.tree_unflatten(leaves, structure),
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(structure))),
        copy.deepcopy(term),
        pickle.loads(pickle.dumps(term)),
        torch.load(file, weights_only=False),
        term.to("meta"),
    ):
        assert isinstance(made, Rotation)
        assert made.width == 8


@pytest.mark.traced
def test_an_exported_layer_turns_as_it_did() -> None:
    layer = MultiHeadAttention(16, 2, position=RotaryEmbedding(8)).eval()
    x = torch.randn(1, 6, 16)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


@pytest.mark.usefixtures("unchecked")
def test_the_width_is_a_whole_number() -> None:
    angles = torch.zeros(1, 1, 6, 4)
    for width in (0, -8, 8.0, True, "8"):
        with pytest.raises(ValueError, match="expected Rotation width to be an integer of at least 1"):
            Rotation(angles, angles, "half", width=width)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a Rotation of at most 6 dimensions; got 8"):
        Rotation(angles, angles, "half", width=6)
