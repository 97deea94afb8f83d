"""Layers of torchvision, MONAI and speech toolkits for `retrofit.py`, each with the inputs that it is timed on.

A toolkit's layer is called as its encoder calls it: with the sinusoids of all distances and a mask of pairs or of
padding. Files of toolkits come from their wheels (`wheels.importable` must be open).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.libraries import imported


@dataclass(frozen=True)
class Case:
    """A model, and what it is timed on.

    Attributes:
        build: makes the model.
        inputs: the model's keyword arguments for a length.
        lengths: those that are timed.
        border: as in `relpos.retrofit`; None for the measured one.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int | None], dict[str, Any]]
    lengths: tuple[int, ...]
    border: int | None = None


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _pixels(*sizes: int) -> Callable[[int | None], dict[str, Any]]:
    return lambda length: {"x": _normal(1, 3, *sizes)}


def _swin(window: int) -> nn.Module:
    """The first stage of Swin V2: a layer with windows, and one with shifted windows."""
    library = imported("torchvision.models.swin_transformer")
    made: nn.Module = library.SwinTransformer(
        patch_size=[4, 4], embed_dim=96, depths=[2], num_heads=[3], window_size=[window, window],
        stochastic_depth_prob=0.0, block=library.SwinTransformerBlockV2, downsample_layer=library.PatchMergingV2,
    )  # fmt: skip
    return made


def _maxvit(pixels: int) -> nn.Module:
    """One block: attention within windows, two a side, and within as many coarse grids."""
    made: nn.Module = imported("torchvision.models.maxvit").MaxVit(
        (pixels, pixels), stem_channels=64, partition_size=pixels // 8, block_channels=[64], block_layers=[1],
        head_dim=32, stochastic_depth_prob=0.0,
    )  # fmt: skip
    return made


def _mvit() -> nn.Module:
    """Two layers like mvit_v2_s's inner ones: keys are pooled to half of all rows and columns."""
    library = imported("torchvision.models.video.mvit")
    layer = library.MSBlockConfig(
        num_heads=4, input_channels=384, output_channels=384, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3],
        stride_q=[1, 1, 1], stride_kv=[1, 2, 2],
    )  # fmt: skip
    still = library.MSBlockConfig(
        num_heads=4, input_channels=384, output_channels=384, kernel_q=[], kernel_kv=[3, 3, 3], stride_q=[],
        stride_kv=[1, 2, 2],
    )  # fmt: skip
    made: nn.Module = library.MViT(
        (224, 224), 16, [still, layer], residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, patch_embed_stride=(2, 16, 16),
    )  # fmt: skip
    return made


def _unetr() -> nn.Module:
    """The encoder of SwinUNETR: one layer in each of four stages, windows of 7 x 7 x 7, smaller in the last two."""
    made: nn.Module = imported("monai.networks.nets.swin_unetr").SwinTransformer(
        1, 48, window_size=(7, 7, 7), patch_size=(2, 2, 2), depths=(1, 1, 1, 1), num_heads=(3, 6, 12, 24)
    )
    return made


class _Conformer(nn.Module):
    """A toolkit's attention, 512 wide, with 8 heads."""

    def __init__(self, path: str, call: Callable[[Any, Tensor], Any], *settings: Any) -> None:
        super().__init__()
        file, _, name = path.rpartition(".")
        self.layer = getattr(importlib.import_module(file), name)(*settings)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        """Frames, `[B, T, 512]`."""
        return self.call(self.layer, x)


def _distances(x: Tensor, legacy: bool = False) -> Tensor:
    return _normal(1, x.shape[1] if legacy else 2 * x.shape[1] - 1, x.shape[2]).to(x)


def _espnet(layer: Any, x: Tensor, legacy: bool = False) -> Any:
    real = torch.ones(x.shape[0], 1, x.shape[1], dtype=torch.bool, device=x.device)
    return layer(x, x, x, _distances(x, legacy), real)


def _nemo(layer: Any, x: Tensor) -> Any:
    hidden = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    return layer(x, x, x, hidden, _distances(x))


def _speechbrain(layer: Any, x: Tensor) -> Any:
    padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    return layer(x, x, x, _distances(x), key_padding_mask=padded, return_attn_weights=False)


def _frames(length: int | None) -> dict[str, Any]:
    assert length is not None
    return {"x": _normal(1, length, 512)}


_ESPNET = "espnet.nets.pytorch_backend.transformer.attention"
_SPEECH: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "espnet": (f"{_ESPNET}.RelPositionMultiHeadedAttention", _espnet, (8, 512, 0.0)),
    "espnet, legacy": (
        f"{_ESPNET}.LegacyRelPositionMultiHeadedAttention",
        partial(_espnet, legacy=True),
        (8, 512, 0.0),
    ),
    "nemo": (
        "nemo.collections.asr.parts.submodules.multi_head_attention.RelPositionMultiHeadAttention",
        _nemo,
        (8, 512, 0.0, None, None),
    ),
    "speechbrain": ("speechbrain.nnet.attention.RelPosMHAXL", _speechbrain, (512, 8)),
}
CASES: dict[str, Case] = {
    **{
        f"torchvision swin_v2_t, four windows a side, {pixels} px": Case(
            partial(_swin, pixels // 16), _pixels(pixels, pixels), ()
        )
        for pixels in (256, 384, 512)
    },
    **{
        f"torchvision maxvit_t, two windows a side, {pixels} px": Case(
            partial(_maxvit, pixels), _pixels(pixels, pixels), ()
        )
        for pixels in (128, 192, 256)
    },
    "torchvision mvit_v2_s, border=0, 224 px": Case(_mvit, _pixels(16, 224, 224), (), border=0),
    "monai swin_unetr, encoder, 64 px": Case(_unetr, lambda length: {"x": _normal(1, 1, 64, 64, 64)}, ()),
    **{
        f"{name}, 512 wide": Case(partial(_Conformer, path, call, *settings), _frames, (1024, 1536, 2560))
        for name, (path, call, settings) in _SPEECH.items()
    },
}
"""Name to case; a name that ends in pixels has one size."""
