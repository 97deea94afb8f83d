"""Optimizers by name in the training loop, Sophia's estimates in it, and float16's scaled losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos.data import Text, find_task
from relpos.layers import MultiHeadAttention
from relpos.optim import Lion, Sophia
from relpos.train import OPTIMIZERS, ImageRecipe, OptimizerName, TextRecipe, estimate_hessian, state, train

FAST_CASES = 2  # of each of its tests, in the fast part

TINY = ImageRecipe(steps=4, warmup_steps=2, batch_size=16, embed_dim=16, depth=1, num_heads=2)
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    """The optimizers that training makes."""
    found: list[torch.optim.Optimizer] = []
    make = state.make_optimizer

    def watched(*arguments: Any) -> torch.optim.Optimizer:
        found.append(make(*arguments))
        return found[-1]

    monkeypatch.setattr(state, "make_optimizer", watched)
    return found


def tiny(optimizer: OptimizerName, **changes: Any) -> ImageRecipe:
    return replace(TINY.by(optimizer), **changes)


def run(recipe: ImageRecipe, precision: str = "float32") -> nn.Module:
    model, curve = train(find_task("digits"), "relative_2d", recipe, seed=0, device=CPU, precision=precision)
    assert all(torch.isfinite(torch.tensor(curve.loss)))
    return model


def states(optimizer: torch.optim.Optimizer, name: str) -> list[Tensor]:
    return [optimizer.state[p][name] for group in optimizer.param_groups for p in group["params"]]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [ImageRecipe, TextRecipe])
def test_a_recipe_has_a_rate_and_a_decay_for_every_optimizer(name: OptimizerName, kind: type) -> None:
    recipe = kind()
    other = recipe.by(name)
    assert other.optimizer == name
    assert (other.learning_rate, other.weight_decay) == recipe.rates[name]
    assert replace(other, optimizer="adamw", learning_rate=0.0, weight_decay=0.0) == replace(
        recipe, learning_rate=0.0, weight_decay=0.0
    )
    assert recipe.by("adamw") == recipe, "what is AdamW's stands in the recipe itself"


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer"):
        TINY.by("sgd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "precision"),
    [("adamw", "fp16-mixed"), ("lion", "bf16-mixed"), ("sophia-g", "float32"), ("sophia-h", "bf16-mixed")],
)
def test_every_optimizer_trains_and_repeats(
    name: OptimizerName, precision: str, made: list[torch.optim.Optimizer]
) -> None:
    first, again = (run(tiny(name, steps=2), precision) for _ in range(2))
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.float32
    kinds = {"adamw": torch.optim.AdamW, "lion": Lion, "sophia-g": Sophia, "sophia-h": Sophia}
    assert all(type(one) is kinds[name] for one in made)
    assert len({id(one) for one in made}) == 2


@pytest.mark.parametrize(
    ("name", "method"), [("sophia-g", "update_hessian"), ("sophia-h", "update_hessian_by_hutchinson")]
)
def test_sophia_estimates_before_every_so_many_steps(
    name: OptimizerName, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for of in (method, "step"):
        own = getattr(Sophia, of)

        def watched(self: Sophia, *arguments: Any, of: str = of, own: Any = own) -> Any:
            events.append(of)
            return own(self, *arguments)

        monkeypatch.setattr(Sophia, of, watched)
    run(tiny(name, steps=5, hessian_every=2))
    assert events == [method, "step", "step", method, "step", "step", method, "step"]


def test_an_estimate_counts_labels_and_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    own = Sophia.update_hessian
    monkeypatch.setattr(Sophia, "update_hessian", lambda self, count: (counts.append(count), own(self, count)))
    task, recipe = Text(), TextRecipe(embed_dim=16, depth=1, num_heads=2, batch_size=2)
    for data, kind, batch in ((find_task("digits"), TINY, 16), (task, recipe, 2)):
        model = kind.build(data, "none")
        optimizer = state.make_optimizer("sophia-g", kind.groups(model))
        inputs, classes = next(data.batches(batch, 0))
        estimate_hessian("sophia-g", optimizer, model, inputs, classes)
        assert all(p.grad is None for p in model.parameters())
        assert all(p.item() >= 0 for p in (h.min() for h in states(optimizer, "hessian")))
    assert counts == [16, 2 * task.length]


def test_hutchinsons_estimate_differentiates_any_engine_and_puts_it_back() -> None:
    model = TINY.build(find_task("digits"), "relative_2d")
    layers = [layer for layer in model.modules() if isinstance(layer, MultiHeadAttention)]
    for layer in layers:
        layer.backend = "streaming"
    optimizer = state.make_optimizer("sophia-h", TINY.groups(model))
    inputs, classes = next(find_task("digits").batches(4, 0))
    estimate_hessian("sophia-h", optimizer, model, inputs, classes)
    assert flat(states(optimizer, "hessian")).abs().max() > 0
    assert [layer.backend for layer in layers] == ["streaming"] * len(layers)


# float16


@pytest.mark.parametrize("name", ["sophia-g", "sophia-h"])
def test_neither_gradient_nor_estimate_keeps_float16s_scale(
    name: OptimizerName, made: list[torch.optim.Optimizer]
) -> None:
    """The momentum holds a gradient that is clipped in float32: clipped before it is unscaled, it would be 65,536
    times too small; an estimate of scaled losses would be as many times too large, or its square."""
    for precision in ("float32", "fp16-mixed"):
        run(tiny(name, steps=1, gradient_clip=0.5), precision)
    exact, half = made
    for moment, apart in (("exp_avg", 0.02), ("hessian", 1e-6)):
        wanted, found = flat(states(exact, moment)), flat(states(half, moment))
        assert (found - wanted).norm() < apart * wanted.norm(), moment
    assert flat(states(half, "exp_avg")).norm().item() == pytest.approx(0.5 * (1 - 0.965), rel=1e-3), "clipped"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_gradient_overflows_is_no_step(
    name: OptimizerName, made: list[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: own(device, init_scale=1e38, enabled=enabled))
    recipe = tiny(name, steps=2)
    torch.manual_seed(0)
    start, end = recipe.build(find_task("digits"), "relative_2d"), run(recipe, "fp16-mixed")
    for before, after in zip(start.parameters(), end.parameters(), strict=True):
        assert torch.equal(before, after)
    assert all("exp_avg" not in state or not state["exp_avg"].any() for state in made[0].state.values())
