"""Images to tokens, by a convolution with stride equal to its kernel (Dosovitskiy et al. 2021, section 3.1)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Grid
from relpos.core.checks import fail, is_dense, require_int, require_like, shape_of


def pair(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """A size, given as an integer or as (rows, columns), as (rows, columns)."""
    both = (size, size) if isinstance(size, int) else size
    if not isinstance(both, tuple | list) or len(both) != 2:
        fail(f"{name} to be one integer or (rows, columns)", shape_of(size), f"Pass {name}=16 or {name}=(16, 24).")
    for size in both:
        require_int(size, name, at_least=1)
    return both[0], both[1]


class PatchEmbedding(nn.Module):
    """One token per patch, in raster order.

    Images `[B, C, height, width]` to tokens `[B, N, E]`.

    Args:
        img_size: default (rows, columns) of an image, or one integer; other multiples of the patch size are accepted.
        patch_size: (rows, columns) of a patch, or one integer.
        in_chans: channels of an image.
        embed_dim: width of a token, E.

    Raises:
        ValueError: sizes that do not divide; in use, images of another shape, dtype or device.

    Examples:
        >>> embed = relpos.PatchEmbedding(img_size=32, patch_size=8, in_chans=3, embed_dim=64)
        >>> embed(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 16, 64])
        >>> embed.grid((48, 32))  # where the patches of another image are
        Grid(6, 4)
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
    ) -> None:
        super().__init__()
        require_int(in_chans, "in_chans", at_least=1)
        require_int(embed_dim, "embed_dim", at_least=1)
        self.patch_size = pair(patch_size, "patch_size")
        self.grid_size = self.grid(pair(img_size, "img_size")).sizes
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=self.patch_size, stride=self.patch_size)

    def grid(self, img_size: tuple[int, int], prefix: int = 0) -> Grid:
        """The grid of patches of an image of this size.

        Raises:
            ValueError: it is not a multiple of the patch size.
        """
        rows, columns = img_size
        if rows % self.patch_size[0] or columns % self.patch_size[1]:
            wanted = f"an image size divisible by the patch size {self.patch_size}"
            fail(wanted, str((rows, columns)), "Pad or crop the image, or choose another patch size.")
        return Grid(rows // self.patch_size[0], columns // self.patch_size[1], prefix=prefix)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N E"]:
        channels = self.proj.in_channels
        dense = isinstance(images, Tensor) and is_dense(images)
        shaped = dense and images.dim() == 4 and images.shape[1] == channels
        if not shaped or not images.is_floating_point():
            wanted = f"floating-point images of shape [B, {channels}, rows, columns]"
            fail(wanted, shape_of(images), "Check in_chans, and convert bytes to numbers from 0 to 1.")
        require_like(images, "images", self.proj.weight)
        self.grid((images.shape[2], images.shape[3]))
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens
