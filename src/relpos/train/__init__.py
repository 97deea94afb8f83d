"""Training: a recipe and a loop."""

from relpos.train.loop import PRECISIONS, Curve, Progress, predict, resolve_device, train
from relpos.train.recipe import Recipe, trained_grid

__all__ = ["PRECISIONS", "Curve", "Progress", "Recipe", "predict", "resolve_device", "train", "trained_grid"]
