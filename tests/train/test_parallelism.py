"""Several processes train what one would: over gloo, DDP and FSDP2.

Where launchers or signals matter, they are torchrun's; else `loaded` starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loaded import Loaded
from patience import PATIENCE
from relpos.data import find_task
from relpos.train import Recipe
from relpos.train.snapshots import SnapshotStore

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.slow


def _command(*given: Any, processes: int = 1) -> list[str]:
    launcher = [*TORCHRUN, str(processes)] if processes > 1 else []
    return [sys.executable, *launcher, "-m", "relpos", "train", "--batch-size", "32", *map(str, given)]


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run_processes(loaded: Loaded) -> Run:
    """Runs a program, or `relpos train`, in so many processes; what they said."""

    def run(*given: Any, processes: int = 1, code: int = 0, script: Path | None = None) -> str:
        program = _command(*given)[1:] if script is None else [script, *given]
        done = loaded.run(*program, processes=processes, needs=["train"], separate=False)
        assert (done.returncode == code) or (processes > 1 and done.returncode and code), done.stdout[-3000:]
        return done.stdout

    return run


def test_two_processes_train_what_one_does(run_processes: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest difference of a weight, over the largest way that one went."""
    out = tmp_path / "found.json"
    positions = "relative_2d,fire"  # of numbers without an axis fully_shard takes none
    script = ROOT / "benchmarks" / "processes.py"
    given = ["--positions", positions, "--worlds", "2", "--steps", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [script.name, *given])

    def start(command: list[str], **_: Any) -> None:
        given = command[command.index(str(script)) + 1 :]
        run_processes(*given, processes=int(given[given.index("--world") + 1]), script=script)

    main = runpy.run_path(str(script))["main"]
    monkeypatch.setattr(subprocess, "run", start)
    main()
    monkeypatch.undo()
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 6
    for name, cells in runs.items():
        assert set(cells) == {"ddp 2", "fsdp 2"}
        limit = 1e-5 if "sgd float32" in name else 0.2  # bfloat16 rounds, and AdamW divides by small numbers
        assert max(cells.values()) < limit, (name, cells)


def _wait_for(it: Callable[[], bool], run: int, said: Path | None = None) -> None:
    """Until it has come, from a process that has not ended."""
    begun = time.monotonic()
    while not it():
        assert time.monotonic() - begun < PATIENCE, said and said.read_text()
        assert _lives(run), said and said.read_text()
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The root of the sum of squares of all differences."""
    return sum(float((x - other[name]).square().sum()) for name, x in one.items()) ** 0.5


GIVEN = ("--position", "relative_2d", "--steps", 6)
Trained = Callable[[int, str], Path]


@pytest.fixture(scope="module")
def trained(run_processes: Run, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder of a run by so many processes, with its checkpoint of step 3. The main process alone speaks."""

    @cache
    def run(processes: int, strategy: str) -> Path:
        out = tmp_path_factory.mktemp("trained") / "run"
        said = run_processes(*GIVEN, "--strategy", strategy, "--checkpoint-every", 3, "--out", out, processes=processes)
        assert said.count("Saved in") == 1
        assert json.loads((out / "config.json").read_text())["processes"] == processes
        return out

    return run


def test_two_processes_are_one_that_accumulates(trained: Trained, run_processes: Run, tmp_path: Path) -> None:
    """Bit for bit: they add up the same two parts."""
    run_processes(*GIVEN, "--accumulate", 2, "--out", tmp_path)
    own, two = (load_file(folder / "model.safetensors") for folder in (tmp_path, trained(2, "ddp")))
    assert all(torch.equal(x, two[name]) for name, x in own.items())


