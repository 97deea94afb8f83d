"""Small models of other libraries with random weights, and what they are called with.

A file a kind of position (`models_*.py`) lists its models; the tests of `test_retrofit.py` run on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.libraries import imported

FILES = (
    "models_t5",
    "models_boxes",
    "models_disentangled",
    "models_decomposed",
    "models_slopes",
    "models_transformer_xl",
    "models_shaw",
    "models_gated_bias",
    "models_windows",
    "models_beit",
    "models_rel_pos",
    "models_distances",
)


@dataclass(frozen=True)
class Model:
    """A model to retrofit.

    Attributes:
        name: architecture, and what is special.
        build: makes it in float32; called under a fixed seed. Positions are switched on.
        inputs: what it is called with: keyword arguments, or a tensor for models that take one.
        outputs: picks the tensors to compare from what it returns; at real tokens alone.
        exact: largest difference in float64, relative to the largest value; 1e-6 where a softmax or norm of the
            library is computed in float32.
        tags: "alike" for a model that has code in common with one before it, and runs the first test alone; "no sign",
            "no padding" and so on for a fault that it cannot have; "not reentrant" where the published model fails
            under reentrant checkpointing.
        tables: ends of the names of parameters that hold position and may start at zero.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    outputs: Callable[[Any, Any], tuple[Tensor, ...]]
    exact: float = 1e-9
    tables: tuple[str, ...] = ()
    library: str = "transformers"
    tags: frozenset[str] = field(default_factory=frozenset)

    def made(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model in `eval()`, with tables that say something."""
        imported(self.library)
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            for name, x in model.named_parameters():
                if name.endswith(self.tables):
                    x.add_(torch.randn_like(x) * 0.5)
        return model.to(dtype)

    def called(self, model: nn.Module) -> tuple[Tensor, ...]:
        """What a model returns on its inputs, in the model's dtype."""
        dtype = next(model.parameters()).dtype
        inputs = self.inputs()
        if isinstance(inputs, Tensor):
            return self.outputs(model(inputs.to(dtype)), inputs)
        cast = {key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}
        return self.outputs(model(**cast), inputs)


@cache
def models() -> dict[str, Model]:
    """All models by name."""
    return {model.name: model for file in FILES for model in import_module(file).MODELS}


def tokens(batch: int, length: int, vocabulary: int = 90, seed: int = 0) -> Tensor:
    """Token indices from 3 on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)


def padding(batch: int, length: int, *, left: bool = False) -> Tensor:
    """`[batch, length]`, 1 at real tokens: row r has 3 r padded ones."""
    order = torch.arange(length).flip(0) if left else torch.arange(length)
    return (order < length - 3 * torch.arange(batch)[:, None]).long()


def images(batch: int, size: int | tuple[int, int], channels: int = 3) -> Tensor:
    """Pixels."""
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(0))


def at_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """The real tokens of `[B, N, E]`."""
    return x[mask.bool()]
