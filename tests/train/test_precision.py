"""What stays in float32 under mixed precision: the norms, the softmax, and what positions say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from relpos.core import Terms
from relpos.layers import MultiHeadAttention
from relpos.layers.norms import GroupNorm
from relpos.models import LanguageModel, VisionTransformer

HALVES = [torch.bfloat16, torch.float16]


def image_model(**options: Any) -> tuple[nn.Module, Tensor]:
    small = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 3, "embed_dim": 32, "depth": 1}
    own = {"num_heads": 4, "class_token": False, "global_pool": "max"}
    return VisionTransformer(**{**small, **own, **options}), torch.randn(2, 1, 8, 8)


def text_model(**options: Any) -> tuple[nn.Module, Tensor]:
    model = LanguageModel(vocab_size=20, context=32, embed_dim=32, depth=1, num_heads=4, **options)
    return model, torch.randint(20, (2, 32))


@pytest.mark.parametrize("build", [image_model, text_model])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "groupnorm"])
@pytest.mark.parametrize("dtype", HALVES)
def test_norms_read_float32_under_autocast(build: Any, norm: str, dtype: torch.dtype) -> None:
    model, inputs = build(norm=norm, qk_norm="rmsnorm", position="learned")
    read: list[torch.dtype] = []
    products: list[torch.dtype] = []
    for layer in model.modules():
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm | GroupNorm):
            layer.register_forward_pre_hook(lambda _, given: read.append(given[0].dtype))
        if isinstance(layer, nn.Linear) and layer is not getattr(model, "head", None):
            layer.register_forward_hook(lambda _, given, out: products.append(out.dtype))
    with torch.autocast("cpu", dtype):
        model(inputs)
    assert len(read) == 5, "two of the block, of queries and keys, and the last"
    assert set(read) == {torch.float32}
    assert set(products) == {dtype}, "and it was mixed precision"


@pytest.mark.parametrize(("build", "position"), [
    (image_model, "relative_2d"), (image_model, "rotary_2d"), (image_model, "log_cpb"), (text_model, "rotary_1d"),
    (text_model, "alibi"), (text_model, "t5"), (text_model, "shaw"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", HALVES)
def test_what_positions_say_is_not_rounded_under_autocast(
    build: Any, position: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build(position=position)
    told: list[Terms] = []
    own = MultiHeadAttention.forward

    def watched(self: MultiHeadAttention, x: Tensor, **given: Any) -> Tensor:
        told.append(given["position"])
        return own(self, x, **given)

    monkeypatch.setattr(MultiHeadAttention, "forward", watched)
    with torch.autocast("cpu", dtype):
        model(inputs)
    numbers = [
        x
        for terms in told
        for term in terms
        for x in vars(term).values()
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    assert numbers
    assert {x.dtype for x in numbers} <= {torch.float32, torch.float64}, "angles are formed in float64"


class Softmaxes(TorchDispatchMode):
    """The dtypes that PyTorch's softmax, or the exponential of a softmax by hand, is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_softmax", "aten::_safe_softmax", "aten::exp", "aten::logsumexp"):
            self.given |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"attention": "flash"}], ids=["reference", "flash"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_softmax_is_in_float32_under_autocast(options: dict[str, str], dtype: torch.dtype) -> None:
    """Fused engines keep theirs inside; how near they come is asked in tests/engines/test_terms_in_engines.py."""
    model, inputs = text_model(position="alibi", **options)
    with Softmaxes() as seen, torch.autocast("cpu", dtype):
        model(inputs)
    assert seen.given == {torch.float32}
