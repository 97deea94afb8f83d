"""Models with tables of windows: Swin, its copies, and Swin V2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models import Model, images
from relpos.adapters.libraries import imported

TABLES = ("relative_position_bias_table", "mlp.2.weight", "meta_mlp.fc2.weight")
SMALL = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
LIKE = frozenset({"no padding", "windows", "alike"})
UNPADDED = frozenset({"no padding", "windows"})


def _build(config: str, model: str, **more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**SMALL, **more}))
    return made


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": images(2, 32)}


def _states(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out[0],)


def _clap() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.ClapAudioConfig(
        spec_size=32,
        num_mel_bins=8,
        patch_size=4,
        patch_stride=[4, 4],
        patch_embeds_hidden_size=16,
        hidden_size=32,
        depths=[2, 1],
        num_attention_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    )
    made: nn.Module = transformers.ClapAudioModel(config)
    return made


def _clap_inputs() -> dict[str, Tensor]:
    features = torch.randn(2, 1, 128, 8, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "is_longer": torch.zeros(2, 1, dtype=torch.bool)}


def _maskformer() -> nn.Module:
    module = imported("transformers.models.maskformer.modeling_maskformer_swin")
    made: nn.Module = module.MaskFormerSwinModel(module.MaskFormerSwinConfig(**SMALL))
    return made


def _timm(file: str, kind: str, **more: Any) -> nn.Module:
    timm = imported("timm")
    made: nn.Module = getattr(getattr(timm.models, file), kind)(
        img_size=32,
        patch_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 4),
        window_size=4,
        num_classes=5,
        drop_path_rate=0.0,
        **more,
    )
    return made


def _logits(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out,)


MODELS = [
    Model("swin", lambda: _build("SwinConfig", "SwinModel"), _pixels, _states, 1e-9, TABLES, tags=UNPADDED),
    Model(
        "swin, eager",
        lambda: _build("SwinConfig", "SwinModel", attn_implementation="eager"),
        _pixels,
        _states,
        1e-6,
        TABLES,
        tags=LIKE,
    ),
    Model("donut", lambda: _build("DonutSwinConfig", "DonutSwinModel"), _pixels, _states, 1e-9, TABLES, tags=UNPADDED),
    Model("maskformer", _maskformer, _pixels, _states, 1e-9, TABLES, tags=LIKE),
    Model("clap", _clap, _clap_inputs, _states, 1e-9, TABLES, tags=LIKE),
    Model("swinv2", lambda: _build("Swinv2Config", "Swinv2Model"), _pixels, _states, 1e-9, TABLES, tags=UNPADDED),
    Model(
        "swin2sr",
        lambda: _build("Swin2SRConfig", "Swin2SRModel", image_size=8, patch_size=1),
        lambda: {"pixel_values": images(2, 8)},
        _states,
        1e-9,
        TABLES,
        tags=LIKE,
    ),
    Model(
        "timm swin_transformer",
        lambda: _timm("swin_transformer", "SwinTransformer"),
        lambda: images(2, 32),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED,
    ),
    Model(
        "timm swin_transformer_v2",
        lambda: _timm("swin_transformer_v2", "SwinTransformerV2"),
        lambda: images(2, 32),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
    Model(
        "timm swin_transformer_v2_cr",
        lambda: _timm("swin_transformer_v2_cr", "SwinTransformerV2Cr"),
        lambda: images(2, 32),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED,
    ),
]
