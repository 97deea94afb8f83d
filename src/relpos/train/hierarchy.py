"""The Swin Transformer of an image comparison with `--model swin`, sized for small data."""

from __future__ import annotations

from relpos.core.checks import fail
from relpos.data import ImageTask, Task
from relpos.models import SwinTransformer
from relpos.train.recipe import ImageRecipe


def build_swin(position: str, task: Task) -> SwinTransformer:
    """A small Swin Transformer for a task of images: two stages of two blocks, windows of 4 x 4 patches.

    Equal to the ViT of a comparison (`ImageRecipe`): its last width, the MLP, the pooling, one position for all layers
    of a stage, and the initial standard deviation of positions. "own" is a table of offsets.

    Raises:
        ValueError: the task has no images.
    """
    if not isinstance(task, ImageTask):
        fail("images for a Swin Transformer", f"the task {task.name!r}", "Leave the model out, or compare on images.")
    usual = ImageRecipe()
    return SwinTransformer(
        img_size=task.image_size,
        patch_size=task.patch_size,
        in_chans=task.channels,
        num_classes=len(task.classes),
        global_pool="max",
        embed_dim=usual.embed_dim // 2,
        depths=(2, 2),
        num_heads=(usual.num_heads // 2, usual.num_heads),
        window_size=4,
        mlp_ratio=usual.mlp_ratio,
        position=position,
        shared_position=usual.shared_position,
        position_init_std=usual.position_init_std,
    )
