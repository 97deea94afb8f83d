"""Retrofitted models of images in use: padding masks, attention weights, other resolutions, dropout."""

import copy
from typing import Any

import pytest
import torch

import relpos
from models import images, models
from relpos.adapters.common.grids import dense_of_image, image_of, is_image
from relpos.core import Grid, lines


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["beit", "beit, one table for all layers"])
def test_a_padding_mask_of_beit_is_that_of_the_published_model(name: str, implementation: str) -> None:
    model: Any = models()[name].made(torch.float32)
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 12:] = 0
    call = lambda: model(images(2, 32), attention_mask=mask)[0].detach()  # noqa: E731
    published = call()
    relpos.retrofit(model, border=0, verify=False)
    torch.testing.assert_close(call(), published, rtol=1e-5, atol=1e-5)
    relpos.restore(model)
    relpos.retrofit(model, verify=False)
    torch.testing.assert_close(call(), published, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")  # timm's
@pytest.mark.parametrize("name", ["timm swin_transformer", "timm beit"])
def test_another_size_after_the_retrofit(name: str) -> None:
    model: Any = models()[name].made()
    published = copy.deepcopy(model)
    relpos.retrofit(model, border=0, verify=False)
    models()[name].called(model)
    for one in (published, model):
        one.set_input_size((48, 64))
    x = images(2, (48, 64)).double()
    torch.testing.assert_close(model(x), published(x), rtol=1e-9, atol=1e-9)


def test_an_image_of_a_table_is_the_dense_bias() -> None:
    for rows, columns in ((4, 6), (6, 4), (1, 5), (5, 1), (1, 1), (2, 2)):
        table = torch.randn((2 * rows - 1) * (2 * columns - 1) + 3, 2)
        image = image_of(table, (rows, columns))
        tokens = rows * columns + 1
        assert is_image(image, tokens)
        dense = dense_of_image(image, tokens)
        index = lines(Grid(rows, columns)).index()
        torch.testing.assert_close(dense[0, :, 1:, 1:], table[index].movedim(-1, 0))
        assert torch.equal(dense[0, :, 0, 1:], table[-3][:, None].expand(-1, tokens - 1))
        assert torch.equal(dense[0, :, 1:, 0], table[-2][:, None].expand(-1, tokens - 1))
        assert torch.equal(dense[0, :, 0, 0], table[-1])


def test_a_dense_bias_never_looks_like_an_image() -> None:
    for tokens in range(1, 200):
        assert not is_image(torch.empty(1, 1, tokens, tokens, device="meta"), tokens)


@torch.no_grad()
def test_dropout_of_weights_changes_no_mean() -> None:
    """The mean over many draws is the output without dropout, as that of the published layer is."""
    layer: Any = models()["timm beit"].made(torch.float32).blocks[0].attn  # type: ignore[index, union-attr]
    relpos.retrofit(layer, border=0, verify=False)
    layer.attn_drop.p = 0.25
    x = torch.randn(1, 13, 32)
    expected = layer.eval()(x)
    draws = layer.train()(x.expand(2000, -1, -1))
    error, deviation = (draws.mean(dim=0) - expected[0]).abs(), draws.std(dim=0)
    assert float(deviation.mean()) > 1e-4
    assert float((error / deviation).max()) < 5 / 2000**0.5
