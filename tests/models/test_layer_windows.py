"""A window for each layer of a language model: what each layer sees, by loops; decoded, packed, saved, refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import text
from torch import Tensor

from relpos import KeyValueCache, LanguageModel, load_weights
from relpos.models import RotaryChoice

TOKENS = torch.tensor([[0, 3, 1, 6, 2, 5, 4, 4, 1], [6, 6, 0, 2, 3, 1, 5, 0, 2]])
GEMMA: dict[str, Any] = {
    "depth": 4,
    "position": (RotaryChoice(1e2), RotaryChoice(1e2), RotaryChoice(1e6)),
    "window": (3, 3, None),
}  # as Gemma 3, with two layers of a window between full ones, which have another base


def seen(window: int | None, n: int = 9) -> list[list[bool]]:
    return [[key <= query and (window is None or query - key < window) for key in range(n)] for query in range(n)]


@pytest.mark.parametrize(
    ("window", "of_layers"),
    [
        (None, [None] * 4),
        (3, [3] * 4),
        ((3, 3, None), [3, 3, None, 3]),
        ([1, None], [1, None, 1, None]),
        (50, [50] * 4),
    ],
)
def test_each_layer_sees_its_window(window: Any, of_layers: list[int | None]) -> None:
    model = text(depth=4, position="t5~none", window=window)
    for layer, maps in zip(of_layers, model.attention_maps(TOKENS), strict=True):
        assert ((maps > 0) == torch.tensor(seen(layer))).all()


def _rotated(x: Tensor, base: float) -> Tensor:
    """RoPE by complex numbers, `[B, H, N, D]`, a pair being one number of each half of D."""
    half = x.shape[-1] // 2
    rates = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * rates
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _by_loops(model: LanguageModel, layer: int, x: Tensor) -> Tensor:
    """A layer's attention from its weights, one query at a time."""
    attention, window = model.blocks[layer].attn, (3, 3, None, 3)[layer]
    q, k, v = (x @ attention.qkv.weight.T).unflatten(-1, (-1, 4)).transpose(1, 2).split([4, 2, 2], dim=1)  # type: ignore[union-attr,operator]
    base = 1e6 if layer == 2 else 1e2
    q, k, v = _rotated(q, base), _rotated(k, base).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    rows = []
    for i in range(x.shape[1]):
        first = 0 if window is None else max(0, i - window + 1)
        scores = (q[:, :, i : i + 1] * k[:, :, first : i + 1]).sum(dim=-1) / math.sqrt(4)
        rows.append((scores.softmax(dim=-1)[..., None] * v[:, :, first : i + 1]).sum(dim=2))
    return torch.stack(rows, dim=1).flatten(2) @ attention.proj.weight.T  # type: ignore[union-attr,operator,no-any-return]


def test_trained_layers_equal_loops() -> None:
    """The gradient of every weight, as of the same model whose layers attend by loops."""
    model = text(**GEMMA).double()
    weights = list(model.parameters())
    loss = model(TOKENS).square().mean()
    ours = torch.autograd.grad(loss, weights)
    for layer, block in enumerate(model.blocks):
        block.attn.forward = lambda x, layer=layer, **_: _by_loops(model, layer, x)  # type: ignore[union-attr,method-assign,assign,misc]
    wanted = model(TOKENS).square().mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted, weights), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("position", [GEMMA["position"], "rope+t5~fox~none"])
@torch.no_grad()
def test_decoded_is_the_full_pass(position: Any) -> None:
    """Token by token, and several at a time, before and after the window is full; after a crop, too."""
    model = text(**{**GEMMA, "position": position}).double().eval()
    full = model(TOKENS)
    for steps in ([1] * 9, [2, 5, 1, 1], [7, 2]):
        cache = KeyValueCache(4)
        parts = [model(part, cache=cache) for part in TOKENS.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), full)
    cache.crop(4)
    torch.testing.assert_close(model(TOKENS[:, 4:], cache=cache), full[:, 4:])
    longer = model.generate(TOKENS[:, :4], 5, temperature=0)
    assert torch.equal(longer[:, 4:], model(longer)[:, 3:-1].argmax(dim=-1))


@torch.no_grad()
def test_packed_documents_are_those_alone() -> None:
    """Also where the tokens of two documents alternate: a window counts those of its own document."""
    model = text(**GEMMA).double().eval()
    for segments in (torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, -1]), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])):
        packed = model(TOKENS, segments=segments.expand(2, 9))
        for document in (0, 1):
            own = segments == document
            torch.testing.assert_close(packed[:, own], model(TOKENS[:, own]))


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = text(**GEMMA)
    assert model.arguments["window"] == [3, 3, None]
    model.grow(18, "as is").save_pretrained(tmp_path / "saved")
    loaded = LanguageModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded(TOKENS), model(TOKENS), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"window \[3, 3, None\], not None"):
        load_weights(text(**{**GEMMA, "window": None}), tmp_path / "saved")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"window": 0}, "expected window to be an integer of at least 1; got int 0"),
        ({"window": (3, "all")}, "expected window to be an integer of at least 1; got str 'all'"),
        ({"window": ()}, "expected 1 to 2 windows for 2 layers; got 0 in ()"),
        ({"window": (3, 3, None)}, "expected 1 to 2 windows for 2 layers; got 3 in (3, 3, None)"),
        ({"window": 3, "attention": "local"}, "expected attention=\"full\" with a window; got 'local'"),
    ],
)
def test_wrong_windows_are_one_line(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        text(**wrong)
    assert line in str(caught.value)
