"""A Python for other programs to start, whose processes have their libraries: each is a fork of one that loaded them.

`warm_python(loaded, folder)` makes an executable file that is called as Python is (`-m`, `-c`, a file), by a cluster's
workers, say, whose `sys.executable` it is. It hands its arguments, environment, folder and standard files to a server,
which forks, and ends as the fork does; where it is killed, so is the fork.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loaded import Loaded, _forked, _program
from patience import PATIENCE

_CLIENT = """#!{python} -IS
import _socket, array, json, os, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({path!r})
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]).encode()
standard = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([len(asked).to_bytes(8, "little")], standard)
while asked:
    asked = asked[server.send(asked):]
status = int(server.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def warm_python(loaded: Loaded, folder: Path, needs: Iterable[str] = ("cluster",)) -> Iterator[Path]:
    """The executable file, in this folder; while this block runs, it works. `needs`: as those of `loaded`."""
    path, program = folder / "socket", folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    number = loaded.beside([__file__, path, program], folder / "log", needs=needs)
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.01)
    yield program
    loaded.end_beside(number)


class _Server:
    """Forks for each client. It has one thread: a fork would lack the others."""

    def __init__(self, path: Path, program: str) -> None:
        self.program = program
        self.clients: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(str(path))
        self.door.listen(100)
        self.ended, wake = os.pipe()
        for end in (self.ended, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        self.selector.register(self.door, selectors.EVENT_READ, self._take)
        self.selector.register(self.ended, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def _take(self) -> None:
        client, _ = self.door.accept()
        try:
            length, files, _, _ = socket.recv_fds(client, 8, 3)
            with client.makefile("rb") as stream:
                asked = json.loads(stream.read(int.from_bytes(length, "little")))
        except (ConnectionError, ValueError):  # it was killed before it had asked
            client.close()
            return
        number = _forked(lambda: self._run(files, *asked))
        for file in files:
            os.close(file)
        self.clients[number] = client
        self.selector.register(client, selectors.EVENT_READ, lambda: self._kill(number))

    def _run(self, files: list[int], given: list[str], environment: dict[str, str], folder: str, client: int) -> None:
        signal.set_wakeup_fd(-1)
        for which in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(which, signal.SIG_DFL)
        for one in (self.door, *self.clients.values()):
            one.close()
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = dict.fromkeys([*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
        sys.executable = self.program
        while given[0] in ("-P", "-u"):
            given = given[1:]
        if "submitit.local._local" in given:
            os.getpid = lambda: client  # a job's number, for submitit: that of what it started
        _program(given)

    def _kill(self, number: int) -> None:
        """The client has gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        if client := self._forget(number):
            client.close()

    def _forget(self, number: int) -> socket.socket | None:
        client = self.clients.pop(number, None)
        if client is not None:
            self.selector.unregister(client)
        return client

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.ended, 100)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self._forget(ended[0])
                if client is not None:
                    with contextlib.suppress(OSError):
                        client.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
                    client.close()

    def _stop(self, *_: Any) -> None:
        for number in self.clients:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0)


if __name__ == "__main__":
    _Server(Path(sys.argv[1]), sys.argv[2]).serve()
