"""Runs programs for the tests in processes that have their libraries already: each is a fork of one that loaded them.

A new Python spends most of a short program on loading PyTorch and what else it needs, and the first compiled function
of a process on the compiler. Here that is done once for all programs that a worker's tests start. Relpos is in them as
users have it, without the shape checks. What is about starting a process itself starts one itself.

Several processes are told what torchrun tells them, the store that the launcher serves included; it hands signals on,
and ends the others where one fails.

A line of JSON comes in for each: the program as after `python`, in how many processes, what it needs, its environment
and folder, and the files that it writes to. The launcher's number goes out, or why nothing was started; and when it has
ended its exit status and the processor seconds that it took. Another line ends a program that runs beside others.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from patience import PATIENCE

HERE = Path(__file__).resolve()
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # it would start processes when it is loaded
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # after the other check no fork can use a GPU
}


class Loaded:
    """The other side: runs programs in so many processes.

    What they need is loaded before they are forked: "train", "compiler", "models" (the libraries that have them),
    "kernels" (Triton's interpreter), "cluster" (Dask and submitit).
    """

    seconds: ClassVar[float] = 0.0
    """Of the processor, of all programs so far: they are waited for elsewhere."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.running = 0
        self.folder = tempfile.TemporaryDirectory(prefix="relpos-loaded-")

    def begin(self, program: Sequence[Any], log: Path, processes: int = 1, needs: Iterable[str] = ()) -> int:
        """The number of the launcher, which is the one process where there is one; all write to `log`. `end` waits."""
        return self._begin(program, log, log, processes, needs)

    def end(self) -> int:
        """The exit status of what has begun."""
        self.running = 0
        status, seconds = self._told().split()
        Loaded.seconds += float(seconds)
        return int(status)

    def run(
        self, *program: Any, processes: int = 1, needs: Iterable[str] = (), separate: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *program], capture_output=True, text=True)`, with `tests` in its path.

        All output is in `stdout` where it is not to be kept separate.
        """
        out, errors = (Path(self.folder.name, name) for name in ("stdout", "stderr" if separate else "stdout"))
        for file in (out, errors):
            file.unlink(missing_ok=True)
        self._begin(program, out, errors, processes, needs)
        status = self.end()
        said = [file.read_text() for file in (out, errors)] if separate else [out.read_text(), ""]
        return subprocess.CompletedProcess(program, status, *said)

    def beside(self, program: Sequence[Any], log: Path, needs: Iterable[str] = ()) -> int:
        """Begin a program that runs beside those to come, until `end_beside`; its number."""
        number = self._begin(program, log, log, 1, needs, beside=True)
        self.running = 0
        return number

    def end_beside(self, number: int) -> None:
        """Ask what runs beside to end, and wait for it."""
        self._stop()
        self._ask({"end": number})
        self.end()

    def close(self) -> None:
        """End it."""
        if self.server is not None:
            self._stop()
            with self.server:  # closes its pipes, and waits
                pass
            Loaded.seconds = 0.0  # it has been waited for, and counts by itself
        self.folder.cleanup()

    def _stop(self) -> None:
        """What a test has begun and not ended, as one that failed."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.running, signal.SIGKILL)
            with contextlib.suppress(AssertionError):  # the server may have ended, too: there will be another
                self.end()

    def _begin(
        self,
        program: Sequence[Any],
        out: Path,
        errors: Path,
        processes: int,
        needs: Iterable[str],
        beside: bool = False,
    ) -> int:
        self._stop()
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [sys.executable, str(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | _ENVIRONMENT,
            )  # fmt: skip
        asked = {
            "program": list(map(str, program)), "processes": processes, "needs": list(needs), "beside": beside,
            "stdout": str(out), "stderr": str(errors), "environment": os.environ | _ENVIRONMENT, "folder": os.getcwd(),
        }  # fmt: skip
        self._ask(asked)
        answer = self._told()
        assert answer.isdecimal(), json.loads(answer)
        self.running = int(answer)
        return self.running

    def _ask(self, asked: dict[str, Any]) -> None:
        assert self.server is not None
        assert self.server.stdin is not None
        print(json.dumps(asked), file=self.server.stdin, flush=True)

    def _told(self) -> str:
        assert self.server is not None
        assert self.server.stdout is not None
        if not select.select([self.server.stdout], [], [], PATIENCE)[0]:
            self.server.kill()
        line = self.server.stdout.readline()
        assert line, "what starts processes has ended"
        return line.strip()


# The one that forks. It loads what starts no thread: a fork would lack it.


_OF_TRAINING = (
    "accelerate", "jsonargparse", "matplotlib.backends.backend_agg", "sklearn.datasets", "sklearn.model_selection",
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "relpos.cli.train_verb",
    "relpos.comparison.entry", "relpos.train", "relpos.report.drawing.mechanism_data",
)  # fmt: skip


def _load_train() -> None:
    for name in _OF_TRAINING:
        importlib.import_module(name)


def _load_compiler() -> None:
    """It loads much of itself when it first compiles."""
    import warnings

    import torch

    if torch.cuda.is_available():  # it would start CUDA, which no fork can use then
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler itself
        # Without a gradient: no process can be forked in which autograd has threads, and in torch 2.10 it has at once.
        torch.compile(lambda x: (x * 2).sin(), backend="aot_eager", fullgraph=True)(torch.ones(2))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def _load_models() -> None:
    from relpos.adapters.common.libraries import imported

    for name in ("timm", "transformers", "transformers.modeling_utils"):  # of the second, every model loads the third
        imported(name)


def _load_kernels() -> None:
    import interpreter

    interpreter.prepare()


def _load_cluster() -> None:
    for name in (
        "dask.__main__",
        "distributed.cli.dask_scheduler",
        "distributed.cli.dask_worker",
        "submitit.core._submit",
    ):
        importlib.import_module(name)
    _load_train()


_LOADS = {
    "train": _load_train, "compiler": _load_compiler, "models": _load_models, "kernels": _load_kernels,
    "cluster": _load_cluster,
}  # fmt: skip


def _forked(work: Any) -> int:
    """A process that does some work and ends as Python does."""
    own = os.fork()
    if own:
        return own
    code, interrupted = 1, False
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        interrupted = isinstance(error, KeyboardInterrupt)
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for other threads
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _program(given: list[str]) -> None:
    if given[0] == "-m":
        sys.argv = given[1:]
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    elif given[0] == "-c":
        sys.argv = ["-c", *given[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(given[1], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv = given
        sys.path[:0] = [str(Path(given[0]).parent)]
        runpy.run_path(given[0], run_name="__main__")


def _world(asked: dict[str, Any]) -> None:
    """A program in one process, or the launcher of several, itself a fork: it serves the store, and waits for them."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    given, processes = asked["program"], asked["processes"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(asked[name], os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
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
        if sys.platform == "linux":
            end_with_the_parent = 1
            ctypes.CDLL(None).prctl(end_with_the_parent, signal.SIGKILL)
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
    """Until its input ends: an interruption is for the programs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # of what is loaded
    loaded: set[str] = set()
    spent = 0.0
    for line in sys.stdin:
        asked = json.loads(line)
        if "end" in asked:
            os.kill(asked["end"], signal.SIGTERM)
            spent = _wait(asked["end"], answers, spent)
            continue
        try:
            for name in set(asked["needs"]) - loaded:
                _LOADS[name]()
                loaded.add(name)
            gc.freeze()  # of a fork, every collection would walk all that was loaded, and copy its pages
        except Exception:
            print(json.dumps(traceback.format_exc()), file=answers)
            continue
        world = _forked(lambda asked=asked: _world(asked))
        print(world, file=answers)
        if not asked["beside"]:
            spent = _wait(world, answers, spent)
    gc.unfreeze()  # libraries say at the end what is left of theirs


def _wait(process: int, answers: IO[str], before: float) -> float:
    """Tell the status of a process that ends, and the seconds since `before`; the seconds so far."""
    status = os.waitpid(process, 0)[1]
    spent = sum(os.times()[:4])
    print(os.waitstatus_to_exitcode(status), spent - before, file=answers)
    return spent


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 1000)  # as in conftest.py: of compiling, Python's own takes a sixth
    importlib.import_module("relpos")
    _serve()
    os._exit(0)  # Python would take a second or two to free what it has loaded
