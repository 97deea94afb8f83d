"""The checkpoints of a training run: when one is due, and how a run ends on a signal.

On SIGTERM or Ctrl-C the run finishes the current step, writes a checkpoint and exits with 143 or 130. A second Ctrl-C
ends it at once. If a checkpoint cannot be written, the run reports it in one line and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relpos.core.checks import fail, require_int
from relpos.files.manifest import MANIFEST, digest_of, fault_of
from relpos.files.writing import WriteError
from relpos.train.processes import all_of, world_size
from relpos.train.snapshots import FOLDER, Snapshot, SnapshotStore, read_snapshot

_SECONDS = 60.0
"""Time between checkpoints if no number of steps is given; a shorter run writes none."""
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StoppedError(Exception):
    """The process got a signal to end; a checkpoint was written if possible.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Checkpointing:
    """Where and how often to write checkpoints.

    Attributes:
        folder: of the run; checkpoints are in its subfolder `checkpoints`.
        every: steps between checkpoints; None for one per minute.
        keep: number of checkpoints to keep, at least 2.
        settings: of the run; a checkpoint with other settings is not resumed.
        about: environment of the run. If a checkpoint is from another one, the resumed run is equal up to rounding
            only, and a message says so.
        tell: called with messages for the user.
        writes: whether this process writes; the others only take part.
    """

    folder: Path
    every: int | None = None
    keep: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = print
    writes: bool = True
    exit_code: int | None = field(default=None, init=False)
    _written: float = field(default_factory=time.monotonic, init=False)
    _launcher: int = field(default_factory=os.getppid, init=False)

    def __post_init__(self) -> None:
        if self.every is not None:
            require_int(self.every, "checkpoint_every", at_least=1)
        require_int(self.keep, "keep", at_least=2)
        self.store = SnapshotStore(self.folder / FOLDER, keep=self.keep, writes=self.writes)

    def told(self) -> int:
        """The exit code if the process was told to end, else 0. A worker whose launcher is gone also has to end."""
        if self.exit_code is None and world_size() > 1 and os.getppid() != self._launcher:
            self.exit_code = 143
        return self.exit_code or 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due at a step; by this process's clock if no number of steps is given."""
        if self.every is not None:
            return step % self.every == 0
        return self.writes and time.monotonic() - self._written >= _SECONDS

    def write(self, step: int, snapshot: Snapshot) -> bool:
        """Write a checkpoint; returns False if this process failed. If the snapshot has parts, all processes must call
        it."""
        if not self.writes and not snapshot.parts:
            return True
        state = snapshot.state | {"settings": self.settings, "about": self.about}
        try:
            self.store.write(step, replace(snapshot, state=state))
        except WriteError as error:
            self.tell(f"no checkpoint of step {step}: {error}" + ("" if self.told() else " Training continues."))
            return False
        finally:
            self._written = time.monotonic()
        return True

    def resumed(self, where: str | None) -> Snapshot | None:
        """The checkpoint to resume from: "auto" for the newest valid one, a path, or None for none.

        The writing process chooses. All processes read the same checkpoint, or all fail.

        Raises:
            ValueError: the path has no checkpoint, or one with other settings; `where` is None and the folder has a
                checkpoint; a process cannot find it.
        """
        chosen: Path | None = None
        fault: Exception | None = None
        if self.writes:
            try:
                chosen = self._chosen(where)
            except Exception as error:  # the others wait for the result
                fault = error
        _raise_everywhere(fault)
        chosen = all_of(chosen)[0]
        if chosen is None:
            return None
        snapshot: Snapshot | None = None
        outcome: tuple[str | None, str | None]  # the manifest's digest, or why it cannot be read
        try:
            snapshot, outcome = read_snapshot(chosen), (digest_of(chosen / MANIFEST), None)
        except (ValueError, OSError) as error:
            outcome = (None, str(error))
        outcomes = all_of(outcome)
        if outcome[1] is not None and all(one == outcome for one in outcomes):
            raise ValueError(outcome[1])
        if snapshot is None or any(one != outcomes[0] for one in outcomes):
            rank = next(rank for rank, one in enumerate(outcomes) if one != outcomes[0] or one[0] is None)
            came = f"process {rank}, which finds {outcomes[rank][1] or 'another there'}"
            fail(f"every process to read the same {chosen}", came, "Choose an --out that all machines share.")
        self._require_same(snapshot.state.get("settings", {}), chosen)
        self.tell(f"resumed from {chosen.name}")
        before = snapshot.state.get("about", {})
        if changed := [
            f"{name} {before[name]}, now {now}" for name, now in self.about.items() if before.get(name, now) != now
        ]:
            self.tell(f"equal to the resumed run only up to rounding: {'; '.join(changed)}")
        return snapshot

    def _chosen(self, where: str | None) -> Path | None:
        newest, passed = self.store.newest()
        if where is None:
            if newest is not None:
                fail(
                    f"a folder without checkpoints of a run in {FOLDER}/",
                    str(self.folder),
                    "Continue it with --resume auto, or choose another --out.",
                )
            return None
        if where != "auto":
            path = Path(where)
            step = read_snapshot(path).state["loop"]["step"]
            newer = (one for one in self.store.steps() if one > step and fault_of(self.store.path(one)) is None)
            if (first := next(newer, None)) is not None:
                came = f"step {step}, and {self.store.folder} has step {first}"
                fail("the newest checkpoint of a folder", came, "Continue from an older one in another --out.")
            return path
        for path, fault in passed:
            self.tell(f"skipped {path.name}: {fault}")
        if newest is None and passed:
            came = f"none in {self.store.folder} ({passed[0][0].name}: {passed[0][1]})"
            fail("a checkpoint that can be read", came, "Make it readable, or choose another --out.")
        if newest is None:
            self.tell(f"no checkpoint to resume in {self.store.folder}: starting at step 0")
        return newest

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the folder, so that no other run writes there. The lock ends with the process."""
        if sys.platform == "win32":  # it has no flock
            yield
            return
        import fcntl

        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail("a folder that no other run writes in", str(self.folder), "Wait for it, or choose another --out.")
            except OSError as error:  # a file system without locks
                self.tell(
                    f"{self.folder} cannot be locked ({error.strerror}): make sure that no other run writes there"
                )
            yield
        finally:
            os.close(descriptor)
            if made:
                with suppress(OSError):  # it is not empty
                    self.folder.rmdir()

    def _require_same(self, settings: dict[str, Any], path: Path) -> None:
        for name in sorted(self.settings.keys() | settings.keys()):
            now, before = self.settings.get(name), settings.get(name)
            if now != before:
                fail(
                    f"{name} {before!r}, as {path.name} was trained with",
                    repr(now),
                    "Resume with the same settings, or start a new run in another --out.",
                )

    def end(self, step: int, *, written: bool) -> None:
        """Raise `StoppedError` with the exit code."""
        assert self.exit_code is not None
        left = (
            f"a checkpoint of step {step} is in {self.store.folder}; the same command with --resume auto continues"
            if written
            else "no newer checkpoint could be written"
        )
        raise StoppedError(f"interrupted; {left}", self.exit_code)

    @contextmanager
    def running(self, resume: str | None = None) -> Iterator[Snapshot | None]:
        """A run: lock the folder, then record signals and choose the checkpoint.

        Yields:
            The result of `resumed`.
        """
        with ExitStack() as stack:
            fault: Exception | None = None
            if self.writes:
                try:
                    stack.enter_context(self._alone())
                except (ValueError, OSError) as error:
                    fault = error
            _raise_everywhere(fault)
            stack.enter_context(self.listening())
            yield self.resumed(resume)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record SIGTERM and Ctrl-C; a second Ctrl-C ends at once. Only in the main thread.

        A second SIGTERM does not end at once: a scheduler sends it to every process, and torchrun forwards it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Ignored signals, as in a shell's background job, stay ignored; None is a handler not set from Python.
        handlers = {number: signal.getsignal(number) for number in _CODES}
        before = {number: one for number, one in handlers.items() if one not in (signal.SIG_IGN, None)}

        def note(number: int, frame: Any) -> None:
            self.exit_code = _CODES[signal.Signals(number)]
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if number == signal.SIGINT and signal.SIGTERM in before and world_size() > 1:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun sends SIGTERM on a second Ctrl-C

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _raise_everywhere(fault: Exception | None) -> None:
    """Raise the writing process's error in every process, because the others would wait for it."""
    message = all_of(None if fault is None else str(fault))[0]
    if fault is not None:
        raise fault
    if message is not None:
        raise ValueError(message)
