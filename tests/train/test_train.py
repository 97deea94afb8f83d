"""The training loop: its rates, groups, repeatability and clipping; and a model's way to a folder and back."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos.data import find_task
from relpos.models import VisionTransformer, pretrained
from relpos.train import Curve, ImageRecipe, Progress, load, predict, resolve_device, save, train

TINY = ImageRecipe(steps=4, warmup_steps=2, batch_size=16, embed_dim=16, depth=1, num_heads=2)
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def run(
    position: str = "relative_2d", recipe: ImageRecipe = TINY, *, seed: int = 0, precision: str = "float32"
) -> tuple[VisionTransformer, Curve, list[Progress]]:
    seen: list[Progress] = []
    model, curve = train(
        find_task("digits"), position, recipe, seed=seed, device=CPU, precision=precision, watch=seen.append
    )
    return model, curve, seen


def untrained(position: str = "relative_2d", recipe: ImageRecipe = TINY, seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    return recipe.build(find_task("digits"), position)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# Rates


def test_rates_rise_in_a_line_and_fall_on_a_cosine() -> None:
    recipe = replace(TINY, steps=100, warmup_steps=20, learning_rate=2.0)
    rates = [recipe.rate_at(step) for step in range(100)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.0), "half way down"
    assert rates[40] == pytest.approx(1.0 + math.sqrt(0.5)), "a quarter of the way"
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[20:]))
    assert rates[-1] > 0
    assert recipe.rate_at(100) == pytest.approx(0.0, abs=1e-12)


def test_a_warm_up_longer_than_training_ends_at_the_full_rate() -> None:
    recipe = replace(TINY, steps=3, warmup_steps=40, learning_rate=3.0)
    assert [recipe.rate_at(step) for step in range(3)] == pytest.approx([1.0, 2.0, 3.0])


def test_no_warm_up() -> None:
    assert replace(TINY, warmup_steps=0, learning_rate=3.0).rate_at(0) == 3.0


# Parameter groups


def test_the_multiplier_is_used() -> None:
    name = "positions.0.mechanisms.0.relative_position_bias_table"
    start = weights(untrained())
    still = weights(run(recipe=replace(TINY, position_learning_rate_multiplier=0.0))[0])
    moved = weights(run(recipe=replace(TINY, position_learning_rate_multiplier=1.0))[0])
    faster = weights(run(recipe=replace(TINY, position_learning_rate_multiplier=10.0))[0])
    assert torch.equal(still[name], start[name])
    assert not torch.equal(still["head.weight"], start["head.weight"])
    small, large = (moved[name] - start[name]).norm(), (faster[name] - start[name]).norm()
    assert 0 < small < large / 5


# Repeatability


def test_training_repeats_bit_for_bit_whatever_was_drawn_before() -> None:
    first, curve, seen = run("learned+relative_2d")
    torch.manual_seed(12345)
    torch.rand(7)
    second, again, seen_again = run("learned+relative_2d")
    assert curve == again
    assert seen == seen_again
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_seeds_differ_in_start_and_batches() -> None:
    (first, curve, _), (second, other, _) = run(seed=0), run(seed=1)
    assert curve.loss != other.loss
    assert not torch.equal(first.head.weight, second.head.weight)


# What happens in a step


def test_watchers_and_curves_see_every_step() -> None:
    model, curve, seen = run()
    assert [(one.step, one.steps) for one in seen] == [(step, 4) for step in (1, 2, 3, 4)]
    assert [one.rate for one in seen] == [TINY.rate_at(step) for step in range(4)]
    assert curve.step == [1, 2, 3, 4]
    assert curve.loss == pytest.approx([one.loss for one in seen])
    assert curve.validation_step[-1] == 4
    assert all(0 <= accuracy <= 1 for accuracy in curve.validation)
    assert not model.training


def test_a_point_of_the_curve_is_the_mean_since_the_point_before() -> None:
    seen: list[Progress] = []
    recipe = replace(TINY, steps=6)
    _, curve = train(
        find_task("digits"), "none", recipe, seed=0, device=CPU, watch=seen.append, points=2, validations=1
    )
    assert curve.step == [3, 6]
    losses = [one.loss for one in seen]
    assert curve.loss == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])


def test_the_loss_falls() -> None:
    _, curve, _ = run("learned", replace(TINY, steps=40, warmup_steps=5, embed_dim=32, learning_rate=1e-2))
    assert sum(curve.loss[-5:]) / 5 < sum(curve.loss[:5]) / 5 - 0.3


def test_gradients_are_clipped() -> None:
    """Adam forgives any scale of the gradient except one far below its epsilon: then nothing moves."""
    recipe = replace(TINY, weight_decay=0.0, learning_rate=1e-2)
    start = weights(untrained(recipe=recipe))
    clipped = weights(run(recipe=replace(recipe, gradient_clip=1e-14))[0])
    free = weights(run(recipe=replace(recipe, gradient_clip=1.0))[0])
    for name in ("head.weight", "blocks.0.mlp.fc1.weight"):
        assert (clipped[name] - start[name]).abs().max() < 1e-4
        assert (free[name] - start[name]).abs().max() > 1e-3


def test_weights_decay_and_vectors_do_not() -> None:
    recipe = replace(TINY, gradient_clip=1e-14, learning_rate=1e-2, weight_decay=1.0)
    start, end = weights(untrained(recipe=recipe)), weights(run(recipe=recipe)[0])
    shrunk = math.prod(1 - recipe.rate_at(step) for step in range(recipe.steps))
    torch.testing.assert_close(end["head.weight"], start["head.weight"] * shrunk, rtol=1e-3, atol=1e-4)
    for name in ("head.bias", "norm.weight", "positions.0.mechanisms.0.relative_position_bias_table"):
        torch.testing.assert_close(end[name], start[name], rtol=1e-3, atol=1e-3)


def test_bf16_mixed_keeps_weights_in_float32() -> None:
    model, curve, _ = run(precision="bf16-mixed")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(math.isfinite(loss) for loss in curve.loss)
    exact = run()[1]
    assert curve.loss != exact.loss, "half precision leaves a trace"
    assert curve.loss == pytest.approx(exact.loss, rel=0.05)
    assert model(torch.zeros(1, 1, 16, 16)).dtype == torch.float32, "the model comes back unwrapped"


def test_unknown_precisions_and_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a precision among float32, bf16-mixed, fp16-mixed; got 'fp8'"):
        run(precision="fp8")
    with pytest.raises(ValueError, match=r"expected a device .*; got 'gpu'. Leave --device out"):
        resolve_device("gpu")


def test_a_missing_gpu_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ValueError, match=r"expected a device that this machine has; got 'cuda'.*--device cpu"):
        resolve_device("cuda")


def test_predict_is_the_most_likely_class_in_evaluation_mode() -> None:
    model = untrained()
    model.train()
    images = torch.randn(5, 1, 16, 16)
    found = predict(model, images, CPU, batch_size=2)
    assert not model.training
    assert torch.equal(found, model(images).argmax(dim=-1))


# Checkpoints


def test_a_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    position, recipe = (
        "learned+relative_2d",
        replace(TINY, class_token=True, global_pool="token", shared_position=False, depth=2),
    )
    model, _, _ = run(position, recipe)
    folder = tmp_path / "deep" / "model"
    save(folder, model, task=find_task("digits"), position=position, recipe=recipe, about={"seed": 0, "note": "kept"})
    again, config = load(folder)
    images = torch.randn(3, 1, 16, 16)
    assert torch.equal(again(images), model(images))
    assert not again.training
    about = {"seed": 0, "note": "kept"}
    whole = {"task": "digits", "task_options": {}, "position": position, "recipe": asdict(recipe), **about}
    assert {name: config[name] for name in whole} == whole
    assert set(config) == {*whole, "class", "classes", "kind", "model", "relpos"}
    assert config["classes"] == [str(digit) for digit in range(10)]
    assert config == json.loads((folder / "config.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}


def test_of_two_that_save_in_one_folder_the_first_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has looked whether the folder is free before the first came."""
    real = pretrained.write_json

    def overtaken(path: Path, tree: Any, **how: Any) -> None:
        monkeypatch.setattr(pretrained, "write_json", real)
        save_to(tmp_path, who="first")
        real(path, tree, **how)

    monkeypatch.setattr(pretrained, "write_json", overtaken)
    with pytest.raises(ValueError, match="nothing is overwritten"):
        save_to(tmp_path, who="second")
    assert load(tmp_path)[1]["who"] == "first"


def test_no_configuration_has_a_number_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match=r"expected finite numbers in .*config\.json"):
        save_to(tmp_path, test=math.nan)
    assert not list(tmp_path.iterdir())


def save_to(folder: Path, **about: Any) -> None:
    save(folder, untrained(), task=find_task("digits"), position="relative_2d", recipe=TINY, about=about)


# The recipe


def test_a_recipe_builds_the_model_it_says() -> None:
    model = untrained("learned", replace(TINY, depth=3, class_token=True))
    assert len(model.blocks) == 3
    grid = model.coordinates
    assert grid.sizes == (8, 8)
    assert grid.prefix == 1
    assert model.head.out_features == 10
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 10)


def test_position_starts_with_the_recipes_spread() -> None:
    model = untrained("relative_2d", replace(TINY, position_init_std=0.5, num_heads=4))
    (table,) = model.position_parameters()
    assert table.std().item() == pytest.approx(0.5, rel=0.1)
