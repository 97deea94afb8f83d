"""Runs that are cut short and go on: equal to those that were not, bit for bit."""

import errno
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from relpos.train.snapshots import Snapshot, SnapshotStore, read_snapshot

FAST_CASES = 1  # of each of its tests, in the fast part

SMALL = ImageRecipe(steps=14, warmup_steps=2, batch_size=400, embed_dim=8, depth=1, num_heads=1)  # three an epoch
FEW = replace(SMALL, steps=6, batch_size=16)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def signals_that_are_heard() -> Iterator[None]:
    """In the background of a shell an interruption is ignored, by the tests and what they run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


Trained = tuple[dict[str, Tensor], Curve]


def _checkpointing(folder: Path, every: int | None = 1000, **more: Any) -> Checkpointing:
    return Checkpointing(folder, every, **{"settings": {"seed": 5}, "tell": lambda _: None, **more})


def _run(checkpointing: Checkpointing | None, recipe: Recipe = SMALL, **more: Any) -> Trained:
    """A run that goes on where there is a checkpoint."""
    begun = checkpointing is not None and checkpointing.store.steps()
    task = find_task("text" if isinstance(recipe, TextRecipe) else "digits")
    given = {"position": "relative_2d", "seed": 5, "device": CPU, "resume": "auto" if begun else None, **more}
    model, curve = train(task, recipe=recipe, checkpointing=checkpointing, **given)
    return model.state_dict(), curve


def _assert_same(own: Trained, whole: Trained) -> None:
    assert own[1] == whole[1]
    assert all(torch.equal(x, whole[0][name]) for name, x in own[0].items())


@dataclass(frozen=True)
class Whole:
    """A run that was not cut short, and its checkpoints, one a step: what it would have left, had it been."""

    trained: Trained
    store: SnapshotStore

    def cut(self, folder: Path, *steps: int) -> Path:
        """A folder of a run that has left checkpoints of these steps."""
        for step in steps:
            shutil.copytree(self.store.path(step), folder / "checkpoints" / self.store.path(step).name)
        return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    torch.set_num_threads(1)
    checkpointing = _checkpointing(tmp_path_factory.mktemp("whole"), 1, keep=100)
    return Whole(_run(checkpointing), checkpointing.store)


@pytest.mark.slow
def test_checkpoints_change_nothing(whole: Whole) -> None:
    _assert_same(_run(None), whole.trained)


@pytest.mark.parametrize("step", [1, 8, 9, pytest.param(13, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_any_step(step: int, whole: Whole, tmp_path: Path) -> None:
    """In the middle of an epoch and between two; and once more from what it writes itself."""
    checkpointing = _checkpointing(whole.cut(tmp_path / "once", step), 3)
    _assert_same(_run(checkpointing), whole.trained)
    if step == 8:
        assert checkpointing.store.steps() == [12, 9]
        _assert_same(_run(checkpointing), whole.trained)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (replace(FEW, optimizer="lion"), {"precision": "bf16-mixed"}),
        (replace(FEW, optimizer="sophia-g", hessian_every=2), {"precision": "fp16-mixed"}),
        (replace(FEW, optimizer="sophia-h", hessian_every=2), {}),
        (FEW, {"position": "fire", "parallelism": Parallelism(accumulate=4)}),
        (TextRecipe(steps=6, warmup_steps=2, batch_size=4, embed_dim=16, depth=1, num_heads=2), {"position": "alibi"}),
    ],
    ids=["lion, bf16", "sophia-g, fp16", "sophia-h", "fire, accumulation", "text"],
)
@pytest.mark.slow
def test_whatever_trains_goes_on(recipe: Recipe, more: dict[str, Any], tmp_path: Path) -> None:
    checkpointing = _checkpointing(tmp_path, 3)
    expected = _run(checkpointing, recipe, **more)
    assert checkpointing.store.steps() == [3]  # none of the last step, whose weights are saved
    _assert_same(_run(checkpointing, recipe, **more), expected)


def test_parts_of_a_batch_have_its_gradient() -> None:
    one, _ = _run(None, replace(SMALL, steps=2))
    four, _ = _run(None, replace(SMALL, steps=2), parallelism=Parallelism(accumulate=4))
    for name, x in one.items():
        assert float((four[name] - x).abs().max()) < 1e-3 * max(1.0, float(x.abs().max())), name


@pytest.mark.traced
def test_blocks_are_compiled_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    recipe = replace(FEW, steps=1, depth=3)
    _run(None, recipe)
    assert not compiled
    _run(None, recipe, parallelism=Parallelism(compile=True))
    assert compiled == ["TransformerBlock"] * 3


# Signals


@pytest.mark.parametrize(
    ("number", "code", "at", "written"),
    [
        (signal.SIGTERM, 143, 11, 12),
        (signal.SIGINT, 130, 11, 12),
        (signal.SIGTERM, 143, 14, 14),  # while its last step is measured
    ],
)
def test_a_run_that_is_told_to_end_writes_a_checkpoint(
    number: signal.Signals, code: int, at: int, written: int, whole: Whole, tmp_path: Path
) -> None:
    """That of the step under way."""
    checkpointing, before = _checkpointing(whole.cut(tmp_path, 10)), signal.getsignal(number)

    def watch(now: Progress) -> None:
        if now.step == at:
            signal.raise_signal(number)

    with pytest.raises(StoppedError, match="--resume auto continues") as stopped:
        _run(checkpointing, watch=watch)
    assert stopped.value.code == code
    assert signal.getsignal(number) == before
    assert checkpointing.store.steps() == [written, 10]
    _assert_same(_run(_checkpointing(tmp_path)), whole.trained)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 4])
def test_it_is_told_in_the_middle_of_an_accumulation(
    part: int, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends before the checkpoint is written: parts of one are in none."""
    four = Parallelism(accumulate=4)
    expected = _run(_checkpointing(whole.cut(tmp_path / "expected", 11)), parallelism=four)
    ours, parts = Procedure.loss, 0

    def loss(procedure: Procedure, model: torch.nn.Module, batch: Any) -> Tensor:
        nonlocal parts
        parts += model.training  # not what validation measures
        if model.training and parts == 4 + part:
            signal.raise_signal(signal.SIGTERM)
        return ours(procedure, model, batch)

    checkpointing = _checkpointing(whole.cut(tmp_path / "told", 11))
    with monkeypatch.context() as patch:
        patch.setattr(Procedure, "loss", loss)
        with pytest.raises(StoppedError):
            _run(checkpointing, parallelism=four)
    assert checkpointing.store.steps() == [13, 11]
    _assert_same(_run(_checkpointing(tmp_path / "told"), parallelism=four), expected)


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
        (["SIGINT", "SIGINT"], 1, -signal.SIGINT),
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


