"""Several processes train what one would: over gloo, DDP and FSDP2.

Where launchers matter, they are torchrun and accelerate; else `loaded` starts the processes.
"""

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
from warm import warm_python

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAIN = ("train", "--batch-size", "32")
Run = Callable[..., str]

pytestmark = pytest.mark.slow


UNSEEN = """
import sys
from relpos.cli import main, train_card
train_card._picture = lambda *given: None
main(sys.argv[1:])
"""


def _train(*given: Any) -> tuple[Any, ...]:
    """`relpos train`, as after `python`, without the picture on its card, which takes longer than the training."""
    return "-c", UNSEEN, *TRAIN, *given


@pytest.fixture(scope="module")
def run_processes(loaded: Loaded) -> Run:
    """Runs a program in so many processes; what they said."""

    def run(*program: Any, processes: int = 1, code: int = 0) -> str:
        done = loaded.run(*program, processes=processes, needs=["train"], separate=False)
        assert (done.returncode == code) or (processes > 1 and done.returncode and code), done.stdout[-3000:]
        return done.stdout

    return run


def _wait_for(it: Callable[[], bool], run: int, said: Path) -> None:
    """Until it has come, from a process that has not ended."""
    begun = time.monotonic()
    while not it():
        assert time.monotonic() - begun < PATIENCE, said.read_text()
        assert _lives(run), said.read_text()
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _children(process: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


# What they train


def test_two_processes_train_what_one_does(run_processes: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest difference of a weight, over the largest way that one went."""
    out, script = tmp_path / "found.json", ROOT / "benchmarks" / "processes.py"
    # FIRE has numbers without an axis, of which fully_shard takes none
    given = ["--positions", "fire", "--worlds", "2", "--steps", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [script.name, *given])

    def start(command: list[str], **_: Any) -> None:
        given = command[command.index(str(script)) + 1 :]
        run_processes(script, *given, processes=int(given[given.index("--world") + 1]))

    main = runpy.run_path(str(script))["main"]
    monkeypatch.setattr(subprocess, "run", start)
    main()
    monkeypatch.undo()
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 3
    for name, cells in runs.items():
        assert set(cells) == {"ddp 2", "fsdp 2", "context 2"}
        limit = 1e-5 if "sgd float32" in name else 0.2  # bfloat16 rounds, and AdamW divides by small numbers
        assert max(cells.values()) < limit, (name, cells)


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The root of the sum of squares of all differences."""
    return sum(float((x - other[name]).square().sum()) for name, x in one.items()) ** 0.5


GIVEN = ("--position", "relative_2d", "--steps", 4)
Trained = Callable[[int, str], Path]


@pytest.fixture(scope="module")
def trained(run_processes: Run, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder of a run by so many processes, with its checkpoint of step 2. The main process alone speaks."""

    @cache
    def run(processes: int, strategy: str) -> Path:
        out = tmp_path_factory.mktemp("trained") / "run"
        given = _train(*GIVEN, "--strategy", strategy, "--checkpoint-every", 2, "--out", out)
        assert run_processes(*given, processes=processes).count("Saved in") == 1
        assert json.loads((out / "config.json").read_text())["processes"] == processes
        return out

    return run


def test_two_processes_are_one_that_accumulates(trained: Trained, run_processes: Run, tmp_path: Path) -> None:
    """Bit for bit: they add up the same two parts."""
    run_processes(*_train(*GIVEN, "--accumulate", 2, "--out", tmp_path))
    own, two = (load_file(folder / "model.safetensors") for folder in (tmp_path, trained(2, "ddp")))
    assert all(torch.equal(x, two[name]) for name, x in own.items())


@pytest.mark.parametrize(
    ("before", "after", "strategy", "then"), [(1, 4, "ddp", "fsdp"), (2, 1, "fsdp", "ddp"), (2, 2, "fsdp", "fsdp")]
)
def test_a_run_goes_on_in_other_processes(
    before: int, after: int, strategy: str, then: str, trained: Trained, run_processes: Run, tmp_path: Path
) -> None:
    """Under fsdp each process writes its own parts; whoever goes on reads whole tensors, and cuts them anew."""
    run, alone = trained(before, strategy), load_file(trained(1, "ddp") / "model.safetensors")
    written = {path.name.partition("-")[0] for path in run.glob("checkpoints/step-00000002/*.safetensors")}
    whole_ones = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
    assert written == ({"shard", "random.safetensors"} if strategy == "fsdp" else whole_ones)
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    given = _train(*GIVEN, "--strategy", then, "--resume", "auto", "--out", tmp_path)
    assert "resumed from step-00000002" in run_processes(*given, processes=after)
    whole, own = (load_file(folder / "model.safetensors") for folder in (run, tmp_path))
    torch.manual_seed(0)
    task = find_task("digits")
    start = Recipe.of(task).build(task, "relative_2d").state_dict()
    assert _apart(whole, alone) < 1e-3 * _apart(start, alone)  # as docs/scale.md says
    assert _apart(own, alone) < 1e-3 * _apart(start, alone)
    if (before, strategy) == (after, then):
        assert all(torch.equal(x, whole[name]) for name, x in own.items())


def test_accelerate_launch(run_processes: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it tells its processes, a run over several takes."""
    script, out = tmp_path / "tell.py", tmp_path / "out"
    script.write_text("import json, os\nprint('told', json.dumps(dict(os.environ)), flush=True)")
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0)
    lines = run_processes(*launch, script).splitlines()
    told = [json.loads(line.removeprefix("told ")) for line in lines if line.startswith("told ")]
    assert sorted((one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told) == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    for name in told[0].keys() - os.environ.keys():
        monkeypatch.setenv(name, told[0][name])
    run_processes(*_train("--position", "none", "--steps", 2, "--out", out), processes=2)
    assert json.loads((out / "config.json").read_text())["processes"] == 2


# What is said, and who waits


def _errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if "error: " in line]


def test_an_error_that_all_have_is_said_once(run_processes: Run, tmp_path: Path) -> None:
    given = _train("--position", "none", "--steps", 2, "--accumulate", 3, "--out", tmp_path / "out")
    (said,) = _errors(run_processes(*given, processes=2, code=2))
    line = "relpos: error: expected a batch divisible by 2 processes x 3 accumulated parts; got 32. "
    assert said == line + "Choose a batch size of 30 or 36."


FAILS = """
import os, sys, time
from datetime import timedelta
from relpos.cli import errors
errors._PATIENCE = timedelta(seconds=3)  # nothing is loaded any more
if sys.argv[1] == os.environ["RANK"]:
    errors.end("it broke", 2)
time.sleep(60)
"""


@pytest.mark.parametrize(("rank", "line"), [(0, "it broke"), (1, "process 1: it broke")])
def test_an_error_that_one_process_has(rank: int, line: str, run_processes: Run) -> None:
    assert _errors(run_processes("-c", FAILS, rank, processes=2, code=2)) == [f"relpos: error: {line}"]


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
    given = (*TRAIN, "--position", "none", "--steps", 3, "--out", tmp_path / "out")
    said = run_processes("-c", WAITS, tmp_path / "written", *given, processes=2)
    assert said.count("the writer had written: True") == 1


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
    out = tmp_path / "out"
    given = (*TRAIN, "--position", "fire", "--steps", 3, "--strategy", "fsdp", "--checkpoint-every", 2, "--out", out)
    said = run_processes("-c", FULL, *given, processes=2)
    why = f"expected process 1 to write into {out}/checkpoints/step-00000002.tmp; got No space left on device."
    assert said.count("no checkpoint of step") == 1
    assert f"no checkpoint of step 2: {why} Training continues." in said
    assert not list((out / "checkpoints").iterdir())


# How they end


def test_a_process_that_is_gone(tmp_path: Path, loaded: Loaded) -> None:
    """The main one says so in a line, which is no bug."""
    folder, log = tmp_path / "run", tmp_path / "log"
    given = _train("--position", "none", "--steps", 100_000, "--checkpoint-every", 5, "--out", folder)
    run = loaded.begin(given, log, 2, needs=["train"])
    store = SnapshotStore(folder / "checkpoints")
    _wait_for(lambda: bool(store.steps()), run, log)
    os.kill(max(_children(run)), signal.SIGKILL)
    assert loaded.end() != 0
    errors = _errors(log.read_text())
    assert len(errors) <= 1  # the other may be ended before it has noticed
    for line in errors:
        assert "another process ended or does not respond; checkpoints are kept" in line


BEREAVED = """
import ctypes, os, sys, time
from pathlib import Path
from relpos.cli import main
die_with_parent, launcher = 1, os.getppid()
ctypes.CDLL(None).prctl(die_with_parent, 0)  # as one that has not asked for it yet
Path(sys.argv[1], "waits-" + os.environ["RANK"]).touch()
while os.getppid() == launcher:
    time.sleep(0.01)
try:
    main(sys.argv[2:])
except SystemExit as ended:
    print("ended with", ended.code, flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere workers find it out later")
def test_workers_whose_launcher_died_before_they_knew_it(tmp_path: Path, loaded: Loaded) -> None:
    """They are killed by no signal then, and their new parent, here this process, need not be process 1."""
    loaded.run("-c", "")  # what starts them is a child of this process, and adopts nobody
    adopt_orphans, log = 36, tmp_path / "log"
    ctypes.CDLL(None).prctl(adopt_orphans, 1)
    try:
        given = (*TRAIN, "--position", "none", "--steps", 100_000, "--out", tmp_path / "run")
        run = loaded.begin(["-c", BEREAVED, tmp_path, *given], log, 2, needs=["train"])
        _wait_for(lambda: len(list(tmp_path.glob("waits-*"))) == 2, run, log)
        workers = _children(run)
        os.kill(run, signal.SIGKILL)
        assert loaded.end() == -signal.SIGKILL
        _wait_for(lambda: not any(map(_lives, workers)), os.getpid(), log)
    finally:
        ctypes.CDLL(None).prctl(adopt_orphans, 0)
    for one in workers:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one, os.WNOHANG)
    assert log.read_text().count("ended with 143") == 2
    assert not (tmp_path / "run").exists()


STUCK = """
import os, sys, time
from pathlib import Path
from relpos.train.checkpointing import Checkpointing
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # by which relpos knows who serves the store
with Checkpointing(Path(sys.argv[1])).listening():
    Path(sys.argv[1], "waits-" + os.environ["RANK"]).touch()
    while True:
        time.sleep(1)
"""


def test_a_second_interruption_ends_all_at_once(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that does not come to its checkpoint."""
    stuck, log = tmp_path / "stuck.py", tmp_path / "log"
    stuck.write_text(STUCK)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1000000")  # torchrun itself would wait for so long
    run = loaded.begin([*TORCHRUN, stuck, tmp_path], log, needs=["train"])
    _wait_for(lambda: len(list(tmp_path.glob("waits-*"))) == 2, run, log)
    os.kill(run, signal.SIGINT)
    time.sleep(2)
    assert _lives(run)
    os.kill(run, signal.SIGINT)
    assert loaded.end() != 0


def test_a_killed_run_goes_on(tmp_path: Path, loaded: Loaded) -> None:
    """`scripts/kill_runs` does it a hundred times, of processes that start anew."""
    soon = ("--seed", "89")  # after 0.1 s and 0.2 s of training
    with warm_python(loaded, tmp_path, needs=["train"]) as python:
        kill = [python, ROOT / "scripts" / "kill_runs", "--kills", "2", *soon, "--folder", tmp_path / "run"]
        done = subprocess.run(kill, capture_output=True, text=True, check=False)
    assert "nothing unreadable, nothing left behind" in done.stdout, done.stderr


TOLD = """
import sys
from relpos.cli import main
from relpos.train.checkpointing import Checkpointing
Checkpointing.due = lambda checkpointing, step: step == 1
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("processes", "number", "code"), [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 1)])
def test_a_run_that_is_told_to_end_writes_one_more(
    processes: int, number: signal.Signals, code: int, loaded: Loaded, tmp_path: Path
) -> None:
    """The only one after step 1. What starts several hands the signal on, and ends with a code of its own."""
    folder, log = tmp_path / "run", tmp_path / "log"
    store = SnapshotStore(folder / "checkpoints")
    program = ["-c", TOLD, *TRAIN, "--position", "none", "--steps", 100_000, "--out", folder]
    run = loaded.begin(program, log, processes, needs=["train"])
    _wait_for(lambda: bool(store.steps()), run, log)
    os.kill(run, number)
    assert loaded.end() == code, log.read_text()
    (newest, *rest) = store.steps()
    assert rest == [1]
    assert f"interrupted; a checkpoint of step {newest} is in" in " ".join(log.read_text().split())
    assert store.newest() == (store.path(newest), [])
