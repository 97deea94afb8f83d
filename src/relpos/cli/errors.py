"""End a verb with an error in one line, even if a launcher started several processes.

The main process reports its own error. Others wait a while for it; if the main process has none, one of them reports
its error with its number. Errors that follow in other processes, such as a lost connection, are not reported.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import NoReturn

from relpos_command.parsing import fail

_PATIENCE = timedelta(seconds=10)
"""How long other processes wait for the main one, which may still be loading libraries."""


def end(message: str, code: int) -> NoReturn:
    """End with a message, which only one process prints.

    Raises:
        SystemExit: with this code.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        fail(message, code)
    rank = int(os.environ.get("RANK", "0"))
    if not _is_first(rank):
        raise SystemExit(code)
    fail(message, code, process=rank or None)


def is_lost_connection(error: Exception) -> bool:
    """Whether the error means that another process ended; gloo's errors are plain `RuntimeError`s."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))


def _is_first(rank: int) -> bool:
    """Whether this process is the first to report an error, by the launcher's store; without a store, always True."""
    import torch.distributed as dist

    run = f"relpos/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
        if rank:
            with contextlib.suppress(RuntimeError):  # the main one has no error
                store.wait([f"{run}/main"], _PATIENCE)
        first: bool = store.add(f"{run}/errors", 1) == 1
        if not rank:
            store.set(f"{run}/main", "")
    except (KeyError, ValueError, RuntimeError):
        return True
    return first
