"""What a comparison on a Dask cluster costs its coordinator: trials that do nothing, on three workers of this machine.

    python benchmarks/empty_trials.py [--trials 2000]

An answer has 30 kB, as a short run's losses; the data have 2 MB. A trial of a comparison also starts a process on its
worker, which takes seconds of the worker's time, and none of the coordinator's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from relpos.comparison import executors
from relpos.comparison.answer import WorkerAnswer, sealed
from relpos.comparison.dask_workers import DaskExecutor
from relpos.comparison.elsewhere import parcel_for
from relpos.comparison.trial import head_of
from relpos.comparison.workers import WorkerTask
from relpos.train import OURS


def empty_trial(parcel: bytes, shared: bytes) -> bytes:
    """In place of `relpos.comparison.trial.trial`."""
    return sealed(WorkerAnswer(head_of(parcel)["key"], "worker", files={"losses.jsonl": b"x" * 30_000}))


def resident() -> float:
    """The memory of this process, in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder) / "scheduler.json"
        here = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        common = ["--scheduler-file", str(file), "--no-dashboard"]
        worker = ["worker", *common, "--no-nanny", "--nthreads", "1", "--local-directory", folder]
        for words in (["scheduler", "--host", "127.0.0.1", "--port", "0", *common], worker, worker, worker):
            while words is worker and not file.exists():
                time.sleep(0.1)
            process = subprocess.Popen([sys.executable, "-m", "dask", *words], env=here, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        executor = DaskExecutor(str(file))
        executor._client.wait_for_workers(3)
        tasks = [WorkerTask(f"trial {number}", print, ()) for number in range(trials)]
        before = most = resident()
        begun, processor, finished = time.perf_counter(), time.process_time(), 0
        with mock.patch.object(executors, "trial", empty_trial_of_module()):
            for event in executors.run_on(
                executor, tasks, lambda task: parcel_for(task, "", OURS, cost=False), bytes(2_000_000), lambda *_: None
            ):
                finished += event.kind == "finished"
                most = max(most, resident())
        seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        executor.shutdown()
    assert finished == trials
    print(
        f"{trials} trials in {seconds:.0f} s; the coordinator: {1e3 * processor / trials:.1f} ms of a core a trial, "
        f"{most - before:.0f} MiB above {before:.0f}"
    )


def empty_trial_of_module() -> object:
    """`empty_trial` as workers import it, not of `__main__`."""
    import empty_trials

    return empty_trials.empty_trial


if __name__ == "__main__":
    main()
