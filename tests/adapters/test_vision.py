"""Retrofitted models of images in use: padding masks, attention weights, other resolutions, one graph."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models_beit import _build, _timm
from torch import nn

import relpos
from models import images, models
from relpos.adapters.grids import dense_of_image, image_of, is_image
from relpos.adapters.libraries import imported
from relpos.core import Grid, lines

pytestmark = [pytest.mark.usefixtures("timm"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def _beit(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = _build("Beit", **more).eval()
    for name, x in model.named_parameters():
        if name.endswith("table"):
            nn.init.normal_(x)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_padding_mask_of_beit_is_that_of_the_published_model(implementation: str, shared: bool) -> None:
    model = _beit(shared=shared, attn_implementation=implementation)
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
def test_attention_weights_of_eager_models_are_the_published_ones() -> None:
    model = _beit(attn_implementation="eager")
    published = model(images(2, 32), output_attentions=True).attentions
    relpos.retrofit(model, border=0, verify=False)
    for own, theirs in zip(model(images(2, 32), output_attentions=True).attentions, published, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)
    swin = models()["swin, eager"].made(torch.float32)
    published = swin(images(2, 32), output_attentions=True).attentions
    relpos.retrofit(swin, border=0, verify=False)
    for own, theirs in zip(swin(images(2, 32), output_attentions=True).attentions, published, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")  # timm's
@pytest.mark.parametrize("name", ["timm swin_transformer", "timm beit"])
def test_another_size_after_the_retrofit(name: str) -> None:
    model = models()[name].made()
    published = copy.deepcopy(model)
    relpos.retrofit(model, border=0, verify=False)
    models()[name].called(model)
    for one in (published, model):
        one.set_input_size((48, 64))  # type: ignore[operator]
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_run_of_beit_has_the_published_losses(tmp_path: Path) -> None:
    transformers = imported("transformers")
    pictures = images(16, 32)
    batches = [{"pixel_values": picture, "labels": index % 2} for index, picture in enumerate(pictures)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=8, logging_steps=1, report_to=[],
        learning_rate=1e-2, save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
    )  # fmt: skip
    losses = []
    for retrofitted in (False, True):
        torch.manual_seed(0)
        config = _beit().config
        config.num_labels = 2
        model = transformers.BeitForImageClassification(config)
        if retrofitted:
            relpos.retrofit(model, border=0, verify=False)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 6
    assert abs(losses[0][0] - losses[0][-1]) > 1e-3
    assert max(abs(x - y) for x, y in zip(*losses, strict=True)) < 2e-4


@torch.no_grad()
def test_dropout_of_weights_changes_no_mean() -> None:
    """The mean over many draws is the output without dropout, as that of the published layer is."""
    layer: Any = _timm().blocks[0].attn  # type: ignore[index, union-attr]
    relpos.retrofit(layer, border=0, verify=False)
    layer.attn_drop.p = 0.25
    x = torch.randn(1, 13, 32)
    expected = layer.eval()(x)
    draws = layer.train()(x.expand(2000, -1, -1))
    error, deviation = (draws.mean(dim=0) - expected[0]).abs(), draws.std(dim=0)
    assert float(deviation.mean()) > 1e-4
    assert float((error / deviation).max()) < 5 / 2000**0.5
