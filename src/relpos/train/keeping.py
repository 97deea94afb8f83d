"""The checkpoints of a run while it trains: when one is due, and what is done when the process is told to end.

SIGTERM and Ctrl-C let the step under way finish, write a checkpoint and end with 143 and 130; a second Ctrl-C ends at
once. A checkpoint that cannot be written is said in one line, and the run goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.core.checks import fail, require_int
from relpos.files.writing import WriteError
from relpos.train.processes import world_size
from relpos.train.snapshots import FOLDER, Snapshot, SnapshotStore, read_snapshot

_SECONDS = 60.0
"""From one checkpoint to the next where no number of steps is given; a shorter run writes none."""
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StoppedError(Exception):
    """The process was told to end, and a checkpoint was written if it could be.

    Attributes:
        code: what to exit with.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Keeping:
    """Where and how often.

    Attributes:
        folder: of the run; checkpoints lie in `checkpoints` there.
        every: steps from one to the next; None for once a minute.
        keep: how many stay, at least 2.
        settings: what the run is; a checkpoint of other settings is not resumed.
        tell: called with what a person should know.
        writes: whether this process does; others take part.
    """

    folder: Path
    every: int | None = None
    keep: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = print
    writes: bool = True
    told_to_end: int | None = field(default=None, init=False)
    _written: float = field(default_factory=time.monotonic, init=False)
    _launcher: int = field(default_factory=os.getppid, init=False)

    def __post_init__(self) -> None:
        if self.every is not None:
            require_int(self.every, "checkpoint_every", at_least=1)
        require_int(self.keep, "keep", at_least=2)
        self.store = SnapshotStore(self.folder / FOLDER, keep=self.keep)

    def told(self) -> int:
        """What to exit with where the process was told to end, else 0. Without its launcher, it is no part of a run."""
        if self.told_to_end is None and world_size() > 1 and os.getppid() != self._launcher:
            self.told_to_end = 143
        return self.told_to_end or 0

    def due(self, step: int) -> bool:
        """Whether the checkpoint of a step is due, by this process's clock where no number of steps is given."""
        if self.every is not None:
            return step % self.every == 0
        return self.writes and time.monotonic() - self._written >= _SECONDS

    def write(self, step: int, snapshot: Snapshot) -> bool:
        """Write a checkpoint; whether that could be done."""
        self._written = time.monotonic()
        if not self.writes:
            return True
        try:
            self.store.write(step, Snapshot(snapshot.tensors, snapshot.state | {"settings": self.settings}))
        except WriteError as error:
            self.tell(f"no checkpoint of step {step}: {error} Training goes on.")
            return False
        return True

    def resumed(self, where: str | None) -> Snapshot | None:
        """The checkpoint to go on from: "auto" for the newest that is sound, a path, or None for none.

        Raises:
            ValueError: there is none at the path, or it is of other settings; None was asked for, and there is one.
        """
        newest, passed = self.store.newest()
        if where is None:
            if newest is not None:
                fail(
                    f"a folder without checkpoints of a run in {FOLDER}/",
                    str(self.folder),
                    "Go on from there with --resume auto, or choose another --out.",
                )
            return None
        if where != "auto":
            newest, passed = Path(where), []
        for path, fault in passed:
            self.tell(f"passed over {path.name}: {fault}")
        if newest is None:
            self.tell(f"no checkpoint to resume in {self.store.folder}: starting at step 0")
            return None
        snapshot = read_snapshot(newest)
        self._require_same(snapshot.state.get("settings", {}), newest)
        self.tell(f"resumed from {newest.name}")
        return snapshot

    def _require_same(self, theirs: dict[str, Any], path: Path) -> None:
        for name in sorted(self.settings.keys() | theirs.keys()):
            own, other = self.settings.get(name), theirs.get(name)
            if own != other:
                fail(
                    f"{name} {other!r}, as {path.name} was trained with",
                    repr(own),
                    "Resume with the same settings, or start a new run in another --out.",
                )

    def end(self, step: int, *, written: bool) -> None:
        """End as the process was told to."""
        assert self.told_to_end is not None
        left = (
            f"a checkpoint of step {step} is in {self.store.folder}; the same command with --resume auto goes on"
            if written
            else "its last checkpoint is the one before"
        )
        raise StoppedError(f"interrupted; {left}", self.told_to_end)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts, SIGTERM and Ctrl-C are noted; a second Ctrl-C ends at once. In the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _CODES}

        def note(number: int, frame: Any) -> None:
            self.told_to_end = _CODES[signal.Signals(number)]
            signal.signal(signal.SIGINT, signal.default_int_handler)

        for number in _CODES:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
