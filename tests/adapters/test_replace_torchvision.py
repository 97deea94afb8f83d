"""torchvision's models with another position: with mechanisms that say what their own said, they compute the same."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from models import images, models
from relpos.adapters.common.libraries import imported


def _vit() -> nn.Module:
    library = imported("torchvision.models.vision_transformer")
    torch.manual_seed(0)
    made: nn.Module = library.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5
    )
    nn.init.normal_(made.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return made.double().eval()


def _mvit(*, relative: bool = True) -> nn.Module:
    """Queries are pooled in the second layer, keys in both: of 4 x 4 and 2 x 2 cells, and of 2 x 2 both."""
    library = imported("torchvision.models.video.mvit")
    block = partial(library.MSBlockConfig, kernel_kv=[3, 3, 3], stride_kv=[1, 2, 2], input_channels=16)
    layers = [
        block(num_heads=2, output_channels=16, kernel_q=[], stride_q=[]),
        block(num_heads=1, output_channels=16, kernel_q=[3, 3, 3], stride_q=[1, 2, 2]),
    ]
    torch.manual_seed(0)
    made: nn.Module = library.MViT(
        (16, 16), 4, layers, residual_pool=True, residual_with_cls_embed=True, rel_pos_embed=relative,
        proj_after_attn=True, num_classes=5,
    )  # fmt: skip
    for name, one in made.named_parameters():
        nn.init.normal_(one, std=0.5 if "rel_pos" in name else 0.3)
    return made.double().eval()


def _made(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        return _vit(), images(2, 16).double()
    if name == "mvit":
        return _mvit(), torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    model = models()[f"torchvision {name}"]
    inputs = model.inputs()
    assert isinstance(inputs, Tensor)
    return model.made(), inputs.double()


def _own(name: str, model: nn.Module) -> list[Tensor]:
    """What its own position says, layer by layer."""
    if name == "vit":
        return [model.encoder.pos_embedding]  # type: ignore[union-attr, list-item]
    if name == "mvit":
        return [getattr(block.attn, f"rel_pos_{axis}") for block in model.blocks for axis in "thw"]  # type: ignore[union-attr]
    layers: list[Any] = [one for one in model.modules() if hasattr(one, "relative_position_index")]
    if name == "swin_v2":
        return [16 * one.cpb_mlp(one.relative_coords_table).flatten(0, -2).sigmoid() for one in layers]
    return [one.relative_position_bias_table for one in layers]


POSITIONS: dict[str, Any] = {
    "vit": "learned", "swin": "relative_2d", "swin_v2": "relative_2d", "swin3d": "relative_3d",
    "maxvit": "relative_2d", "mvit": relpos.DecomposedPosition.from_site,
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
def test_with_its_own_position_by_relpos_it_is_the_published_model(name: str) -> None:
    published, x = _made(name)
    model: Any = copy.deepcopy(published)
    report = relpos.replace_position(model, POSITIONS[name], shared=name == "vit")
    assert not published(x).equal(model(x)), "its position is off"
    tables = [one for key, one in model.named_parameters() if "positions." in key]
    own = _own(name, published)
    assert len(tables) == len(own)
    with torch.no_grad():
        for table, said in zip(tables, own, strict=True):
            table.copy_(said.view_as(table))
    weights = [key for key, one in model.named_parameters() if one.requires_grad and "positions." not in key]
    assert len([key for one in report.own for key in one.parameters]) + len(weights) == len(
        list(published.parameters())
    )
    out, wanted = model(x), published(x)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    chosen = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * chosen).sum(), [*tables, *map(model.get_parameter, weights)])
    theirs = torch.autograd.grad(
        (wanted * chosen).sum(), [*own, *map(published.get_parameter, weights)], allow_unused=name == "swin_v2"
    )
    for one, other in zip(found, theirs, strict=True):
        if other is None:  # what a network says is made in each call
            continue
        torch.testing.assert_close(one, other.view_as(one), rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_a_stage_of_swin_does_not_call_its_mechanisms_and_keeps_them() -> None:
    published, x = _made("swin")
    model: Any = copy.deepcopy(published)
    before = list(model.features[1])
    relpos.replace_position(model, "rotary_2d+relative_2d", init_std=0.5)
    assert list(model.features[1]) == before
    assert len(model.features[1]) == len(before)
    wanted = model(x)
    other: Any = copy.deepcopy(published)
    relpos.replace_position(other, "rotary_2d+relative_2d")
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    pickle.dump(model, file)
    for one in (other, copy.deepcopy(model), pickle.loads(file.getvalue())):
        torch.testing.assert_close(one(x), wanted, rtol=1e-12, atol=1e-12)
    assert model(images(1, (40, 52)).double()).shape == (1, 5)
    with pytest.raises(ValueError, match=r"windows stay Grid\(4, 3\)\. Swin takes other images as it is"):
        relpos.resize_position(model, (10, 13))
    relpos.restore(model)
    assert torch.equal(model(x), published(x))
    assert list(model.state_dict()) == list(published.state_dict())


@torch.no_grad()
def test_vit_at_another_size() -> None:
    """Of images that are not square, which the published model refuses."""
    model: Any = _vit()
    relpos.replace_position(model, "relative_2d+learned", init_std=0.5)
    x = images(2, (12, 20)).double()
    with pytest.raises(ValueError, match=r"expected images of \(4, 4\) patches; got \(3, 5\)\. Call relpos\.resize_po"):
        model(x)
    relpos.resize_position(model, (3, 5))
    assert model(x).shape == (2, 5)
    with pytest.raises(ValueError, match=r"whole patches, of 4 x 4 pixels; got images of 12 x 18 pixels"):
        model(images(2, (12, 18)).double())


@torch.no_grad()
def test_pooled_keys_of_mvit_stand_where_their_convolution_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias on pairs of frames, rows and columns of the first layer's map, where keys are two cells apart."""
    published, x = _made("mvit")
    model: Any = copy.deepcopy(published)
    report = relpos.replace_position(model, "relative_3d", init_std=0.5)
    assert str(report).count("1 layer of blocks.") == 2
    tables = [one for key, one in model.named_parameters() if "positions." in key]
    steps = iter(((1, 2), (1, 1)))  # cells between queries, and between keys, of each layer

    def add(scores: Tensor, q: Tensor, q_size: Any, k_size: Any, *own: Tensor) -> Tensor:
        table, (apart, keys_apart) = tables.pop(0), next(steps)
        windows = (
            2,
            *[max((m - 1) * apart, (n - 1) * keys_apart) + 1 for m, n in zip(q_size, k_size, strict=True)][1:],
        )
        for i in range(scores.shape[2]):
            for j in range(scores.shape[3]):
                if i and j:
                    query, key = _cell(i - 1, q_size, apart), _cell(j - 1, k_size, keys_apart)
                    row = 0
                    for a, b, window in zip(query, key, windows, strict=True):
                        row = row * (2 * window - 1) + a - b + window - 1
                else:
                    row = len(table) - (1 if i == j else 2 if i else 3)
                scores[:, :, i, j] += table[row]
        return scores

    library = imported("torchvision.models.video.mvit")
    monkeypatch.setattr(library, "_add_rel_pos", add)
    torch.testing.assert_close(model(x), published(x), rtol=1e-10, atol=1e-10)
    assert not tables
    with pytest.raises(
        ValueError, match=r"got torchvision's MViT, which takes one size of videos\. Build it with spat"
    ):
        relpos.resize_position(model, relpos.Grid(2, 8, 8))
    with pytest.raises(ValueError, match=r"got MViT with an absolute position, as in mvit_v1_b"):
        relpos.replace_position(_mvit(relative=False), "relative_3d")


def _cell(number: int, sizes: tuple[int, int, int], apart: int) -> tuple[int, int, int]:
    """Frame, row and column of a pooled cell."""
    frame, rest = divmod(number, sizes[1] * sizes[2])
    return frame, rest // sizes[2] * apart, rest % sizes[2] * apart


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("vit", "vision_transformer.Encoder", "forward"),
        ("swin", "swin_transformer", "shifted_window_attention"),
        ("maxvit", "maxvit.RelativePositionalMultiHeadAttention", "forward"),
    ],
)
def test_another_source(name: str, owner: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _made(name)
    file, _, kind = owner.partition(".")
    library = imported(f"torchvision.models.{file}")
    monkeypatch.setattr(getattr(library, kind) if kind else library, function, lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=rf"a tested version of the library; got torchvision\.models.*{function}"):
        relpos.replace_position(model, "rotary_2d")
