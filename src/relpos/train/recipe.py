"""The numbers of a training run. One recipe serves every mechanism, so that only position differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from relpos.core import Grid
from relpos.data import Task
from relpos.models import VisionTransformer


@dataclass(frozen=True)
class Recipe:
    """How a model is built and trained. The defaults were chosen on validation data: `recipes/digits_search.py`.

    Attributes:
        steps, batch_size: of training.
        learning_rate: the highest, reached after `warmup_steps` linear steps, then down a cosine to 0.
        position_learning_rate_multiplier: factor on it for the parameters that position mechanisms own.
        position_init_std: standard deviation those parameters start from.
        weight_decay: of AdamW, on matrices that are not position's.
        gradient_clip: the largest norm of the gradient.
        embed_dim, depth, num_heads, mlp_ratio, global_pool, class_token, shared_position: of the model.
    """

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 6e-3
    warmup_steps: int = 40
    position_learning_rate_multiplier: float = 10.0
    position_init_std: float = 0.5
    weight_decay: float = 0.05
    gradient_clip: float = 1.0
    embed_dim: int = 48
    depth: int = 2
    num_heads: int = 4
    mlp_ratio: float = 2.0
    global_pool: Literal["token", "avg", "max"] = "max"
    class_token: bool = False
    shared_position: bool = True

    def within(self, task: Task) -> Self:
        """This recipe with a batch no larger than the task's training images."""
        return replace(self, batch_size=min(self.batch_size, task.sizes["train"]))

    def arguments(self, task: Task) -> dict[str, Any]:
        """What builds the model of this recipe for a task, apart from its position: `VisionTransformer`'s arguments."""
        return {
            "img_size": task.image_size,
            "patch_size": task.patch_size,
            "in_chans": task.channels,
            "num_classes": len(task.classes),
            "global_pool": self.global_pool,
            "embed_dim": self.embed_dim,
            "depth": self.depth,
            "num_heads": self.num_heads,
            "mlp_ratio": self.mlp_ratio,
            "class_token": self.class_token,
            "shared_position": self.shared_position,
            "position_init_std": self.position_init_std,
        }

    def build(self, task: Task, position: str, *, img_size: tuple[int, int] | None = None) -> VisionTransformer:
        """The model of this recipe for a task, with a position mechanism by name."""
        arguments = self.arguments(task)
        if img_size is not None:
            arguments["img_size"] = img_size
        return VisionTransformer(**arguments, position=position)


def trained_grid(model: VisionTransformer) -> Grid:
    """The grid of patches a model was built for."""
    return Grid(*model.patch_embed.grid_size, prefix=model.prefix)
