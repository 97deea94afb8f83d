"""A Dask cluster of this machine, each of its processes a fork of one that has the libraries."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import work

from patience import PATIENCE


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or not path.stat().st_size:  # Dask opens its file before it writes it
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)
    return path.read_text()


class Cluster:
    """A scheduler and its workers, each a process."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.file, self.folder, self.python, self.processes = (
            folder / "scheduler.json",
            folder,
            python,
            contextlib.ExitStack(),
        )
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0")
        self.address = str(json.loads(wait_for(self.file))["address"])

    def work(self, workers: int) -> None:
        for _ in range(workers):
            self._start("worker", "--no-nanny", "--nthreads", "1", "--local-directory", str(self.folder))

    def _start(self, *words: str) -> None:
        path = os.pathsep.join([str(Path(work.__file__).parent), *sys.path])
        environment = os.environ | {"PYTHONPATH": path, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}
        program = [self.python, "-m", "dask", *words, "--scheduler-file", str(self.file), "--no-dashboard"]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
        self.processes.callback(process.wait)
        self.processes.callback(process.kill)
