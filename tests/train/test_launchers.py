"""What launchers leave in the environment, and what is made of it before a run begins."""

import importlib
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relpos import LanguageModel
from relpos.cli import errors, main
from relpos.train import ImageRecipe, processes
from relpos.train.processes import Parallelism
from relpos_command.parsing import fail


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_what_several_processes_cannot_share() -> None:
    for changes, strategy, precision, got in (
        ({"optimizer": "sophia-h"}, "ddp", "float32", "whose estimates several processes share; got sophia-h"),
        ({"optimizer": "sophia-g"}, "fsdp", "float32", "got sophia-g. Use adamw or lion, or strategy ddp"),
        ({}, "fsdp", "fp16-mixed", "expected float32 or bf16-mixed with strategy fsdp; got fp16-mixed"),
    ):
        recipe, parallelism = replace(ImageRecipe(), **changes), Parallelism(strategy)
        parallelism.require_shares(recipe.optimizer, precision, world=1)
        with pytest.raises(ValueError, match=re.escape(got)):
            parallelism.require_shares(recipe.optimizer, precision, world=2)
    for batch, accumulate, world, near in ((400, 3, 1, "399 or 402"), (32, 3, 2, "30 or 36"), (3, 2, 2, "4")):
        with pytest.raises(ValueError, match=rf"{world} processes x {accumulate} .*; got {batch}\. .* of {near}\."):
            Parallelism(accumulate=accumulate).require_divides(batch, world)


@pytest.mark.parametrize(("context", "layout"), [(16, "zigzag"), (10, "contiguous")])
def test_processes_that_share_a_language_models_sequences_have_equal_work(context: int, layout: str) -> None:
    model = LanguageModel(5, context=context, embed_dim=4, depth=1, num_heads=1)
    assert Parallelism(context=2).layout(torch.nn.Sequential(model)) == layout  # wrapped, as by DDP
    assert Parallelism(context=2).layout(torch.nn.Linear(1, 1)) == "contiguous"


def test_accelerate_that_started_one_process_of_several(environment: pytest.MonkeyPatch) -> None:
    """It names their meeting point, and no number of them."""
    processes.require_all_started()
    environment.setenv("ACCELERATE_MIXED_PRECISION", "no")
    processes.require_all_started()
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="as many processes as accelerate launch was told to start; got one"):
        processes.require_all_started()
    environment.setenv("WORLD_SIZE", "2")
    processes.require_all_started()
    environment.delenv("WORLD_SIZE")  # a script of SLURM exports the meeting point for one process, too
    environment.setattr(Path, "read_bytes", lambda path: b"HOME=/root\0MASTER_ADDR=node1\0")
    processes.require_all_started()


def test_accelerate_starts_one_process_on_cpus(environment: pytest.MonkeyPatch) -> None:
    """What it leaves to it is known: with --multi_gpu it starts several."""
    launch = importlib.import_module("accelerate.commands.launch")
    started: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        started.append(env)
        return SimpleNamespace(wait=lambda: None, returncode=0)

    environment.setattr(launch.subprocess, "Popen", start)
    given = ["--cpu", "--num_processes", "2", "--main_process_port", "0", "train.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(given))
    (env,) = started
    for name in env.keys() - os.environ.keys():
        environment.setenv(name, env[name])
    with pytest.raises(ValueError, match="as many processes as accelerate launch was told to start; got one"):
        processes.require_all_started()


def test_devices_are_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["train", "--position", "none", "--devices", "2", "--out", str(tmp_path / "out")]
    started: list[list[str]] = []

    def become(path: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # which it would leave behind
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "argv", ["relpos", *words])
    with pytest.raises(SystemExit):
        main(words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert started == [[*torchrun, "-m", "relpos", *words]]


def test_a_launcher_that_is_gone(environment: pytest.MonkeyPatch) -> None:
    own_parent = os.getppid
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert processes._launcher_answers()
        environment.setattr(os, "getppid", lambda: 1)  # it is the first process of a container
        assert processes._launcher_answers()
    environment.setattr(os, "getppid", own_parent)
    assert not processes._launcher_answers()
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # the main process serves, and may be later
    assert processes._launcher_answers()
    environment.setattr(os, "getppid", lambda: 1)  # it was adopted, and nothing else tells
    assert not processes._launcher_answers()


@pytest.mark.parametrize(
    ("rank", "process", "line"), [("0", None, "broken"), ("1", None, ""), ("1", 1, "process 1: broken")]
)
def test_what_all_have_one_says(
    rank: str, process: int | None, line: str, environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("WORLD_SIZE", "2")
    environment.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        fail("broken", 2, process=process)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (f"relpos: error: {line}\n" if line else "")


def test_a_lost_connection_is_no_bug(environment: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    assert not errors.is_lost_connection(lost)  # one process has none
    environment.setenv("WORLD_SIZE", "2")
    assert errors.is_lost_connection(lost)
    assert not errors.is_lost_connection(RuntimeError("another"))
