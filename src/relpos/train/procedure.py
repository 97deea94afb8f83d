"""A user's own functions to build, train and measure a comparison's models.

    build(position, task) -> nn.Module      instead of the recipe's model
    step(model, batch) -> loss              instead of the cross-entropy of `model(inputs)` and classes
    evaluate(model, split) -> figure        instead of accuracy, or bits per byte

A figure is a number, or a number for each unit of the split (such as each image), which makes intervals narrower. With
a step and no `evaluate`, the figure is the step's loss for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from relpos.core.checks import fail, shape_of
from relpos.data import ImageTask, Split, Task, Text
from relpos.train.optimizers import cross_entropy
from relpos.train.recipe import Recipe
from relpos.train.scores import scores_of

Build = Callable[[str, Task], nn.Module]
TrainingStep = Callable[[nn.Module, Any], Tensor]
Better = Literal["higher", "lower"]


class SplitBatches:
    """The argument of `evaluate`: each iteration gives all batches of a split, on a device.

    Attributes:
        name: "validation" or "test".
    """

    def __init__(self, task: Task, name: Split, batch_size: int, device: torch.device, at_most: int | None) -> None:
        self.name = name
        self._task, self._batch_size, self._device, self._at_most = task, batch_size, device, at_most

    def __iter__(self) -> Iterator[Any]:
        for count, batch in enumerate(self._task.once(self.name, self._batch_size)):
            if count == self._at_most:
                return
            yield to_device(batch, self._device)


Evaluate = Callable[[nn.Module, SplitBatches], Any]


@dataclass(frozen=True)
class Procedure:
    """A user's own functions; None selects relpos's.

    Attributes:
        build, step, evaluate: as in the docstring of this module.
        better: whether higher or lower values of `evaluate` are better.
    """

    build: Build | None = None
    step: TrainingStep | None = None
    evaluate: Evaluate | None = None
    better: Better = "lower"

    @property
    def measures(self) -> bool:
        """Whether the metric is a user's own figure."""
        return self.step is not None or self.evaluate is not None

    @property
    def is_ours(self) -> bool:
        """Whether all functions are relpos's."""
        return self.build is None and not self.measures

    def model(self, recipe: Recipe, task: Task, position: str) -> nn.Module:
        """The model with a position.

        Raises:
            ValueError: `build` fails, or does not return a module.
        """
        if self.build is None:
            return recipe.build(task, position)
        with _called("build(position, task) to return a model", position):
            model = self.build(position, task)
        if not isinstance(model, nn.Module):
            fail("a torch.nn.Module from build(position, task)", shape_of(model), "Return the model that it builds.")
        return model

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """The loss of a batch.

        Raises:
            ValueError: the step does not return a scalar tensor.
        """
        if self.step is None:
            inputs, classes = batch
            return cross_entropy(scores_of(model, inputs), classes)
        loss = self.step(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            fail("one number as a tensor from step(model, batch)", shape_of(loss), "Return the mean of the losses.")
        return loss.reshape(())

    @torch.no_grad()
    def figures(
        self, model: nn.Module, task: Task, split: Split, device: torch.device, batch_size: int, *, at_most: int | None
    ) -> Float[Tensor, " units"]:
        """The result of `evaluate`, or the step's loss of each batch. Leaves the model in evaluation mode.

        Args:
            at_most: largest number of batches; None for all.
        """
        model.eval()
        batches = SplitBatches(task, split, batch_size, device, at_most)
        if self.evaluate is None:
            return torch.stack([self.loss(model, batch).double().cpu() for batch in batches])
        figure = self.evaluate(model, batches)
        try:
            found = torch.as_tensor(figure, dtype=torch.float64).cpu()
        except (TypeError, ValueError, RuntimeError):
            found = torch.empty(0)
        if found.dim() > 1 or found.numel() == 0:
            remedy = "Return a float, or a tensor with one number for each unit."
            fail("a number, or one for each unit, from evaluate(model, split)", shape_of(figure), remedy)
        return found.reshape(-1)

    def tried(self, recipe: Recipe, task: Task, position: str) -> nn.Module:
        """The model. With a user's own functions, first run one small batch to find mistakes early.

        Raises:
            ValueError: a function fails, or returns a wrong type or shape.
        """
        model = self.model(recipe, task, position)
        if self.is_ours:
            return model
        batch = next(task.batches(min(2, recipe.batch_size), 0))
        model.train()
        if self.step is not None:
            with _called("step(model, batch) to return a loss", position):
                loss = self.loss(model, batch)
            if not loss.requires_grad:
                fail("a loss that depends on the model's parameters", "one without a gradient", "Do not detach it.")
        else:
            self._require_scores(model, task, batch, position)
        if self.measures:
            with _called("evaluate(model, split) to return a figure", position):
                self.figures(model, task, "validation", torch.device("cpu"), min(2, recipe.batch_size), at_most=1)
        return model

    def _require_scores(self, model: nn.Module, task: Task, batch: Any, position: str) -> None:
        """Raise unless the model returns scores that cross-entropy takes."""
        if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)):
            fail("batches of (inputs, classes)", shape_of(batch), "Pass your own step(model, batch) -> loss.")
        inputs, classes = batch
        if classes.is_floating_point():
            fail("classes as integers", shape_of(classes), "Pass your own step(model, batch) -> loss.")
        with torch.no_grad(), _called("the model to take a batch of inputs", position):
            scores = scores_of(model, inputs)
        count = (
            len(task.classes) if isinstance(task, ImageTask) else task.vocabulary if isinstance(task, Text) else None
        )
        remedy = "Build the model for them, or pass your own step(model, batch) -> loss."
        shape = (*classes.shape, "classes" if count is None else count)
        if (
            not isinstance(scores, Tensor)
            or scores.shape[:-1] != classes.shape
            or (count is not None and scores.shape[-1] != count)
        ):
            fail(f"scores of shape ({', '.join(map(str, shape))}) from the model", shape_of(scores), remedy)


OURS = Procedure()


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors, however nested, on a device."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), batch)


@contextmanager
def _called(expected: str, position: str) -> Iterator[None]:
    """Turn an error of a user's function into one line; errors in relpos's form pass through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("expected "):
            raise
        said = " ".join(str(error).split())
        came = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise ValueError(f"expected {expected}; got {came} for the position {position!r}. Correct it.") from error
