"""What the workers of the tests do; in a module of its own, so that other processes can import it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relpos.comparison.training import TrainingLog
from relpos.train import Progress


def double(number: int) -> int:
    return 2 * number


def no_bytes(parcel: bytes, shared: bytes) -> Path:
    """In place of `trial`: Dask would pickle it."""
    return Path("own")


def count(upto: int, report: Callable[[Any], None]) -> str:
    for number in range(upto):
        report(number)
    return "counted"


def process_id(folder: Path) -> int:
    return os.getpid()


def run_out_of_space(folder: Path) -> None:
    """As on a full disk, in the line of losses of a run."""
    log = TrainingLog(folder)
    log._file.close()
    log._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    log.add(Progress(1, 2, 0.5, 0.1))


def divide(number: int) -> float:
    return number / 0


def held_back() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def vanish(code: int) -> None:
    os._exit(code)


def write_later(path: Path, seconds: float) -> None:
    path.with_suffix(".begun").touch()
    time.sleep(seconds)
    path.touch()


def wait_at_first(path: Path) -> str:
    """Whoever comes first leaves its number, and waits; the second time it is done."""
    if path.exists():
        return "done"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(3600)
    return "not killed"


def tell_and_wait(path: Path, report: Callable[[Any], None]) -> str:
    """Say where it is, and wait until it may end."""
    report(Progress(3, 8, 0.5, 0.1))
    while not path.exists():
        time.sleep(0.01)
    return "done"


def ranks(number: int, report: Callable[[Any], None]) -> tuple[int, str]:
    report(Progress(1, 2, 0.5, 0.1))
    return number, f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def fail_in(rank: int, folder: Path, report: Callable[[Any], None]) -> None:
    """One fails, the other has left its number, and waits."""
    if os.environ["RANK"] != str(rank):
        (folder / str(os.getpid())).touch()
        time.sleep(3600)
    while not list(folder.iterdir()):
        time.sleep(0.01)
    raise ZeroDivisionError("on purpose")


def wait_for_ever(path: Path) -> None:
    path.touch()
    time.sleep(3600)


def fail_once_begun(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.with_suffix(".begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise ZeroDivisionError("on purpose")


class SlowlyRead:
    """Is read for a while by whoever receives it."""

    def __setstate__(self, state: Any) -> None:
        time.sleep(1.0)

    def __getstate__(self) -> dict[str, bool]:
        return {"any": True}


def end_first(report: Callable[[Any], None]) -> SlowlyRead:
    """The first process has an answer; others fail when it has ended."""
    if os.environ["RANK"] == "0":
        return SlowlyRead()
    time.sleep(0.2)
    raise RuntimeError("the first has ended")