@pytest.mark.parametrize("ignored", [False, True])
def test_both_handlers_are_put_back(ignored: bool, tmp_path: Path) -> None:
    """One that is ignored stays so meanwhile, too."""
    numbers = signal.SIGINT, signal.SIGTERM
    handler = signal.SIG_IGN if ignored else lambda *_: None
    first = [signal.signal(number, handler) for number in numbers]
    try:
        with Checkpointing(tmp_path).listening():
            assert all((signal.getsignal(number) == handler) == ignored for number in numbers)
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, own in zip(numbers, first, strict=True):
            signal.signal(number, own)


# What is refused, and what is said


def test_resuming_without_checkpoints() -> None:
    with pytest.raises(ValueError, match="expected checkpointing= with resume="):
        _run(None, resume="auto")


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({"settings": {"seed": 6}}, {}, "expected seed 5, as step-00000002 was trained with; got 6"),
        ({}, {"resume": None}, "--resume auto, or choose another --out"),
        ({}, {"recipe": replace(SMALL, embed_dim=32)}, "the weights of the same model"),
    ],
)
def test_a_checkpoint_of_another_run(
    changed: dict[str, Any], more: dict[str, Any], message: str, whole: Whole, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        _run(_checkpointing(whole.cut(tmp_path, 2), **changed), **more)


@pytest.mark.parametrize("kept_as", ["tensors", "state"])
def test_moments_of_a_parameter_that_the_model_has_not(kept_as: str, whole: Whole, tmp_path: Path) -> None:
    found, checkpointing = read_snapshot(whole.store.path(2)), _checkpointing(tmp_path)
    moments = {"tensors": {"gone.weight.exp_avg": torch.zeros(2)}, "state": {"gone.weight": {"step": 2}}}[kept_as]
    changed = {kept_as: {**getattr(found, kept_as), "optimizer": moments}}
    checkpointing.store.write(2, replace(found, **changed))
    with pytest.raises(
        ValueError, match=r"expected moments of the model's own parameters .*; got some of 'gone.weight'"
    ):
        _run(checkpointing)


def test_a_folder_whose_checkpoints_cannot_be_read(whole: Whole, tmp_path: Path) -> None:
    """They are not taken for none."""
    checkpointing = _checkpointing(whole.cut(tmp_path, 2))
    (checkpointing.store.path(2) / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a checkpoint that can be read; got none in .*step-00000002"):
        _run(checkpointing)


def test_an_older_checkpoint_goes_on_elsewhere(whole: Whole, tmp_path: Path) -> None:
    """Else newer ones would be in the way of those that it writes."""
    checkpointing = _checkpointing(whole.cut(tmp_path, 3, 4))
    older, newest = str(checkpointing.store.path(3)), str(checkpointing.store.path(4))
    with pytest.raises(
        ValueError, match=r"got step 3, and .*checkpoints has step 4\. Continue from an older one in anot"
    ):
        checkpointing.resumed(older)
    newer = checkpointing.store.path(4) / "state.json"
    sound = newer.read_text()
    newer.write_text("{}")  # a damaged one is in nobody's way
    assert checkpointing.resumed(older) is not None
    newer.write_text(sound)
    elsewhere = _checkpointing(tmp_path / "other").resumed(older)
    assert elsewhere is not None
    assert elsewhere.state["loop"]["step"] == 3
    assert _checkpointing(tmp_path / "third").resumed(newest) is not None


def test_two_runs_in_one_folder(whole: Whole, tmp_path: Path) -> None:
    """A checkpoint is chosen after the folder is held, not before."""
    with Checkpointing(whole.cut(tmp_path, 2), settings={"seed": 5}).running("auto"):
        for resume in (None, "auto"):
            with pytest.raises(ValueError, match="a folder that no other run writes in"):
                _run(_checkpointing(tmp_path), resume=resume)
    with _checkpointing(tmp_path).running("auto") as found:
        assert found is not None


def test_where_it_runs_now_is_said(whole: Whole, tmp_path: Path) -> None:
    said: list[str] = []
    now = {"about": {"processes": 2}, "tell": said.append}
    found = _checkpointing(whole.cut(tmp_path / "old", 2), **now).resumed("auto")
    assert found is not None
    assert said == ["resumed from step-00000002"]  # it does not say where it ran
    found.state["about"] = {"processes": 1}
    _checkpointing(tmp_path / "new").store.write(2, found)
    _checkpointing(tmp_path / "new", **now).resumed("auto")
    assert "only up to rounding: processes 1, now 2" in said[2]


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
    assert _checkpointing(tmp_path, tell=said.append).resumed("auto") is None
    assert said == [f"no checkpoint to resume in {tmp_path / 'checkpoints'}: starting at step 0"]


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
    assert said == [f"{tmp_path} cannot be locked (No locks available): make sure that no other run writes there"]
