"""Training: a recipe, a loop, a checkpoint."""

from relpos.train.checkpoint import check_free, load, save
from relpos.train.evaluate import bits, measured, predict, right, validated
from relpos.train.hierarchy import build_swin
from relpos.train.loop import (
    AUTOCAST,
    PRECISIONS,
    Curve,
    DivergedError,
    Progress,
    require_precision,
    resolve_device,
    train,
)
from relpos.train.optimizers import OPTIMIZERS, OptimizerName, cross_entropy, estimate_hessian, make_optimizer
from relpos.train.recipe import ImageRecipe, Model, Recipe, TextRecipe

__all__ = [
    "AUTOCAST",
    "OPTIMIZERS",
    "PRECISIONS",
    "Curve",
    "DivergedError",
    "ImageRecipe",
    "Model",
    "OptimizerName",
    "Progress",
    "Recipe",
    "TextRecipe",
    "bits",
    "build_swin",
    "check_free",
    "cross_entropy",
    "estimate_hessian",
    "load",
    "make_optimizer",
    "measured",
    "predict",
    "require_precision",
    "resolve_device",
    "right",
    "save",
    "train",
    "validated",
]
