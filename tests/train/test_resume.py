"""Runs that are cut short and go on: equal to those that were not, bit for bit."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loaded import Loaded
from relpos.data import find_task
from relpos.train import Curve, ImageRecipe, Progress, Recipe, TextRecipe, train
from relpos.train.checkpointing import Checkpointing, StoppedError
from relpos.train.procedure import Procedure
from relpos.train.processes import Parallelism
from relpos.train.snapshots import Snapshot, read_snapshot

SMALL = ImageRecipe(steps=14, warmup_steps=2, batch_size=400, embed_dim=8, depth=1, num_heads=1)  # three an epoch
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def signals_that_are_heard() -> Iterator[None]:
    """In the background of a shell an interruption is ignored, by the tests and what they run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Cut(Exception):
    """A run ends as if it were killed."""


def _run(
    folder: Path | None,
    recipe: Recipe = SMALL,
    *,
    position: str = "relative_2d",
    cut: int | None = None,
    every: int = 1,
    precision: str = "float32",
    **more: Any,
) -> tuple[dict[str, Tensor], Curve]:
    said: list[str] = []

    def watch(now: Progress) -> None:
        if now.step == cut:
            raise Cut

    checkpointing = None if folder is None else Checkpointing(folder, every, settings={"seed": 5}, tell=said.append)
    resume = None if folder is None or not (folder / "checkpoints").exists() else "auto"
    task = find_task("text" if isinstance(recipe, TextRecipe) else "digits")
    model, curve = train(
        task, position, recipe, seed=5, device=CPU, precision=precision, watch=watch, checkpointing=checkpointing,
        resume=resume, **more,
    )  # fmt: skip
    return model.state_dict(), curve


def _assert_same(own: tuple[dict[str, Tensor], Curve], whole: tuple[dict[str, Tensor], Curve]) -> None:
    assert own[1] == whole[1]
    assert all(torch.equal(x, whole[0][name]) for name, x in own[0].items())


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, Tensor], Curve]:
    torch.set_num_threads(1)
    return _run(None)


@pytest.mark.slow
def test_checkpoints_change_nothing(whole: tuple[dict[str, Tensor], Curve], tmp_path: Path) -> None:
    _assert_same(_run(tmp_path, every=4), whole)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(10)]
)
def test_a_run_goes_on_from_any_step(seed: int, whole: tuple[dict[str, Tensor], Curve], tmp_path: Path) -> None:
    """Also in the middle of an epoch; some are cut twice."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(6, SMALL.steps), draw.choice((1, 2))))
    every = draw.choice((1, 3, 4))
    for cut in cuts:
        with pytest.raises(Cut):
            _run(tmp_path, cut=cut, every=every)
        assert any((tmp_path / "checkpoints").glob("step-*"))
    _assert_same(_run(tmp_path, every=every), whole)


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({"optimizer": "lion"}, {}),
        ({"optimizer": "sophia-g", "hessian_every": 4}, {}),
        ({"optimizer": "sophia-h", "hessian_every": 4}, {}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"precision": "fp16-mixed"}),
        ({}, {"parallelism": Parallelism(accumulate=4)}),
        ({}, {"position": "fire"}),
    ],
    ids=["lion", "sophia-g", "sophia-h", "bf16", "fp16", "accumulation", "fire"],
)
@pytest.mark.slow
def test_whatever_trains_goes_on(changed: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    recipe = replace(SMALL, steps=10, batch_size=100, **changed)
    expected = _run(None, recipe, **more)
    with pytest.raises(Cut):
        _run(tmp_path, recipe, cut=6, **more)
    _assert_same(_run(tmp_path, recipe, **more), expected)


def test_text_goes_on(tmp_path: Path) -> None:
    recipe = TextRecipe(steps=6, warmup_steps=2, batch_size=4, embed_dim=16, depth=1, num_heads=2)
    expected = _run(None, recipe, position="alibi")
    with pytest.raises(Cut):
        _run(tmp_path, recipe, position="alibi", cut=4)
    _assert_same(_run(tmp_path, recipe, position="alibi"), expected)


def test_parts_of_a_batch_have_its_gradient() -> None:
    one, _ = _run(None, replace(SMALL, steps=2))
    four, _ = _run(None, replace(SMALL, steps=2), parallelism=Parallelism(accumulate=4))
    for name, x in one.items():
        assert float((four[name] - x).abs().max()) < 1e-3 * max(1.0, float(x.abs().max())), name


@pytest.mark.traced
def test_blocks_are_compiled_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    recipe = replace(SMALL, steps=1, depth=3)
    _run(None, recipe)
    assert not compiled
    _run(None, recipe, parallelism=Parallelism(compile=True))
    assert compiled == ["TransformerBlock"] * 3


def test_a_batch_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"1 processes times 3 accumulated parts divide; got 400.*399 or 402"):
        _run(None, parallelism=Parallelism(accumulate=3))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_end_writes_a_checkpoint(
    number: signal.Signals, code: int, whole: tuple[dict[str, Tensor], Curve], tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    checkpointing = Checkpointing(tmp_path, 1000, settings={"seed": 5}, tell=print)

    def watch(now: Progress) -> None:
        if now.step == 11:
            signal.raise_signal(number)

    with pytest.raises(StoppedError, match="--resume auto goes on") as stopped:
        train(find_task("digits"), "relative_2d", SMALL, seed=5, device=CPU, watch=watch, checkpointing=checkpointing)
    assert stopped.value.code == code
    assert signal.getsignal(number) == before
    assert checkpointing.store.steps() == [12]
    _assert_same(_run(tmp_path), whole)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 4])
def test_it_is_told_in_the_middle_of_an_accumulation(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends before the checkpoint is written: parts of one are in none."""
    recipe, four = replace(SMALL, steps=8), Parallelism(accumulate=4)
    expected = _run(None, recipe, parallelism=four)
    ours, parts = Procedure.loss, 0

    def loss(procedure: Procedure, model: torch.nn.Module, batch: Any) -> Tensor:
        nonlocal parts
        parts += model.training  # not what validation measures
        if model.training and parts == 4 * 4 + part:
            signal.raise_signal(signal.SIGTERM)
        return ours(procedure, model, batch)

    task, checkpointing = find_task("digits"), Checkpointing(tmp_path, 1000, settings={"seed": 5}, tell=print)
    monkeypatch.setattr(Procedure, "loss", loss)
    with pytest.raises(StoppedError):
        train(task, "relative_2d", recipe, seed=5, device=CPU, parallelism=four, checkpointing=checkpointing)
    monkeypatch.setattr(Procedure, "loss", ours)
    assert checkpointing.store.steps() == [5]
    _assert_same(_run(tmp_path, recipe, parallelism=four), expected)


