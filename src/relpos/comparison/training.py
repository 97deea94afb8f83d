"""The files of a training run, in its own folder.

DIR/training/RUN/losses.jsonl          a line per step: {"step": 1, "loss": 2.31, "rate": 0.0002}; some with validation
DIR/training/RUN/model.safetensors     the trained weights
DIR/training/RUN/events.out...         the same curves for TensorBoard, if installed
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from relpos.comparison.store import file_name
from relpos.core.checks import fail, shape_of
from relpos.files.writing import named, write_whole
from relpos.position.base.saved_settings import is_settings
from relpos.train import Progress

_LOSSES, _WEIGHTS = "losses.jsonl", "model.safetensors"


class TrainingLog:
    """Writes losses and rates of a run step by step; it replaces an earlier log in the same folder.

    Args:
        folder: the run's folder; it is created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOSSES
        with named(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8", buffering=1)  # a line at a time
            self._board = _board(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with named(self._path):
            self._file.close()
            if self._board is not None:
                self._board.close()

    def add(self, progress: Progress) -> None:
        """Log a step."""
        entry = {"step": progress.step, "loss": progress.loss, "rate": progress.rate}
        if progress.validation is not None:
            entry["validation"] = progress.validation
        with named(self._path):
            self._file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name in entry.keys() - {"step"}:
                self._board.add_scalar(name, entry[name], progress.step)


def _board(folder: Path) -> Any:
    """TensorBoard's writer, or None if it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder))  # type: ignore[no-untyped-call, unused-ignore]


def folder_of(name: str) -> str:
    """The folder of a run, by its job's name, within that of the comparison."""
    return f"training/{file_name(name)}"


def weights_of(folder: Path) -> Path:
    """The file of a run's trained weights."""
    return folder / _WEIGHTS


def save_weights(folder: Path, model: nn.Module) -> None:
    """Save a trained model's weights; tensors that share memory are each written."""
    from safetensors.torch import save

    tensors = {name: x.detach().cpu().clone().contiguous() for name, x in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(weights_of(folder), save(tensors))


def load_run(folder: Path, model: nn.Module) -> None:
    """Load a run's saved weights into a model.

    Raises:
        ValueError: the weights do not fit the model.
    """
    from safetensors.torch import load_file

    stored, expected = load_file(weights_of(folder)), model.state_dict()
    for name in [*expected, *(name for name in stored if name not in expected)]:
        if is_settings(name) and name in expected:  # loading compares them; old files lack them
            continue
        wanted, came = expected.get(name), stored.get(name)
        if wanted is None or came is None or wanted.shape != came.shape:
            of_model, of_file = (shape_of(x) if isinstance(x, Tensor) else "none" for x in (wanted, came))
            what = f"{name} in {weights_of(folder)} as the model has it: {of_model}"
            fail(what, of_file, "Compare in another folder.")
    model.load_state_dict(stored)
