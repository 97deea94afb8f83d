"""Training on a stream of shards: killed in its middle, it goes on to the same weights."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from loaded import Loaded
from relpos.data import Task, from_wds
from relpos.train import ImageRecipe, train
from relpos.train.checkpointing import Checkpointing
from sampled import files_of, made, write_tar

RECIPE = ImageRecipe(steps=12, warmup_steps=2, batch_size=5, embed_dim=8, depth=1, num_heads=1)

pytestmark = pytest.mark.usefixtures("one_thread")

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_streamed import fitted, stream

def watch(progress):
    if progress.step == 9:
        os.kill(os.getpid(), signal.SIGKILL)

fitted(stream(Path(sys.argv[1])), Path(sys.argv[2]), watch=watch)
"""


def stream(folder: Path) -> Task:
    """Blocks of 10 of some thirty training samples."""
    return from_wds(f"{folder}/{{0..2}}.tar", image_size=32, patch=4, streaming=True, buffer=10)


def fitted(task: Task, out: Path | None, **more: Any) -> dict[str, torch.Tensor]:
    """The weights, with a checkpoint after every second step in `out`."""
    checkpointing = None if out is None else Checkpointing(out, 2, settings={"seed": 3}, tell=lambda _: None)
    model, _ = train(
        task, "relative_2d", RECIPE, seed=3, device=torch.device("cpu"), checkpointing=checkpointing, **more
    )
    return model.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_same_weights(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = made(42)
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", files_of(samples[14 * number : 14 * number + 14]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    run = loaded.run("-c", KILLED, tmp_path, tmp_path / "out", Path(__file__).parent, needs=["train"], separate=False)
    assert run.returncode == -signal.SIGKILL, run.stdout
    expected = fitted(stream(tmp_path), None)
    assert same(fitted(stream(tmp_path), tmp_path / "out", resume="auto"), expected)
