"""Starts the processes of one run after another for the tests, each a fork of this one, which has the libraries loaded.

torchrun would load PyTorch and the rest anew in itself and in every process: most of the time of a short run. What a
process is told is what torchrun tells it, the store that the launcher serves included; it hands signals on, and ends
the others where one fails. Lines of JSON come in, `{"processes": 2, "program": [...], "said": FILE}`, with a program as
after `python`; the launcher's number goes out, and when it has ended its exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()


class Worlds:
    """The other side: runs programs by so many processes."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, str(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def begin(self, processes: int, program: list[str], said: Path) -> int:
        """The number of the launcher, which is the one process where there is one. `end` waits for it."""
        assert self.server.stdin is not None
        print(json.dumps({"processes": processes, "program": program, "said": str(said)}), file=self.server.stdin)
        self.server.stdin.flush()
        return self._told()

    def end(self) -> int:
        """The exit status of what has begun."""
        return self._told()

    def run(self, processes: int, program: list[str], said: Path) -> tuple[int, str]:
        """The exit status, and what all processes said."""
        self.begin(processes, program, said)
        return self.end(), said.read_text()

    def _told(self) -> int:
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line, "what starts processes has ended"
        return int(line)

    def close(self) -> None:
        """End it."""
        with self.server:  # closes its pipes, and waits
            pass


def _load() -> None:
    """What a run loads, so far as it starts no thread: a fork would lack it."""
    import accelerate
    import sklearn.datasets
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import relpos.cli.train_verb
    import relpos.comparing.call
    import relpos.train

    loaded = (accelerate, sklearn.datasets, torch._dynamo, torch.distributed.fsdp, relpos.train, relpos.comparing.call)
    assert all(loaded)


def _forked(work: object) -> int:
    """A process that does some work and ends."""
    own = os.fork()
    if own:
        return own
    code = 1
    try:
        work()  # type: ignore[operator]
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _program(given: list[str]) -> None:
    if given[0] == "-m":
        sys.argv = given[1:]
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        sys.path[0] = str(Path(given[0]).parent)
        runpy.run_path(given[0], run_name="__main__")


def _world(processes: int, given: list[str], said: str) -> None:
    """The launcher of a run, itself a fork: it serves the store, and waits for its processes."""
    out = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if processes == 1:
        _program(given)
        return
    begin, served = os.pipe()
    family: set[int] = set()

    def hand_on(number: int, _: object) -> None:
        for one in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)

    def work(rank: int) -> None:
        os.close(served)
        port = os.read(begin, 16).split(b" ")[0].decode()
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
        _program(given)

    family |= {_forked(lambda rank=rank: work(rank)) for rank in range(processes)}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # after the forks: it has a thread
    os.write(served, str(store.port).encode().ljust(16) * processes)
    failed = 0
    while family:
        ended, status = os.wait()
        family.discard(ended)
        if status:
            failed = failed or 1
            for one in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGTERM)
    raise SystemExit(failed)


def _serve() -> None:
    _load()
    for line in sys.stdin:
        asked = json.loads(line)
        world = _forked(lambda asked=asked: _world(asked["processes"], asked["program"], asked["said"]))
        print(world, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(world, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
