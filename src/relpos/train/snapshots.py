"""The checkpoints of a run on disk: each is written atomically, and the newest valid one is found again.

checkpoints/step-00000120/    model.safetensors      weights and buffers
                              optimizer.safetensors  its moments
                              shard-*.safetensors    instead of both, if weights are sharded (`shards.py`)
                              random.safetensors     states of PyTorch's generators, of every process
                              state.json             everything that is not a tensor
                              manifest.json          sizes and SHA-256
checkpoints/step-00000160.tmp                        one being written, or left by a killed run

Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save as dumped
from torch import Tensor

from relpos.core.checks import fail
from relpos.files.manifest import fault_of, seal, sync
from relpos.files.reading import MIB, FileError, read_json
from relpos.files.writing import WriteError, write_json, write_whole
from relpos.train.processes import all_of
from relpos.train.shards import stored_in, write_shards

FOLDER = "checkpoints"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEAST = 2
"""Minimum number of valid checkpoints to keep."""
_STATE_AT_MOST = 256 * MIB
_KEYS = {"loop", "optimizer", "scaler", "random"}
"""Keys that every run's state has."""


@dataclass(frozen=True)
class Snapshot:
    """The state that determines the next step of a run.

    Attributes:
        tensors: by kind ("model", "optimizer", "random") and name.
        state: the remaining state, as plain values.
        parts: the tensors of which this process holds a shard; empty after reading.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: dict[str, Any]
    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


class SnapshotStore:
    """The checkpoints in a folder.

    Args:
        folder: their folder, made with the first one.
        keep: number of checkpoints to keep; never fewer than two.
        writes: whether this process writes unsharded tensors, and renames the finished folder.
    """

    def __init__(self, folder: Path, *, keep: int = _LEAST, writes: bool = True) -> None:
        self.folder, self.keep, self.writes = folder, max(_LEAST, keep), writes

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, valid or not, newest first."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(name[1]) for name in names if name is not None), reverse=True)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def write(self, step: int, snapshot: Snapshot) -> None:
        """Write the checkpoint of a step, then remove older ones. If it has parts, all processes must call it.

        Raises:
            WriteError: it cannot be written; earlier ones stay.
        """
        folder = self.path(step)
        unfinished = folder.with_suffix(".tmp")
        begun = False
        try:
            try:
                begun = self.writes and _begun(folder, unfinished)
            finally:
                if snapshot.parts:
                    begun = all_of(begun)[0]
            if begun and snapshot.parts:
                write_shards(unfinished, snapshot.parts)
            if not begun or not self.writes:
                return
            for name, tensors in snapshot.tensors.items():
                write_whole(unfinished / f"{name}.safetensors", dumped(dict(tensors)))
            write_json(unfinished / STATE, snapshot.state)
            seal(unfinished, {"step": step})
            os.rename(unfinished, folder)
            sync(self.folder)
        except BaseException as error:
            if self.writes:
                shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, WriteError):
                message = f"expected to write {folder}; got {error.strerror or error}."
                raise WriteError(message, error.errno) from error
            raise
        with contextlib.suppress(OSError):  # the next checkpoint tries again
            self._prune(step)

    def _prune(self, written: int) -> None:
        """Remove checkpoints older than `keep` valid ones. The one just written counts as valid."""
        sound = 0
        for step in self.steps():
            folder = self.path(step)
            if sound >= self.keep:
                removed = folder.with_suffix(".tmp")  # renamed first: a kill then leaves no half-removed checkpoint
                with contextlib.suppress(OSError):
                    os.rename(folder, removed)
                    shutil.rmtree(removed)
            elif step == written or fault_of(folder) is None:
                sound += 1

    def newest(self) -> tuple[Path | None, list[tuple[Path, str]]]:
        """The newest valid checkpoint, and the newer invalid ones, each with its fault."""
        passed: list[tuple[Path, str]] = []
        for step in self.steps():
            fault = fault_of_checkpoint(self.path(step))
            if fault is None:
                return self.path(step), passed
            passed.append((self.path(step), fault))
        return None, passed


def _begun(folder: Path, unfinished: Path) -> bool:
    """Make the temporary folder of a checkpoint. False if a valid checkpoint exists: a resumed run repeats its step."""
    if folder.exists():
        if fault_of(folder) is None:
            return False
        shutil.rmtree(folder)
    for left in unfinished.parent.glob("step-*.tmp"):  # left by a run killed while writing or removing one
        shutil.rmtree(left, ignore_errors=True)
    first = not unfinished.parent.exists()
    unfinished.mkdir(parents=True)
    if first:
        sync(unfinished.parent.parent)
    return True


def read_snapshot(path: Path) -> Snapshot:
    """The checkpoint in a folder `step-N`; each tensor is read on access.

    Raises:
        ValueError: it is not a checkpoint, or it is damaged.
    """
    if not path.is_dir():
        fail("a folder step-N, the checkpoint of a run", str(path), "Name one, or take the newest: --resume auto.")
    fault = fault_of_checkpoint(path)
    if fault is not None:
        fail("a checkpoint that is whole", f"{path} ({fault})", "Take the newest that is: --resume auto.")
    state: dict[str, Any] = read_json(path / STATE, _STATE_AT_MOST)
    return Snapshot(stored_in(_tensors_in(path)), state)


def fault_of_checkpoint(path: Path) -> str | None:
    """Why a run cannot resume from a folder; None if it can."""
    fault = fault_of(path)
    if fault is not None:
        return fault
    try:
        state = read_json(path / STATE, _STATE_AT_MOST)
        tensors = stored_in(_tensors_in(path))
    except (FileError, SafetensorError, OSError) as error:
        return str(error)
    lacks = sorted(_KEYS - state.keys()) if isinstance(state, dict) else [STATE]
    if not lacks and not (isinstance(state["loop"], dict) and "step" in state["loop"]):
        lacks = ["the step"]
    return f"it lacks {lacks[0]}" if lacks else None if "model" in tensors else "it lacks a model"


def _tensors_in(path: Path) -> list[Path]:
    return sorted(path.glob("[!.]*.safetensors"))