TWICE = """
import os, signal, sys
os.environ["WORLD_SIZE"] = sys.argv[2]
from pathlib import Path
from relpos.train.checkpointing import Checkpointing
with Checkpointing(Path(sys.argv[1])).listening():
    for name in sys.argv[3:]:
        os.kill(os.getpid(), signal.Signals[name])
print("goes on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "world", "code"),
    [
        (["SIGINT", "SIGTERM"], 2, -signal.SIGTERM),  # what torchrun makes of two interruptions
        (["SIGINT", "SIGTERM"], 1, 0),
        (["SIGTERM", "SIGTERM"], 2, 0),  # a scheduler's, and the launcher's
        (["SIGTERM", "SIGINT"], 2, -signal.SIGINT),
    ],
)
def test_which_second_signal_ends_at_once(
    told: list[str], world: int, code: int, tmp_path: Path, loaded: Loaded
) -> None:
    run = loaded.run("-c", TWICE, tmp_path, world, *told, needs=["train"])
    assert run.returncode == code, run.stderr
    assert ("goes on" in run.stdout) == (code == 0)


@pytest.mark.slow
def test_a_run_that_is_told_while_its_last_step_is_measured(
    whole: tuple[dict[str, Tensor], Curve], tmp_path: Path
) -> None:
    checkpointing = Checkpointing(tmp_path, 1000, settings={"seed": 5}, tell=print)

    def watch(now: Progress) -> None:
        if now.step == SMALL.steps:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError):
        train(find_task("digits"), "relative_2d", SMALL, seed=5, device=CPU, watch=watch, checkpointing=checkpointing)
    assert checkpointing.store.steps() == [SMALL.steps]
    _assert_same(_run(tmp_path), whole)


def test_both_handlers_are_put_back(tmp_path: Path) -> None:
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with Checkpointing(tmp_path).listening():
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGTERM, own)


def test_resuming_without_checkpoints() -> None:
    with pytest.raises(ValueError, match="expected checkpointing= beside resume="):
        train(find_task("digits"), "none", SMALL, seed=5, device=CPU, resume="auto")


def test_a_second_interruption_ends_at_once(tmp_path: Path) -> None:
    def watch(now: Progress) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            find_task("digits"), "relative_2d", SMALL, seed=5, device=CPU,
            watch=lambda now: (watch(now), watch(now)), checkpointing=Checkpointing(tmp_path, 1000),
        )  # fmt: skip


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        _run(tmp_path, cut=3)
    checkpointing = Checkpointing(tmp_path, settings={"seed": 6})
    with pytest.raises(ValueError, match="expected seed 5, as step-00000002 was trained with; got 6"):
        train(find_task("digits"), "relative_2d", SMALL, seed=6, device=CPU, checkpointing=checkpointing, resume="auto")
    with pytest.raises(ValueError, match=r"--resume auto, or choose another --out"):
        train(find_task("digits"), "relative_2d", SMALL, seed=5, device=CPU, checkpointing=checkpointing)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        _run(tmp_path, cut=3)
    with pytest.raises(ValueError, match="the weights of the same model"):
        _run(tmp_path, replace(SMALL, embed_dim=32))


def test_a_folder_whose_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    """They are not taken for none."""
    with pytest.raises(Cut):
        _run(tmp_path, cut=3)
    for path in (tmp_path / "checkpoints").glob("*/state.json"):
        path.write_text("{}")
    with pytest.raises(ValueError, match=r"a checkpoint that can be read; got none in .*step-00000002"):
        _run(tmp_path)


def test_an_older_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    """Else newer ones would be in the way of those that it writes."""
    with pytest.raises(Cut):
        _run(tmp_path, cut=5)
    checkpointing = Checkpointing(tmp_path, settings={"seed": 5})
    older, newest = str(checkpointing.store.path(3)), str(checkpointing.store.path(4))
    with pytest.raises(
        ValueError, match=r"got step 3, and .*checkpoints has step 4\. Go on from an older one in another"
    ):
        checkpointing.resumed(older)
    newer = checkpointing.store.path(4) / "state.json"
    sound = newer.read_text()
    newer.write_text("{}")  # a damaged one is in nobody's way
    assert checkpointing.resumed(older) is not None
    newer.write_text(sound)
    elsewhere = Checkpointing(tmp_path / "other", settings={"seed": 5}).resumed(older)
    assert elsewhere is not None
    assert elsewhere.state["loop"]["step"] == 3
    assert Checkpointing(tmp_path / "third", settings={"seed": 5}).resumed(newest) is not None


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    code = "from pathlib import Path; from relpos.train.checkpointing import Checkpointing; import sys\n"
    code += "with Checkpointing(Path(sys.argv[1])).running(): print('held', flush=True), input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="a folder that no other run writes in"), Checkpointing(tmp_path).running():
            pass
        (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)  # chosen after the folder is held, not before
        with pytest.raises(ValueError, match="a folder that no other run writes in"):
            _run(tmp_path)
        other.kill()
        other.wait()
    (tmp_path / "checkpoints" / "step-00000002").rmdir()
    with Checkpointing(tmp_path).running("auto"):
        pass


def test_where_it_runs_now_is_said(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        _run(tmp_path, cut=3)
    said: list[str] = []
    found = Checkpointing(tmp_path, settings={"seed": 5}, about={"processes": 2}, tell=said.append).resumed("auto")
    assert found is not None
    assert said == ["resumed from step-00000002"]  # it does not say where it ran
    found.state["about"] = {"processes": 1}
    Checkpointing(tmp_path / "new", settings={"seed": 5}).store.write(2, found)
    said.clear()
    Checkpointing(tmp_path / "new", settings={"seed": 5}, about={"processes": 2}, tell=said.append).resumed("auto")
    assert "to rounding only: processes 1, now 2" in said[1]


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Checkpointing(tmp_path).listening():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_slow_checkpoint_is_not_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    checkpointing = Checkpointing(tmp_path)
    checkpointing._written, clock[0] = 0.0, 61.0
    assert checkpointing.due(1)
    monkeypatch.setattr(checkpointing.store, "write", lambda *_: clock.append(clock.pop() + 100.0))
    assert checkpointing.write(1, Snapshot({}, {}))
    assert not checkpointing.due(2)


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointing = Checkpointing(tmp_path, 2, tell=said.append)
    train(
        find_task("digits"),
        "none",
        replace(SMALL, steps=4),
        seed=5,
        device=CPU,
        checkpointing=checkpointing,
        resume="auto",
    )
    assert said == [f"no checkpoint to resume in {tmp_path / 'checkpoints'}: starting at step 0"]
    assert checkpointing.store.steps() == [2]  # none of the last step, whose weights are saved


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder step-N, the checkpoint of a run"):
        read_snapshot(tmp_path / "step-00000003")


def test_a_folder_that_cannot_be_locked_is_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks."""
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said: list[str] = []
    with Checkpointing(tmp_path, tell=said.append).running():
        pass
    assert said == [f"{tmp_path} cannot be locked (No locks available): see to it that no other run writes there"]
