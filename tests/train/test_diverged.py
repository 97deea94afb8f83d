"""A loss or a gradient that is no number ends training before the weights take it in, with one line that says where."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos.cli import main
from relpos.data import find_task
from relpos.train import Curve, DivergedError, ImageRecipe, TextRecipe, procedure, state, train

TINY = ImageRecipe(steps=4, warmup_steps=2, batch_size=16, embed_dim=16, depth=1, num_heads=2)
CPU = torch.device("cpu")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every step of the optimizer."""
    steps: list[int] = []

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    monkeypatch.setattr(state, "make_optimizer", lambda name, groups: Counting(groups))
    return steps


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float, step: int) -> None:
    """Multiply the loss of one step, counted from 1."""
    own, calls = procedure.cross_entropy, []

    def spoiled(scores: Tensor, classes: Tensor) -> Tensor:
        if scores.requires_grad:  # not the loss that is looked at after a step
            calls.append(1)
        return own(scores, classes) * (factor if scores.requires_grad and len(calls) == step else 1.0)

    monkeypatch.setattr(procedure, "cross_entropy", spoiled)


def run(recipe: ImageRecipe = TINY, precision: str = "float32") -> Curve:
    return train(find_task("digits"), "relative_2d", recipe, seed=0, device=CPU, precision=precision)[1]


@pytest.mark.parametrize(
    ("factor", "precision"), [(math.nan, "float32"), (math.inf, "bf16-mixed"), (math.nan, "fp16-mixed")]
)
def test_a_loss_that_is_no_number_stops_before_the_step(
    factor: float, precision: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, factor, step=3)
    with pytest.raises(DivergedError) as caught:
        run(precision=precision)
    error = caught.value
    assert len(taken) == 2, "the third step was not taken"
    assert (error.step, error.what, error.value) == (3, "loss", str(factor))
    assert error.rate == pytest.approx(TINY.learning_rate)
    line = (
        rf"expected a finite loss; got {factor} at step 3 of 4, at the learning rate 6\.0e-03, with the position "
        r"relative_2d\. Lower the recipe's learning rate, "
    )
    assert re.match(line, str(error))
    assert "\n" not in str(error)
    assert error.curve.step == [1, 2]
    assert all(map(math.isfinite, error.curve.loss))


def test_a_gradient_that_is_no_number_stops_before_the_step(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1e38, step=2)
    with pytest.raises(DivergedError, match="expected a finite gradient; got inf at step 2 of 4"):
        run()
    assert len(taken) == 1


def test_a_scaled_gradient_that_overflows_is_skipped_as_ever(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1e35, step=2)  # finite, and past float32 once it is scaled by 65,536
    curve = run(precision="fp16-mixed")
    assert len(taken) == 3, "the scaler skipped one of four steps"
    assert curve.step == [1, 2, 3, 4]


def test_weights_that_the_last_step_ruined_are_found_out() -> None:
    with pytest.raises(DivergedError, match="at step 1 of 1"):
        run(replace(TINY, steps=1, warmup_steps=1, learning_rate=1e42))
    text = TextRecipe(steps=2, warmup_steps=1, batch_size=1, embed_dim=16, depth=1, num_heads=2, learning_rate=1e42)
    with pytest.raises(DivergedError, match=r"at step [12] of 2, .* with the position alibi"):
        train(find_task("text"), "alibi", text, seed=0, device=CPU)


def test_the_command_says_so_in_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, math.nan, step=1)
    out = tmp_path / "model"
    with pytest.raises(SystemExit) as caught:
        main(["train", "--position", "none", "--steps", "2", "--device", "cpu", "--out", str(out)])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("relpos: error: expected a finite loss; got nan at step 1 of 2, at the learning rate ")
    assert len(printed.splitlines()) == 1
    assert not out.exists()


@pytest.mark.slow
def test_float16_does_not_skip_every_step_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    with pytest.raises(DivergedError, match="expected a finite gradient; got nan at step 41 of 50"):
        train(find_task("digits"), "none", replace(TINY, steps=50), seed=0, device=CPU, precision="fp16-mixed")
