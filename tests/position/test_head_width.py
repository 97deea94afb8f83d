"""A rotation knows the head width that it was built for: heads of another width are refused, not turned in part."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos import (
    DynamicNTK,
    Grid,
    LinearAttention,
    Mechanism,
    MultiHeadAttention,
    MultimodalRotary,
    NoPosition,
    RotaryEmbedding,
    RotaryMixed,
    Rotation,
    Sequence,
    XPos,
    attention,
    attention_weights,
    explain,
    linear_attention,
    rotate,
)

GRID = Grid(2, 3)
TURNED = {
    "rotary": lambda width, **partial: RotaryEmbedding(width, **partial),
    "rotary on a grid": lambda width, **partial: RotaryEmbedding(width, axes=2, **partial),
    "dynamic": lambda width, **partial: RotaryEmbedding(width, scaling=DynamicNTK(1.0, 2), **partial),
    "xpos": lambda width, **partial: XPos(width, **partial),
    "mixed": lambda width: RotaryMixed(2, width),
    "multimodal": lambda width: MultimodalRotary(width, (2, 1, 1)),
}


def heads(width: int) -> list[Tensor]:
    return [torch.randn(1, 2, 6, width) for _ in range(3)]


def rotation(mechanism: Mechanism) -> Rotation:
    found = mechanism.terms(GRID).one(Rotation)
    assert found is not None
    return found


@pytest.mark.parametrize("name", TURNED)
def test_heads_of_another_width_are_refused(name: str) -> None:
    mechanism = TURNED[name](8)
    assert rotation(mechanism).width == 8
    attention(*heads(8), position=mechanism, queries=GRID)
    for width in (6, 16):
        q, k, v = heads(width)
        calls = [
            lambda x=(q, k, v): attention(*x, position=mechanism, queries=GRID),
            lambda x=(q, k, v): attention(*x, position=mechanism, queries=GRID, backend="reference"),
            lambda x=(q, k, v): attention(*x, position=mechanism.terms(GRID), backend="streaming"),
            lambda x=(q, k, v): explain(*x, position=mechanism, queries=GRID),
            lambda x=(q, k, v): attention_weights(*x[:2], position=mechanism, queries=GRID),
            lambda x=(q, k, v): linear_attention(*x, position=mechanism.terms(GRID)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=rf"expected heads 8 wide for this Rotation; got {width}\. "):
                call()


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
def test_layers_refuse_it(kind: str) -> None:
    tokens = torch.randn(1, 6, 32)
    layer = MultiHeadAttention(32, 2, position=RotaryEmbedding(8), kind=kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected heads 8 wide"):
        layer(tokens)
    with pytest.raises(ValueError, match="expected heads 8 wide"):
        LinearAttention(32, 2, position=RotaryEmbedding(8))(tokens)


def test_rotate_takes_it() -> None:
    """For keys that go into a cache."""
    own = RotaryEmbedding(8)
    angles = own.angles(Sequence(6))
    rotate(heads(8)[1], angles, layout="half", width=own.head_dim)
    with pytest.raises(ValueError, match="expected heads 8 wide"):
        rotate(heads(16)[1], angles, layout="half", width=own.head_dim)


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