@pytest.mark.parametrize(
    ("before", "after", "strategy", "then"),
    [
        (2, 1, "ddp", "ddp"), (1, 2, "ddp", "ddp"), (2, 2, "ddp", "fsdp"),
        (2, 2, "fsdp", "fsdp"), (2, 2, "fsdp", "ddp"), (2, 1, "fsdp", "ddp"), (2, 4, "fsdp", "fsdp"),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_other_processes(
    before: int, after: int, strategy: str, then: str, trained: Trained, run_processes: Run, tmp_path: Path
) -> None:
    """Under fsdp each process writes its own parts."""
    run, alone = trained(before, strategy), load_file(trained(1, "ddp") / "model.safetensors")
    written = {path.name.partition("-")[0] for path in run.glob("checkpoints/step-00000003/*.safetensors")}
    whole_ones = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
    assert written == ({"shard", "random.safetensors"} if strategy == "fsdp" else whole_ones)
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    said = run_processes(*GIVEN, "--strategy", then, "--resume", "auto", "--out", tmp_path, processes=after)
    assert "resumed from step-00000003" in said
    whole, own = (load_file(folder / "model.safetensors") for folder in (run, tmp_path))
    torch.manual_seed(0)
    task = find_task("digits")
    start = Recipe.of(task).build(task, "relative_2d").state_dict()
    assert _apart(whole, alone) < 1e-3 * _apart(start, alone)  # as docs/scale.md says
    assert _apart(own, alone) < 1e-3 * _apart(start, alone)
    if (before, strategy) == (after, then):
        assert all(torch.equal(x, whole[name]) for name, x in own.items())


def test_a_batch_that_processes_cannot_share(run_processes: Run, tmp_path: Path) -> None:
    given = ("--position", "none", "--steps", 2, "--accumulate", 3, "--out", tmp_path / "out")
    said = run_processes(*given, processes=2, code=2)
    assert "expected a batch that 2 processes times 3 accumulated parts divide; got 32" in said
    assert "30 or 36" in said


@pytest.mark.parametrize("launcher", [["--multi_gpu"], ["--cpu"]])
def test_accelerate_launch(launcher: list[str], tmp_path: Path, loaded: Loaded) -> None:
    """On CPUs it starts several processes by --multi_gpu alone."""
    out = tmp_path / "out"
    launch = ["-m", "accelerate.commands.launch", *launcher, "--num_processes", "2", "--main_process_port", "0"]
    run = loaded.run(*launch, *_command("--position", "none", "--steps", 2, "--out", out)[1:], needs=["train"])
    if launcher == ["--multi_gpu"]:
        assert run.returncode == 0, run.stderr[-3000:]
        assert json.loads((out / "config.json").read_text())["processes"] == 2
    else:
        assert run.returncode
        assert "expected as many processes as accelerate launch was told to start; got one" in run.stderr
        assert not out.exists()


def test_a_process_that_is_gone(tmp_path: Path, loaded: Loaded) -> None:
    """Of those that --devices starts. The main one says so in a line, which is no bug."""
    folder, log = tmp_path / "run", tmp_path / "log"
    given = ("--position", "none", "--steps", 100_000, "--checkpoint-every", 5, "--out", folder, "--devices", 2)
    run = loaded.begin(["-c", MARKED, tmp_path.name, *_command(*given)[3:]], log, needs=["train"])
    store = SnapshotStore(folder / "checkpoints")
    _wait_for(lambda: bool(store.steps()), run, log)
    read, _ = store.newest()
    assert read is not None
    assert json.loads((read / "state.json").read_text())["about"]["processes"] == 2
    os.kill(max(_marked(tmp_path.name)), signal.SIGKILL)
    assert loaded.end() != 0
    errors = [line for line in log.read_text().splitlines() if line.startswith("relpos: error:")]
    assert len(errors) <= 1  # torchrun may end the other before it has noticed
    for line in errors:
        assert "another process has ended, or does not answer; what checkpoints hold is kept" in line


MARKED = """
import os, sys
os.environ["RELPOS_TEST"] = sys.argv.pop(1)
from relpos.cli import main
main(sys.argv[1:])
"""
"""`relpos`, whose processes have a mark."""


WAITS = """
import os, sys, time
from pathlib import Path
from relpos.cli import main
from relpos.train.snapshots import SnapshotStore
from relpos.train.checkpointing import Checkpointing

slow = SnapshotStore.write

def written(store, step, snapshot):
    slow(store, step, snapshot)
    time.sleep(2)
    Path(sys.argv[1]).touch()

SnapshotStore.write = written
Checkpointing.due = lambda checkpointing, step: step == 2
from relpos.train import loop
beside = loop.all_of
def after(own):
    every = beside(own)
    if os.environ["RANK"] == "1" and isinstance(own, bool):
        print("the writer had written:", Path(sys.argv[1]).exists(), flush=True)
    return every
loop.all_of = after
main(sys.argv[2:])
"""


def test_others_wait_for_the_one_that_writes(run_processes: Run, tmp_path: Path) -> None:
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    given = ["train", "--position", "none", "--batch-size", "32", "--steps", "3", "--out", tmp_path / "out"]
    said = run_processes(tmp_path / "written", *given, processes=2, script=path)
    assert said.count("the writer had written: True") == 1


def test_devices_start_processes(tmp_path: Path, run_processes: Run) -> None:
    out = tmp_path / "out"
    said = run_processes("--position", "none", "--steps", 2, "--devices", 2, "--out", out)
    assert said.count("Saved in") == 1
    assert json.loads((out / "config.json").read_text())["processes"] == 2


def test_a_second_interruption_ends_all_at_once(tmp_path: Path) -> None:
    """Of a run that does not come to its checkpoint."""
    stuck = tmp_path / "stuck.py"
    stuck.write_text(STUCK)
    command = [sys.executable, *TORCHRUN, "2", str(stuck), str(tmp_path)]
    patient = ENV | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1000000"}  # torchrun itself would wait for so long
    with subprocess.Popen(command, env=patient, stderr=subprocess.DEVNULL) as run:
        _wait_for(lambda: len(list(tmp_path.glob("waits-*"))) == 2, run.pid)
        run.send_signal(signal.SIGINT)
        time.sleep(2)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=PATIENCE) != 0


STUCK = """
import os, sys, time
from pathlib import Path
from relpos.train.checkpointing import Checkpointing
with Checkpointing(Path(sys.argv[1])).listening():
    Path(sys.argv[1], "waits-" + os.environ["RANK"]).touch()
    while True:
        time.sleep(1)
"""


FULL = """
import errno, os, sys
from relpos.cli import main
if os.environ["RANK"] == "1":
    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync = full
main(sys.argv[1:])
"""


def test_a_disk_that_is_full_for_one_process(run_processes: Run, tmp_path: Path) -> None:
    """The run goes on without a checkpoint; one that another process writes a part of is not half there."""
    path, out = tmp_path / "full.py", tmp_path / "out"
    path.write_text(FULL)
    given = ["train", "--position", "fire", "--batch-size", "32", "--steps", "4", "--strategy", "fsdp", "--out", out]
    said = run_processes(*given, "--checkpoint-every", "2", processes=2, script=path)
    why = f"expected process 1 to write into {out}/checkpoints/step-00000002.tmp; got No space left on device."
    assert said.count("no checkpoint of step") == 1
    assert f"no checkpoint of step 2: {why} Training goes on." in said
    assert not list((out / "checkpoints").iterdir())


FAILS = """
import os, sys, time
from datetime import timedelta
from relpos.cli import ending
ending._PATIENCE = timedelta(seconds=3)  # nothing is loaded any more
if sys.argv[1] in ("all", os.environ["RANK"]):
    ending.end("it broke", 2)
time.sleep(60)
"""


@pytest.mark.parametrize(("who", "line"), [("all", "it broke"), ("0", "it broke"), ("1", "process 1: it broke")])
def test_an_error_is_said_once(who: str, line: str, run_processes: Run, tmp_path: Path) -> None:
    """By the main process, or with its number by the one that has it alone."""
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    text = run_processes(who, processes=2, code=2, script=path)
    assert [said for said in text.splitlines() if "error: " in said] == [f"relpos: error: {line}"]


def _marked(mark: str) -> list[int]:
    """The processes with a mark in their environment that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and f"RELPOS_TEST={mark}".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere workers find it out later")
@pytest.mark.parametrize("adopted", [False, True])
def test_workers_whose_launcher_died_before_they_knew_it(adopted: bool, tmp_path: Path) -> None:
    """They are killed by no signal then, and their new parent need not be process 1."""
    adopt_orphans = 36
    mark = tmp_path.name
    ctypes.CDLL(None).prctl(adopt_orphans, int(adopted))
    try:
        given = ("--position", "none", "--steps", 100_000, "--out", tmp_path / "run")
        with subprocess.Popen(
            _command(*given, processes=2), env=ENV | {"RELPOS_TEST": mark}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as run:  # fmt: skip
            _wait_for(lambda: len(_marked(mark)) == 3, run.pid)  # the launcher and its workers
            family = _marked(mark)
            run.kill()
        _wait_for(lambda: not _marked(mark), os.getpid())
    finally:
        ctypes.CDLL(None).prctl(adopt_orphans, 0)
    for one in family if adopted else []:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one, os.WNOHANG)
    assert not (tmp_path / "run").exists()


def test_sharing_a_hessian(run_processes: Run, tmp_path: Path) -> None:
    given = ("--position", "none", "--steps", 2, "--optimizer", "sophia-h", "--out", tmp_path / "out")
    assert "an optimizer whose estimates several processes share; got sophia-h" in run_processes(
        *given, processes=2, code=2
    )


@pytest.mark.parametrize(("processes", "kills"), [(1, 2), (2, 1)])
def test_a_killed_run_goes_on(processes: int, kills: int, run_processes: Run, tmp_path: Path) -> None:
    """`scripts/kill_runs` does it a hundred times."""
    given = ("--kills", kills, "--processes", processes, "--folder", tmp_path / "run")
    assert "nothing unreadable, nothing left behind" in run_processes(*given, script=ROOT / "scripts" / "kill_runs")


TOLD = """
import os, sys
from relpos.cli import main
from relpos.train.checkpointing import Checkpointing
Checkpointing.due = lambda checkpointing, step: step == 1
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [(1, signal.SIGTERM, 143), (1, signal.SIGINT, 130), (2, signal.SIGTERM, 1), (2, signal.SIGINT, 1)],
)
def test_a_run_that_is_told_to_end_writes_one_more(
    processes: int, number: signal.Signals, code: int, loaded: Loaded, tmp_path: Path
) -> None:
    """The only one after step 1. What starts several hands the signal on, and ends with a code of its own."""
    program, folder, log = tmp_path / "told.py", tmp_path / "run", tmp_path / "log"
    program.write_text(TOLD)
    given = ["train", "--position", "none", "--batch-size", "32", "--steps", "100000", "--out", str(folder)]
    store = SnapshotStore(folder / "checkpoints")
    run = loaded.begin([program, *given], log, processes, needs=["train"])
    _wait_for(lambda: bool(store.steps()), run, log)
    os.kill(run, number)
    assert loaded.end() == code, log.read_text()
    (newest, *rest) = store.steps()
    assert rest == [1]
    assert f"interrupted; a checkpoint of step {newest} is in" in " ".join(log.read_text().split())
    assert store.newest() == (store.path(newest), [])
