"""`replace_position` in `nn.TransformerEncoder` and `nn.MultiheadAttention`, whose fused kernels must not bypass it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import heads, linear, of_torch
from replaced_models import encoder, own
from torch import Tensor, nn

import relpos
from relpos import Sequence
from relpos.adapters.replacements.torch_attention import RepositionedEncoder, RepositionedMultiheadAttention

TOKENS = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0)).double()
PADDING = torch.arange(7) >= torch.tensor([7, 5, 3])[:, None]
"""True at padded tokens, as PyTorch has it."""
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
PAST = torch.arange(7) <= torch.arange(7)[:, None]

norm_first = partial(encoder, norm_first=True, activation="gelu")
same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def expected(model: Any, allowed: Tensor | None = None) -> Tensor:
    return of_torch(model, {"src": TOKENS}, allowed=allowed)


@pytest.mark.parametrize("build", [encoder, norm_first, own], ids=["encoder", "norm first", "layers alone"])
@torch.no_grad()
def test_fused_kernels_do_not_bypass_it(build: Callable[[], Any]) -> None:
    """In eval mode without gradients, with and without padding, and whatever else asks for them."""
    assert torch.backends.mha.get_fastpath_enabled()
    model = build()
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    wanted = expected(model)
    same(model(TOKENS), wanted)
    name, real = "key_padding_mask" if build is own else "src_key_padding_mask", ~PADDING
    same(model(TOKENS, **{name: PADDING})[real], expected(model, real[:, None, None])[real])
    with torch.inference_mode():
        same(model(TOKENS), wanted)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_this_test_sees_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    bag = model(TOKENS)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    monkeypatch.delattr(RepositionedMultiheadAttention, "_qkv_same_embed_dim")
    same(model(TOKENS), bag)
    monkeypatch.undo()
    monkeypatch.delattr(RepositionedEncoder, "use_nested_tensor")
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        model(TOKENS, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("build", [encoder, own], ids=["encoder", "layers alone"])
def test_masks(build: Callable[[], Any]) -> None:
    model = build()
    relpos.replace_position(model, "relative_1d+alibi", coordinates=Sequence(7), causal=True, init_std=0.5)
    pairs, keys = ("attn_mask", "key_padding_mask") if build is own else ("mask", "src_key_padding_mask")
    wanted, real = expected(model, PAST), ~PADDING
    both = expected(model, PAST & real[:, None, None])[real]
    numbers = torch.zeros(3, 7).double().masked_fill(PADDING, -torch.inf)
    for mask, padding in ((CAUSAL, numbers), (CAUSAL < 0, PADDING)):
        for hint in ({}, {"is_causal": True}):
            same(model(TOKENS, **{pairs: mask}, **hint), wanted)
            same(model(TOKENS, **{pairs: mask, keys: padding}, **hint)[real], both)
    assert not torch.allclose(model(TOKENS), wanted), "the mask is an argument"


def test_layouts_and_weights() -> None:
    """Batch first or not, no batch at all, weights by head and their mean; a mask a head."""
    model = own(bias=False)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    layer, x = model.layers[0], TOKENS
    out, mean = layer(x, x, x)
    _, each = layer(x, x, x, average_attn_weights=False)
    q, k, v = (heads(one, 4) for one in nn.functional.linear(x, layer.in_proj_weight).chunk(3, -1))
    torch.testing.assert_close(linear((each @ v).transpose(1, 2).flatten(2), layer.out_proj), out)
    torch.testing.assert_close(mean, each.mean(1))
    alone, weights = layer(x[0], x[0], x[0])
    torch.testing.assert_close(alone, out[0])
    torch.testing.assert_close(weights, mean[0])
    layer.batch_first = False
    turned = x.transpose(0, 1)
    torch.testing.assert_close(layer(turned, turned, turned, need_weights=False)[0].transpose(0, 1), out)
    mask = torch.randn(12, 7, 7).double()
    dense = model.positions[0].mechanisms[0]().double() + mask.unflatten(0, (3, 4))
    wanted = ((8**-0.5 * q @ k.mT + dense).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(
        layer(turned, turned, turned, attn_mask=mask)[0].transpose(0, 1), linear(wanted, layer.out_proj)
    )
    second = encoder(batch_first=False)
    relpos.replace_position(second, "sinusoidal_1d", coordinates=Sequence(7))
    same(second(turned).transpose(0, 1), expected(second))
    same(second(x[0]), expected(second)[0])


def test_dropout_in_training() -> None:
    model = own(dropout=0.5)
    relpos.replace_position(model, "relative_1d", coordinates=Sequence(7), init_std=0.5)
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.train()
    assert not torch.allclose(model(TOKENS), model(TOKENS))
