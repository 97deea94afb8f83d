"""What launchers leave in the environment, and what is made of it before a run begins."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from relpos.cli import ending
from relpos.train import processes
from relpos_command.parsing import fail


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


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


def test_a_meeting_point_that_was_there_before(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script of SLURM exports it for one process, too."""
    environment.setenv("ACCELERATE_MIXED_PRECISION", "no")
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setattr(Path, "read_bytes", lambda path: b"HOME=/root\0MASTER_ADDR=node1\0")
    processes.require_all_started()


def test_a_launcher_that_is_gone(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert processes._launcher_answers()
    assert not processes._launcher_answers()
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # the main process serves, and may be later
    assert processes._launcher_answers()
    environment.setattr(os, "getppid", lambda: 1)  # it was adopted, and nothing else tells
    assert not processes._launcher_answers()


def test_a_launcher_that_is_the_first_process_of_a_container(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(os, "getppid", lambda: 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert processes._launcher_answers()


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
    assert not ending.is_lost_connection(lost)  # one process has none
    environment.setenv("WORLD_SIZE", "2")
    assert ending.is_lost_connection(lost)
    assert not ending.is_lost_connection(RuntimeError("another"))
