"""Models with biases of distances: LeViT and what came after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, images
from relpos.adapters.libraries import imported

TABLES = ("attention_biases",)
UNPADDED = frozenset({"no padding", "windows", "training differs"})  # by batch norm
LIKE = UNPADDED | {"alike"}


def _forget(module: nn.Module, inputs: Any) -> None:
    """In `eval()` LeViT keeps its biases with the graph that made them: a second backward pass would fail."""
    for one in module.modules():
        if hasattr(one, "attention_bias_cache"):
            one.attention_bias_cache = {}


def _forgetful(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(_forget)
    return model


def _levit() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.LevitConfig(
        image_size=96,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    )
    return _forgetful(transformers.LevitModel(config))


def _timm(file: str, kind: str, **more: Any) -> nn.Module:
    timm = imported("timm")
    return _forgetful(getattr(getattr(timm.models, file), kind)(num_classes=5, **more))


def _states(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out[0],)


def _logits(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out,)


LEVIT = {"embed_dim": (16, 24), "num_heads": (2, 3), "depth": (1, 1), "key_dim": 8}

MODELS = [
    Model("levit", _levit, lambda: {"pixel_values": images(2, 96)}, _states, 1e-9, TABLES, tags=UNPADDED),
    Model(
        "timm levit",
        lambda: _timm("levit", "Levit", img_size=(64, 96), **LEVIT),
        lambda: images(2, (64, 96)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED,
    ),
    Model(
        "timm levit, channels first",
        lambda: _timm("levit", "Levit", img_size=(64, 96), use_conv=True, **LEVIT),
        lambda: images(2, (64, 96)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
    Model(
        "timm tiny_vit",
        lambda: _timm(
            "tiny_vit",
            "TinyVit",
            embed_dims=(16, 32),
            depths=(1, 2),
            num_heads=(2, 4),
            window_sizes=(4, 4),
        ),
        lambda: images(2, 32),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
    Model(
        "timm efficientformer",
        lambda: _timm("efficientformer", "EfficientFormer", depths=(1, 1, 1, 2), embed_dims=(8, 8, 16, 32), num_vit=1),
        lambda: images(2, 224),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
    Model(
        "timm efficientformer_v2",
        lambda: _timm(
            "efficientformer_v2",
            "EfficientFormerV2",
            depths=(1, 1, 1, 1),
            embed_dims=(8, 8, 16, 32),
            num_vit=0,
            img_size=128,
        ),
        lambda: images(2, 128),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED,
    ),
    Model(
        "timm efficientvit_msra",
        lambda: _timm(
            "efficientvit_msra",
            "EfficientVitMsra",
            img_size=64,
            embed_dim=(16, 24, 32),
            key_dim=(8, 8, 8),
            depth=(1, 1, 1),
            num_heads=(2, 2, 2),
            window_size=(3, 3, 3),
            kernels=(3, 3),
        ),
        lambda: images(2, 64),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE | {"no head order"},  # one head after another
    ),
]
