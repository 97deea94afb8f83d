"""A model of torchvision by name, with random weights, at the size of the data.

torchvision's constructors fix the patch and take three channels, and its ViT takes square images alone. So the
convolution that reads the pixels is made anew for the patch and channels of the data.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

import torch
from torch import nn

from relpos.adapters.common.kinds import path_of
from relpos.adapters.common.libraries import imported, require_importable
from relpos.adapters.replacing import OWN, replace_position
from relpos.core.checks import fail
from relpos.data import ImageTask

_VIT = "torchvision.models.vision_transformer.VisionTransformer"
_SWIN = "torchvision.models.swin_transformer.SwinTransformer"
_MAXVIT = "torchvision.models.maxvit.MaxVit"


def require_torchvision_name(name: str) -> None:
    """Raise unless torchvision has a model of this name."""
    require_importable("torchvision")
    known = imported("torchvision.models").list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        remedy = f"Did you mean {', '.join(near)}?" if near else "torchvision.models.list_models() has their names."
        fail("the name of a model of torchvision", repr(name), remedy)


def torchvision_model(name: str, **arguments: Any) -> Any:
    """torchvision's model of that name with random weights."""
    return imported("torchvision.models").get_model(name, weights=None, **arguments)


def torchvision_patch(name: str) -> tuple[int, int] | None:
    """Height and width of the published model's patch; None without one."""
    with torch.device("meta"):
        model = torchvision_model(name)
    if path_of(type(model)) not in (_VIT, _SWIN):
        return None
    height, width = _pixels_of(model).kernel_size
    return height, width


def fitted_torchvision_model(name: str, task: ImageTask) -> nn.Module:
    """The model of that name for the images of a task.

    Raises:
        ValueError: its position is unknown, or it cannot take images of this size.
    """
    with torch.device("meta"):
        published = torchvision_model(name)
    kind, classes = path_of(type(published)), len(task.classes)
    if kind == _VIT:
        (height, width), (rows, columns) = task.grid, task.patch_size
        if height != width or rows != columns:
            came = " x ".join(map(str, task.image_size))
            fail(f"square images and patches for {name} of torchvision", came, "Pass --image-size, or another model.")
        made = torchvision_model(name, image_size=height * published.patch_size, num_classes=classes)
        made.conv_proj = _for_data(made.conv_proj, task, task.patch_size)
        made.image_size, made.patch_size = task.image_size[0], rows
    elif kind == _SWIN:
        made = torchvision_model(name, num_classes=classes)
        made.features[0][0] = _for_data(made.features[0][0], task, task.patch_size)
    elif kind == _MAXVIT:
        try:
            made = torchvision_model(name, input_size=task.image_size, num_classes=classes)
        except ValueError as error:
            reason = " ".join(str(error).split())
            fail(f"an image size for {name} of torchvision", reason, "Its windows of 7 x 7 need multiples of 224.")
        made.stem[0][0] = _for_data(made.stem[0][0], task)
    else:
        replace_position(published, OWN)  # raises if it has no known attention
        fail("a ViT, Swin or MaxViT of torchvision", name, "Pass build(position, task) instead.")
    model: nn.Module = made
    return model


def _pixels_of(model: Any) -> nn.Conv2d:
    """The convolution that makes patches of pixels."""
    found: nn.Conv2d = model.conv_proj if path_of(type(model)) == _VIT else model.features[0][0]
    return found


def _for_data(published: Any, task: ImageTask, patch: tuple[int, int] | None = None) -> nn.Conv2d:
    """The convolution for the channels of the data, and their patch if it makes patches; started as a ViT's is."""
    kernel, stride = (published.kernel_size, published.stride) if patch is None else (patch, patch)
    if (task.channels, kernel) == (published.in_channels, published.kernel_size):
        kept: nn.Conv2d = published
        return kept
    bias = published.bias is not None
    made = nn.Conv2d(task.channels, published.out_channels, kernel, stride, published.padding, bias=bias)
    nn.init.trunc_normal_(made.weight, std=math.sqrt(1 / made.weight[0].numel()))
    if made.bias is not None:
        nn.init.zeros_(made.bias)
    return made
