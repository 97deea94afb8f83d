"""How a verb ends with an error: in one line, also where a launcher started several processes.

The main process says its own. Another waits a while for it, and where the main one has none, says what it has alone,
with its number. What follows elsewhere from an error, such as a lost connection, nobody says.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import NoReturn

from relpos_command.parsing import fail

_PATIENCE = timedelta(seconds=10)
"""How long another process waits for the main one, which may be loading libraries still."""


def end(message: str, code: int) -> NoReturn:
    """End with a message, which one process says.

    Raises:
        SystemExit: with the code.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        fail(message, code)
    rank = int(os.environ.get("RANK", "0"))
    if not _is_first(rank):
        raise SystemExit(code)
    fail(message, code, process=rank or None)


def is_lost_connection(error: Exception) -> bool:
    """Whether a process has found that another is gone: gloo's errors have no type of their own."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))


def _is_first(rank: int) -> bool:
    """Whether no other process has said an error, by the launcher's store; where that is gone, each says its own."""
    import torch.distributed as dist

    run = f"relpos/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
        if rank:
            with contextlib.suppress(RuntimeError):  # the main one has none
                store.wait([f"{run}/main"], _PATIENCE)
        first: bool = store.add(f"{run}/errors", 1) == 1
        if not rank:
            store.set(f"{run}/main", "")
    except (KeyError, ValueError, RuntimeError):
        return True
    return first
