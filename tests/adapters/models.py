"""Small models of other libraries with random weights, and what they are called with.

The files `models_*.py` list them; the tests of `test_retrofit.py` run on all of them.
"""

import copy
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import relpos
from relpos.adapters.common.libraries import imported

FILES = ("models_text", "models_speech", "models_images", "models_volumes")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def hf(file: str, prefix: str, part: str = "Model", **settings: Any) -> nn.Module:
    """A model of transformers: of `models/t5/modeling_t5.py` "t5", of `models/donut/modeling_donut_swin.py`
    "donut/donut_swin"; the class of this prefix and part, and the configuration of the prefix."""
    folder, _, name = file.rpartition("/")
    library = imported(f"transformers.models.{folder or name}.modeling_{name}")
    made: nn.Module = getattr(library, prefix + part)(getattr(library, prefix + "Config")(**settings))
    return made


def timm(file: str, kind: str, **settings: Any) -> nn.Module:
    """A model of timm with five classes."""
    made: nn.Module = getattr(imported(f"timm.models.{file}"), kind)(num_classes=5, **settings)
    return made


def first(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """The first tensor that a model returns, or the only one."""
    return (out if isinstance(out, Tensor) else out[0],)


def at_real(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """The same at real tokens."""
    return (at_tokens(out[0], inputs["attention_mask"]),)


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
        tables: ends of the names of parameters that hold position and may start at zero.
        tags: "alike" for a model that has code in common with one before it, and runs the first test alone; "no sign",
            "no padding" and so on for a fault that it cannot have; "not reentrant" where the published model fails
            under reentrant checkpointing.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    outputs: Callable[[Any, Any], tuple[Tensor, ...]] = first
    exact: float = 1e-9
    tables: tuple[str, ...] = ()
    tags: AbstractSet[str] = frozenset()

    def made(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model in `eval()`, with tables that say something."""
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            for name, x in model.named_parameters():
                if name.endswith(self.tables):
                    x.add_(torch.randn_like(x) * 0.5)
                elif x.dim() > 1 and float(x.std()) < 1e-3:  # SAM's weights start at 1e-10
                    x.add_(torch.randn_like(x) * (x.numel() // x.shape[0]) ** -0.5)
        return model.to(dtype)

    def called(self, model: nn.Module) -> tuple[Tensor, ...]:
        """What a model returns on its inputs, in the model's dtype."""
        dtype = next(model.parameters()).dtype
        inputs = self.inputs()
        if isinstance(inputs, Tensor):
            return self.outputs(model(inputs.to(dtype)), inputs)
        cast = {key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}
        return self.outputs(model(**cast), inputs)


Step = tuple[tuple[Tensor, ...], dict[str, Tensor | None]]


def step(model: Model, module: nn.Module) -> Step:
    """Outputs, and the gradients of a fixed combination of them."""
    module.zero_grad(set_to_none=True)
    outputs = model.called(module)
    generator = torch.Generator().manual_seed(3)
    torch.autograd.backward(outputs, [torch.randn(x.shape, generator=generator).to(x) for x in outputs])
    return tuple(x.detach() for x in outputs), {key: x.grad for key, x in module.named_parameters() if x.requires_grad}


def assert_same(own: Step, theirs: Step, limit: float) -> None:
    """Outputs differ by no more than this part of their largest value, and so do gradients."""
    for x, y in zip(own[0], theirs[0], strict=True):
        assert x.shape == y.shape
        assert float((x - y).abs().max()) <= limit * float(y.abs().max())
    assert own[1].keys() == theirs[1].keys()
    largest = max(float(x.abs().max()) for x in theirs[1].values() if x is not None)
    for name, wanted in theirs[1].items():
        found = own[1][name]
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            limit_here = limit * max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((found - wanted).abs().max()) <= limit_here, name


def without_dropout(module: nn.Module) -> None:
    """Training mode saves activations; what it drops would differ."""
    for one in module.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_rate", "dropout_prob", "attn_drop_p", "drop_path_prob"):
            if isinstance(getattr(one, name, None), float):
                setattr(one, name, 0.0)


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


def sounds(batch: int, length: int, width: int | None = None) -> Tensor:
    """Samples, or frames of this width."""
    shape = (batch, length) if width is None else (batch, length, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def at_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """The real tokens of `[B, N, E]`."""
    return x[mask.bool()]


def read_in_parts(model: Any, cache: Any = None, *, padded: bool = True) -> Tensor:
    """What a model says of 20 tokens from the seventh on: 12 at once, the next 6 after a cache, then one at a time."""
    ids, mask, parts = tokens(3, 21), padding(3, 21, left=True), []
    cache = cache or imported("transformers").DynamicCache(config=model.config)
    for start, stop in ((0, 12), (12, 18), (18, 19), (19, 20)):
        more = {"attention_mask": mask[:, :stop]} if padded else {}
        parts.append(model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, **more)[0].detach())
    return torch.cat(parts, 1)[:, 6:]


def assert_writes_the_same(model: Any, *, verify: bool = True, **how: Any) -> None:
    """After the retrofit, too."""
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, left=True)}
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **how}
    published = model.generate(**inputs, **how)
    relpos.retrofit(model, border=0, verify=verify)
    assert torch.equal(model.generate(**inputs, **how), published)


def pair_of(name: str) -> tuple[Any, Any]:
    """A model as published, and retrofitted."""
    published = models()[name].made(torch.float32)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    return published, own
