"""The hyperparameters of a training run. One recipe serves every mechanism, so that only position differs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, cast

from torch import nn

from relpos.core.checks import require_choice
from relpos.data import ImageTask, Task
from relpos.data.text import Text
from relpos.layers.block import MlpChoice
from relpos.layers.norms import HeadNormChoice, NormChoice
from relpos.models import LanguageModel, VisionTransformer
from relpos.models.attention_choice import AttentionChoice
from relpos.optim import parameter_groups
from relpos.train.optimizers import OPTIMIZERS, OptimizerName

Model = VisionTransformer | LanguageModel
Rates = dict[OptimizerName, tuple[float, float]]
"""The learning rate and the weight decay for each optimizer."""


@dataclass(frozen=True)
class Recipe(ABC):
    """How a model is built and trained. Subclasses' defaults were chosen on validation data (`recipes/`).

    Attributes:
        steps, batch_size: of training.
        learning_rate: the peak, after `warmup_steps` linear steps; then a cosine to 0.
        position_learning_rate_multiplier: factor on it for the parameters of position mechanisms.
        position_init_std: their initial standard deviation.
        optimizer: its name; `by` returns a recipe with another, at the rate and decay chosen for it.
        hessian_every: steps between Hessian estimates, if the optimizer uses them.
        weight_decay: decoupled, on matrices except position parameters.
        gradient_clip: the gradient's maximum norm.
        others: arguments of the model, see `of_the_model`.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    position_learning_rate_multiplier: float
    position_init_std: float
    weight_decay: float
    gradient_clip: float
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    shared_position: bool = True
    optimizer: OptimizerName = "adamw"
    hessian_every: int = 10
    attention: AttentionChoice = "full"
    num_kv_heads: int | None = None
    norm: NormChoice = "layernorm"
    qk_norm: HeadNormChoice | None = None

    @property
    @abstractmethod
    def rates(self) -> Rates:
        """The rate and decay chosen for each optimizer."""

    def by(self, optimizer: str) -> Self:
        """This recipe with another optimizer, at the rate and decay chosen for it."""
        require_choice(optimizer, "optimizer", OPTIMIZERS)
        name = cast("OptimizerName", optimizer)
        rate, decay = self.rates[name]
        return replace(self, optimizer=name, learning_rate=rate, weight_decay=decay)

    def to_json(self) -> dict[str, Any]:
        """Its fields; a `window` only where there is one, so that folders from before there were any are continued."""
        found = asdict(self)
        window = found.pop("window", None)
        return found if window is None else {**found, "window": list(window)}

    @staticmethod
    def of(task: Task) -> Recipe:
        """The default recipe for a task's kind."""
        return TextRecipe() if task.kind == "text" else ImageRecipe()

    def within(self, task: Task) -> Self:
        """This recipe with a batch no larger than the task's training data."""
        return replace(self, batch_size=min(self.batch_size, task.sizes["train"]))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step (from 0): linear warm-up, then a cosine to 0."""
        warmup = min(self.warmup_steps, self.steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """A model's parameters for an optimizer, at this recipe's rates and decay."""
        return parameter_groups(
            model,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            position_learning_rate_multiplier=self.position_learning_rate_multiplier,
        )

    def of_the_model(self) -> dict[str, Any]:
        """The fields that are arguments of relpos's own model; the other fields are for training."""
        return {
            "embed_dim": self.embed_dim,
            "depth": self.depth,
            "num_heads": self.num_heads,
            "mlp_ratio": self.mlp_ratio,
            "shared_position": self.shared_position,
            "position_init_std": self.position_init_std,
            "attention": self.attention,
            "num_kv_heads": self.num_kv_heads,
            "norm": self.norm,
            "qk_norm": self.qk_norm,
        }

    @abstractmethod
    def arguments(self, task: Task) -> dict[str, Any]:
        """The arguments of this recipe's model for a task, without position."""

    @abstractmethod
    def build(self, task: Task, position: str, *, grid: tuple[int, ...] | None = None) -> Model:
        """The model of this recipe for a task, with a position mechanism by name.

        Args:
            grid: tokens along each axis; default the task's own.
        """


def note_on_batch(recipe: Recipe, task: Task, asked: int | None = None) -> str | None:
    """A line if there are fewer training units than the recipe's or the requested batch size."""
    usual = Recipe.of(task).batch_size if asked is None else asked
    if recipe.batch_size >= usual:
        return None
    what = {"images": "images", "text": "bytes", "other": "inputs"}[task.kind]
    return f"Batches of {recipe.batch_size} instead of {usual}: there are {task.sizes['train']} training {what}."


IMAGE_RATES: Rates = {
    "adamw": (6e-3, 0.05),
    "lion": (3e-3, 0.1),
    "sophia-g": (1.5e-3, 0.2),
    "sophia-h": (1.5e-3, 0.2),
}
"""Chosen on validation images: `recipes/optimizer_search.py`."""


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """A vision transformer on images: `recipes/digits_search.py`."""

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

    @property
    def rates(self) -> Rates:
        return IMAGE_RATES

    def of_the_model(self) -> dict[str, Any]:
        return {**super().of_the_model(), "global_pool": self.global_pool, "class_token": self.class_token}

    def arguments(self, task: Task) -> dict[str, Any]:
        assert isinstance(task, ImageTask)
        return {
            "img_size": task.image_size,
            "patch_size": task.patch_size,
            "in_chans": task.channels,
            "num_classes": len(task.classes),
            **self.of_the_model(),
        }

    def build(self, task: Task, position: str, *, grid: tuple[int, ...] | None = None) -> VisionTransformer:
        arguments = self.arguments(task)
        if grid is not None:
            patch = cast("tuple[int, ...]", arguments["patch_size"])
            arguments["img_size"] = tuple(count * edge for count, edge in zip(grid, patch, strict=True))
        return VisionTransformer(**arguments, position=position)


TEXT_RATES: Rates = {
    "adamw": (6e-3, 0.1),
    "lion": (3e-3, 0.2),
    "sophia-g": (3e-3, 0.2),
    "sophia-h": (1.5e-3, 0.4),
}
"""Chosen on validation text: `recipes/optimizer_search.py`."""


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """A language model on text: `recipes/text_search.py`, with a fifth fewer steps: a dozen take five minutes."""

    steps: int = 480
    batch_size: int = 4
    learning_rate: float = 6e-3
    warmup_steps: int = 48
    position_learning_rate_multiplier: float = 10.0
    position_init_std: float = 0.1
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    embed_dim: int = 64
    depth: int = 4
    num_heads: int = 4
    mlp_ratio: float = 4.0
    norm: NormChoice = "rmsnorm"
    mlp: MlpChoice = "swiglu"
    window: tuple[int | None, ...] | None = None

    @property
    def rates(self) -> Rates:
        return TEXT_RATES

    def of_the_model(self) -> dict[str, Any]:
        window = self.window and self.window[: self.depth]  # costs are measured with fewer layers
        return {**super().of_the_model(), "mlp": self.mlp, "window": window}

    def arguments(self, task: Task) -> dict[str, Any]:
        assert isinstance(task, Text)
        return {
            "vocab_size": task.vocabulary,
            "context": task.length,
            **self.of_the_model(),
        }

    def build(self, task: Task, position: str, *, grid: tuple[int, ...] | None = None) -> LanguageModel:
        arguments = self.arguments(task)
        if grid is not None:
            (arguments["context"],) = grid
        return LanguageModel(**arguments, position=position)


OF_THE_MODEL = frozenset((*ImageRecipe().of_the_model(), *TextRecipe().of_the_model()))
"""Names of the fields that are arguments of relpos's own models."""
