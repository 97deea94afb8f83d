"""Training: a recipe, a loop, a checkpoint."""

from relpos.train.checkpoint import check_free, load, save
from relpos.train.evaluate import predict, right
from relpos.train.loop import PRECISIONS, Curve, Progress, require_precision, resolve_device, train
from relpos.train.recipe import Recipe, trained_grid

__all__ = [
    "PRECISIONS",
    "Curve",
    "Progress",
    "Recipe",
    "check_free",
    "load",
    "predict",
    "require_precision",
    "resolve_device",
    "right",
    "save",
    "train",
    "trained_grid",
]
