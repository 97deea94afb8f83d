"""torchvision's ViT. Own position: one learned vector per token, added inside its encoder.

    patches -> class token in front -> encoder: own embedding OFF, mechanism -> blocks of `nn.MultiheadAttention`

The mechanisms know the grid: images need not be square, `resize_position` need change nothing of the model, and
mechanisms that are defined at any size take that of each image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.adapters.replacements.torch_attention import ATTENTION, RepositionedMultiheadAttention, served
from relpos.adapters.replacements.vit import absolute
from relpos.core import Grid
from relpos.core.checks import fail
from relpos.position import Site


class RepositionedTorchvisionViT(Repositioned):
    """`VisionTransformer`: makes patches of images of any size that the mechanisms take."""

    def _process_input(self, x: Tensor) -> Tensor:
        """Patches `[B, N, E]` of images `[B, channels, height, width]`."""
        patch = self.patch_size
        if x.shape[-2] % patch or x.shape[-1] % patch:
            came = f"images of {x.shape[-2]} x {x.shape[-1]} pixels"
            fail(f"images of whole patches, of {patch} x {patch} pixels", came, "Cut or scale them.")
        self.layer_position.take_grid((x.shape[-2] // patch, x.shape[-1] // patch))
        patches: Tensor = self.conv_proj(x).flatten(2).transpose(1, 2)
        return patches


class RepositionedTorchvisionEncoder(Repositioned):
    """`Encoder`: tokens get their position on the way in."""

    def forward(self, input: Tensor) -> Tensor:
        """The tokens `[B, N, E]` after all layers."""
        encoded: Tensor = self.ln(self.layers(self.dropout(self.layer_position.embed(input))))
        return encoded


def _vit(name: str, model: Any, given: Given) -> Iterator[Stack]:
    encoder = require_class(model.encoder, f"{_FILE}.Encoder")
    layers = tuple(served(require_class(block.self_attention, ATTENTION)) for block in encoder.layers)
    first: Any = layers[0]
    rows = model.image_size // model.patch_size
    site = Site(first.num_heads, first.head_dim, first.embed_dim, given.grid(Grid(rows, rows, prefix=1)))
    own: tuple[Own, ...] = (absolute("encoder.pos_embedding", encoder.pos_embedding),)
    tokens = ((model, RepositionedTorchvisionViT), (encoder, RepositionedTorchvisionEncoder))
    yield Stack(name, model, site, layers, RepositionedMultiheadAttention, own, tokens)


_FILE = "torchvision.models.vision_transformer"
STACKS = {f"{_FILE}.VisionTransformer": _vit}
READS = {
    f"{_FILE}.VisionTransformer": ("forward", "_process_input"),
    f"{_FILE}.Encoder": ("forward",),
    f"{_FILE}.EncoderBlock": ("forward",),
}
