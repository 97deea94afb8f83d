"""A quick run's steps follow from the time of one."""

from dataclasses import replace

import pytest

from relpos.comparison import ComparisonSettings
from relpos.comparison.quick import NEAR, plan_quick
from relpos.data import find_task
from relpos.train import ImageRecipe


@pytest.mark.parametrize(("step", "steps"), [(0.5, 60), (1.0, 30), (1.5, 8), (60.0, 2)])
def test_slow_steps_are_fewer(monkeypatch: pytest.MonkeyPatch, step: float, steps: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    task = find_task("digits")
    settings = ComparisonSettings("digits", ("own", "rotary_2d"), 1, recipe=ImageRecipe(steps=60), quick=True)
    plan = plan_quick(settings, task, step=step)
    assert plan.steps == steps
    assert (plan.seconds <= NEAR) == (steps > 2)
    more = plan_quick(replace(settings, positions=("own", "rotary_2d", "t5", "alibi")), task, step=step)
    assert more.seconds > plan.seconds or more.steps < plan.steps


def test_a_step_is_timed() -> None:
    settings = ComparisonSettings("digits", ("none",), 1, recipe=ImageRecipe(steps=60, batch_size=4), quick=True)
    assert 0 < plan_quick(settings, find_task("digits")).step < 60
