"""Models that take any position mechanism, and weights into and out of them."""

from relpos.models.language import LanguageModel
from relpos.models.loading import LoadReport, load_weights
from relpos.models.parameters import Count, count_parameters
from relpos.models.positions import RotaryChoice
from relpos.models.swin import SwinTransformer
from relpos.models.vit import VisionTransformer

__all__ = [
    "Count",
    "LanguageModel",
    "LoadReport",
    "RotaryChoice",
    "SwinTransformer",
    "VisionTransformer",
    "count_parameters",
    "load_weights",
]
