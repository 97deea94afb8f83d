"""Training: a recipe, a loop, a checkpoint."""

from relpos.train.checkpoint import check_free, load, save
from relpos.train.curve import Curve, DivergedError, Progress
from relpos.train.evaluate import bits, measured, predict, right, validated
from relpos.train.hierarchy import build_swin
from relpos.train.loop import fit, train
from relpos.train.optimizers import OPTIMIZERS, OptimizerName, cross_entropy, estimate_hessian, make_optimizer
from relpos.train.precision import AUTOCAST, PRECISIONS, require_precision
from relpos.train.procedure import OURS, Build, Evaluate, Procedure, SplitBatches, TrainingStep, to_device
from relpos.train.processes import resolve_device
from relpos.train.recipe import OF_THE_MODEL, ImageRecipe, Model, Recipe, TextRecipe, note_on_batch
from relpos.train.run import TrainingRun
from relpos.train.scores import scores_of

__all__ = [
    "AUTOCAST",
    "OF_THE_MODEL",
    "OPTIMIZERS",
    "OURS",
    "PRECISIONS",
    "Build",
    "Curve",
    "DivergedError",
    "Evaluate",
    "ImageRecipe",
    "Model",
    "OptimizerName",
    "Procedure",
    "Progress",
    "Recipe",
    "SplitBatches",
    "TextRecipe",
    "TrainingRun",
    "TrainingStep",
    "bits",
    "build_swin",
    "check_free",
    "cross_entropy",
    "estimate_hessian",
    "fit",
    "load",
    "make_optimizer",
    "measured",
    "note_on_batch",
    "predict",
    "require_precision",
    "resolve_device",
    "right",
    "save",
    "scores_of",
    "to_device",
    "train",
    "validated",
]
