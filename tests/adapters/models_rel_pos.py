"""timm's models with its modules of relative position."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, images
from relpos.adapters.libraries import imported

TABLES = ("relative_position_bias_table", "mlp.fc2.weight")
UNPADDED = frozenset({"no padding", "windows", "training differs"})  # by batch norm
LIKE = UNPADDED | {"alike"}


def _vit(**more: Any) -> nn.Module:
    timm = imported("timm")
    made: nn.Module = timm.models.vision_transformer_relpos.VisionTransformerRelPos(
        img_size=(32, 24), patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5, **more
    )
    return made


def _maxxvit(kind: str, conv: bool = False) -> nn.Module:
    timm = imported("timm")
    maxxvit = timm.models.maxxvit
    transformer = maxxvit.MaxxVitTransformerCfg(
        dim_head=8, window_size=(4, 4), grid_size=(4, 4), rel_pos_type=kind, rel_pos_dim=16, use_nchw_attn=conv
    )
    config = maxxvit.MaxxVitCfg(
        embed_dim=(16, 32),
        depths=(1, 1),
        block_type=("C", "T" if conv else "M"),
        stem_width=8,
        transformer_cfg=transformer,
    )
    made: nn.Module = maxxvit.MaxxVit(config, img_size=32, num_classes=5)
    return made


def _gcvit() -> nn.Module:
    timm = imported("timm")
    made: nn.Module = timm.models.gcvit.GlobalContextVit(
        img_size=32, window_size=(4, 2), depths=(2, 1), num_heads=(2, 4), embed_dim=16, num_classes=5
    )
    return made


def _logits(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out,)


def _square() -> Tensor:
    return images(2, 32)


MODELS = [
    Model(
        "timm vision_transformer_relpos",
        lambda: _vit(rel_pos_type="bias", class_token=True, global_pool="token"),
        lambda: images(2, (32, 24)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED,
    ),
    Model(
        "timm vision_transformer_relpos, a network",
        lambda: _vit(rel_pos_type="mlp", rel_pos_dim=16),
        lambda: images(2, (32, 24)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
    Model(
        "timm vision_transformer_relpos, one for all layers",
        lambda: _vit(rel_pos_type="mlp", rel_pos_dim=16, shared_rel_pos=True),
        lambda: images(2, (32, 24)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        UNPADDED - {"windows"},
    ),
    Model("timm maxxvit", lambda: _maxxvit("bias_tf"), _square, _logits, 1e-9, TABLES, "timm", LIKE),
    Model("timm maxxvit, channels first", lambda: _maxxvit("mlp", True), _square, _logits, 1e-9, TABLES, "timm", LIKE),
    Model("timm gcvit", _gcvit, _square, _logits, 1e-9, TABLES, "timm", UNPADDED),
]
