"""The small models that the tests of both transformers take."""

from typing import Any

from relpos import LanguageModel, VisionTransformer


def image(**arguments: Any) -> VisionTransformer:
    small = {"img_size": (6, 8), "patch_size": 2, "in_chans": 1, "num_classes": 5, "embed_dim": 12, "depth": 2}
    return VisionTransformer(**{**small, "num_heads": 3, "mlp_ratio": 2.0, "position_init_std": 0.5, **arguments})


def text(**arguments: Any) -> LanguageModel:
    small = {"vocab_size": 7, "context": 9, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_kv_heads": 2}
    return LanguageModel(**{**small, "mlp_ratio": 2.0, "position_init_std": 0.5, **arguments})
