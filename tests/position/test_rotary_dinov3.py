"""DINOv3's rotation: fractions of the image, by loops and as transformers and timm have them, in training too."""

import importlib
import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from parity import layers_agree
from position.published import DTYPES, config, heads, merged, model, random, running_in, tokens
from position.rotations import RotationSuite
from relpos import Grid, Positions, RotaryDINOv3, Rotation, Site, VisionTransformer, attention
from relpos.core import Coordinates
from relpos.testing import oracle


def places(side: Coordinates) -> list[Any]:
    return list(oracle.places(side))


class DINOv3(RotationSuite):
    axes = (2,)
    along = 2
    settings: ClassVar[dict[str, Any]] = {}
    divisor: ClassVar[Any] = staticmethod(lambda size, both: size)

    def build(self, site: Site) -> RotaryDINOv3:
        return RotaryDINOv3(site.head_dim, **self.settings)

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        # the largest cell of both sides; of `Positions` what they say that it may be
        tops = [one.high for one in (side, other)]
        sizes = [1 + max(top[axis] for top in tops) for axis in range(2)]
        pairs = x.shape[-1] // 4
        shortest, longest = self.settings.get("periods", (1.0, 100.0 ** ((pairs - 1) / pairs)))
        rows = []
        for cell in places(side):
            row = []
            for axis in range(2):
                for p in range(pairs):
                    period = shortest * (longest / shortest) ** (p / max(pairs - 1, 1))
                    place = 0.0 if cell is None else 2 * (cell[axis] + 0.5) / self.divisor(sizes[axis], sizes) - 1
                    row.append(2 * math.pi * place / period)
            rows.append(row)
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        angles = torch.tensor(rows, dtype=torch.float64).to(wide.dtype)[None, None]
        return oracle.rotate(wide, angles, self.settings.get("layout", "half")).to(x.dtype)


class TestDINOv3(DINOv3):
    preset = "rotary_dinov3"


class TestPeriods(DINOv3):
    alike = True
    row = "rotary_dinov3 (periods, both axes by the larger)"
    settings: ClassVar[dict[str, Any]] = {"periods": (0.5, 8.0), "normalize": "max", "layout": "interleaved"}
    divisor = staticmethod(lambda size, both: max(both))
    every = 4


def test_an_image_turns_alike_at_every_resolution() -> None:
    """The corner cells of an image of four times as many cells have the mean angle of the cell that they divide."""
    own = RotaryDINOv3(16)
    small, large = (own.angles(Grid(2 * n, 3 * n)).view(2 * n, 3 * n, 8) for n in (1, 2))
    torch.testing.assert_close(large.view(2, 2, 3, 2, 8).mean(dim=(1, 3)), small, rtol=1e-12, atol=1e-12)


def test_a_part_of_the_image_turns_as_in_the_whole() -> None:
    own = RotaryDINOv3(8)
    image = Grid(3, 4, prefix=1)
    part = Positions(image.tokens()[3:5], low=(0, 0), high=(2, 3))
    whole, cut = own.terms(image).one(Rotation), own.terms(part, image).one(Rotation)
    assert torch.equal(cut.query, whole.query[:, :, 4:6])
    assert torch.equal(cut.key, whole.key)
    few = Positions(image.tokens()[3:5], low=(0, 0), high=(1, 3))
    assert torch.equal(own.terms(few, image).one(Rotation).query, cut.query), "the keys tell the size"
    assert torch.equal(own.angles(few, sizes=(3, 4)), cut.query)


@pytest.mark.parametrize(("shared", "draws"), [(True, 1), (False, 3)])
def test_a_shared_rotation_draws_once_for_all_layers(shared: bool, draws: int) -> None:
    def make(site: Site) -> RotaryDINOv3:
        return RotaryDINOv3(site.head_dim, rescale=2.0)

    model = VisionTransformer(
        img_size=8,
        patch_size=4,
        embed_dim=8,
        depth=3,
        num_heads=2,
        num_classes=2,
        position=make,
        shared_position=shared,
    )
    torch.manual_seed(5)
    model.train()(torch.zeros(1, 3, 8, 8))
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.empty(draws).uniform_()
    assert torch.equal(torch.rand(1), after)


# as published


