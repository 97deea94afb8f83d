"""Inputs for a whole model of another library, at a requested length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos.core.checks import fail

ModelInputs = dict[str, Tensor]


def takes_images(model: nn.Module) -> bool:
    """Whether a model's input is an image, whose size the model fixes."""
    return getattr(model, "main_input_name", "pixel_values") == "pixel_values"


def inputs_for(model: Any, length: int | None, batch: int = 1) -> ModelInputs:
    """Random inputs: tokens or frames of the given length, or images of the model's size.

    Raises:
        ValueError: the model takes another kind of input.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    if not hasattr(model, "main_input_name"):  # timm or torchvision
        if type(model).__module__.startswith("torchvision."):
            pixels = (3, 16, 224, 224) if ".video." in type(model).__module__ else (3, 224, 224)
            return {"x": torch.randn(batch, *pixels, generator=generator).to(device)}
        size = model.pretrained_cfg.get("input_size", (3, 224, 224))
        built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
        size = size if built_for is None else (size[0], *built_for)
        return {"x": torch.randn(batch, *size, generator=generator).to(device)}
    name, config = model.main_input_name, model.config
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        return {name: torch.randn(batch, channels, height, width, generator=generator).to(device)}
    assert length is not None
    if config.model_type == "phi4_multimodal_audio":
        frames = torch.randn(batch, length, config.input_size, generator=generator).to(device)
        return {"hidden_states": frames, "mask": torch.ones(batch, length, dtype=torch.bool, device=device)}
    if name == "input_ids":
        ids = torch.randint(3, config.vocab_size, (batch, length), generator=generator).to(device)
        inputs = {name: ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        if config.model_type == "udop":  # boxes as fractions of the page
            inputs["bbox"] = torch.rand(batch, length, 4, generator=generator).to(device)
        return inputs
    if name == "input_features":
        width = next((getattr(config, key) for key in _FEATURES if getattr(config, key, None)), None)
        encoder = getattr(config, "encoder_config", None)
        width = getattr(encoder, "num_mel_bins", 80) if width is None else width
        return {name: torch.randn(batch, length, width, generator=generator).to(device)}
    if name == "input_values":
        return {name: torch.randn(batch, length, generator=generator).to(device)}
    fail("a model of tokens, images or audio", f"{type(model).__name__}, which takes {name}", "Time it by hand.")


_FEATURES = ("feature_projection_input_dim", "num_mel_bins", "input_dim")