def vit(**changes: Any) -> Any:
    """transformers' configuration of a DINOv3 with 3 heads of 8 and patches of 4 pixels."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "patch_size": 4, "image_size": 16}
    settings = config("dinov3_vit", **sizes, **changes)
    settings._attn_implementation = "eager"
    return settings


@pytest.mark.usefixtures("timm")
@DTYPES
@pytest.mark.parametrize("prefix", [0, 5], ids=["", "class token and registers"])
def test_transformers_attention(prefix: int, dtype: torch.dtype) -> None:
    """The whole layer on an image of 3 x 5 patches: the output, and the gradients of tokens and projections."""
    x = tokens(2, prefix + 15, 24, dtype=dtype)
    with running_in(dtype):
        block = random(model("dinov3_vit").DINOv3ViTAttention(vit()), dtype)
        rotary = model("dinov3_vit").DINOv3ViTRopePositionEmbedding(vit()).eval()
        waves = rotary(torch.zeros(1, 3, 12, 20, dtype=dtype))
        theirs = block(x, position_embeddings=waves)[0]
    qkv = (heads(part(x), 3) for part in (block.q_proj, block.k_proj, block.v_proj))
    own = RotaryDINOv3(8, rescale=2.0).eval()
    output = block.o_proj(merged(attention(*qkv, position=own, queries=Grid(3, 5, prefix=prefix))))
    layers_agree(
        "rotary_dinov3", "transformers DINOv3ViTAttention", output, theirs, {"x": x, **dict(block.named_parameters())}
    )


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    "augmented",
    [{}, {"shift": 0.3}, {"jitter": 1.5}, {"rescale": 2.0}, {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}],
    ids=lambda given: "+".join(given) or "none",
)
def test_draws_of_training_are_those_of_transformers(augmented: dict[str, float]) -> None:
    """The same seed, the same image; theirs forms angles of up to 60 radians in float32."""
    names = ("shift", "jitter", "rescale")
    rotary = (
        model("dinov3_vit")
        .DINOv3ViTRopePositionEmbedding(vit(**{f"pos_embed_{name}": augmented.get(name) for name in names}))
        .train()
    )
    own = RotaryDINOv3(8, **augmented).train()
    torch.manual_seed(7)
    theirs = rotary(torch.zeros(1, 3, 12, 20))
    torch.manual_seed(7)
    rotation = own.terms(Grid(3, 5)).one(Rotation)
    angles = rotation.query[0, 0].repeat(1, 2)
    for found, wanted in zip((angles.cos(), angles.sin()), theirs, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-5)
    again = own.terms(Grid(3, 5), Grid(3, 5)).one(Rotation)
    assert torch.equal(again.query, again.key), "queries and keys are one image"
    assert torch.equal(again.query, rotation.query) == (not augmented)
    assert torch.equal(own.eval().terms(Grid(3, 5)).one(Rotation).query, own.angles(Grid(3, 5)))


@pytest.mark.usefixtures("timm")
@DTYPES
@pytest.mark.parametrize("normalize", ["separate", "min", "max"])
@pytest.mark.parametrize("periods", [None, (0.5, 40.0)], ids=["base", "periods"])
def test_timms_rotation(periods: Any, normalize: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on an image of 3 x 5 patches; draws of training likewise. Periods and places are float32 in theirs
    unless they are asked for float64."""
    published = importlib.import_module("timm.layers.pos_embed_sincos")
    monkeypatch.setattr(published, "_build_grid", partial(published._build_grid, dtype=dtype))
    lowest, highest = periods or (None, None)
    own = RotaryDINOv3(8, base=50.0, periods=periods, normalize=normalize, rescale=1.5, jitter=1.25, shift=0.25)
    for training in (False, True) if dtype == torch.float32 else (False,):  # draws in float64 are others
        with running_in(dtype):
            module = published.RotaryEmbeddingDinoV3(
                8, temperature=50.0, min_period=lowest, max_period=highest, normalize_coords=normalize,
                shift_coords=0.25, jitter_coords=1.25, rescale_coords=1.5, dtype=dtype,
            ).train(training)  # fmt: skip
            module.periods = module._compute_periods(dtype=dtype)
            torch.manual_seed(3)
            embed = module.get_embed([3, 5])
        leaves = {name: tokens(2, 3, 15, 8, dtype=dtype) for name in ("q", "k", "v")}
        q, k, v = leaves.values()
        turned = [published.apply_rot_embed_cat(x, embed, half=True) for x in (q, k)]
        theirs = nn.functional.scaled_dot_product_attention(*turned, v)
        torch.manual_seed(3)
        ours = attention(q, k, v, position=own.train(training), queries=Grid(3, 5))
        layers_agree("rotary_dinov3", "timm RotaryEmbeddingDinoV3", ours, theirs, leaves)
