"""Checkpoints on the disk: whole or not there, whatever fails, and damage is always found."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from relpos.files import manifest
from relpos.files.manifest import fault_of
from relpos.files.tensors import open_tensors
from relpos.models import pretrained
from relpos.models.loading import read_weights
from relpos.train.checkpointing import Checkpointing
from relpos.train.shards import stored_in
from relpos.train.snapshots import Snapshot, SnapshotStore, read_snapshot


def _snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model": {"weight": torch.randn(5, 3, generator=generator), "b": torch.randn(2, generator=generator).half()},
        "optimizer": {"weight.exp_avg": torch.randn(5, 3, generator=generator)},
        "random": {"0.torch": torch.get_rng_state()},
    }
    state = {"loop": {"step": step, "losses": [0.1, 1 / 3]}, "optimizer": {"weight": {"step": step}}}
    return Snapshot(tensors, state | {"scaler": {}, "random": []})


def _assert_read(path: Path, step: int) -> None:
    found, wanted = read_snapshot(path), _snapshot(step)
    assert {key: value for key, value in found.state.items() if key not in ("settings", "about")} == wanted.state
    for file, tensors in wanted.tensors.items():
        if file != "random":
            assert all(torch.equal(x, found.tensors[file][name]) for name, x in tensors.items())


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    made = SnapshotStore(tmp_path / "checkpoints", keep=2)
    for step in (3, 6):
        made.write(step, _snapshot(step))
    return made


def test_the_newest_is_found_and_old_ones_go(store: SnapshotStore) -> None:
    store.write(9, _snapshot(9))
    assert store.steps() == [9, 6]
    newest, passed = store.newest()
    assert newest == store.path(9)
    assert not passed
    _assert_read(store.path(9), 9)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-00000006", "step-00000009"]


def test_two_sound_ones_stay(store: SnapshotStore) -> None:
    """A damaged one does not count, and is not what older ones are removed for."""
    (store.path(6) / "state.json").write_text("{}")
    store.write(9, _snapshot(9))
    assert store.steps() == [9, 6, 3]
    store.write(12, _snapshot(12))
    assert store.steps() == [12, 9]


@pytest.mark.parametrize("seed", range(60))
def test_every_damage_is_found(seed: int, store: SnapshotStore) -> None:
    """A bit that is another, or a file that is shorter, longer, missing or more."""
    draw = random.Random(seed)
    path = draw.choice(sorted(store.path(6).iterdir()))
    data = bytearray(path.read_bytes())
    match draw.choice(("flip", "flip", "flip", "cut", "longer", "missing", "more")):
        case "flip":
            offset = draw.randrange(len(data))
            data[offset] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        case "cut":
            path.write_bytes(data[: draw.randrange(len(data))])
        case "longer":
            path.write_bytes(data + b" ")
        case "missing":
            path.unlink()
        case "more":
            (store.path(6) / "more.safetensors").write_bytes(data)
    try:
        same = fault_of(store.path(6)) is None and read_snapshot(store.path(6)).state == _snapshot(6).state
    except ValueError:
        same = False
    newest, passed = store.newest()
    if same:  # a bit of the manifest that says nothing: white space, or what the checkpoint is called there
        assert path.name == manifest.MANIFEST
        _assert_read(store.path(6), 6)
        return
    assert newest == store.path(3)
    assert [one for one, _ in passed] == [store.path(6)]
    with pytest.raises(ValueError, match="a checkpoint that is whole"):
        read_snapshot(store.path(6))
    _assert_read(store.path(3), 3)


class _OnFullDisk:
    """A file whose writes, flushes and ends reach a disk that may be full; of what is written half is there."""

    def __init__(self, file: Any, reach: Callable[[str], None]) -> None:
        self._file, self._reach = file, reach

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _OnFullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: Any) -> Any:
        try:
            self._reach("write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def flush(self) -> None:
        self._reach("flush")
        self._file.flush()

    def close(self) -> None:
        closed = self._file.closed
        self._file.close()
        if not closed:
            self._reach("close")


def _reaching(calls: list[str], number: int, fails: Callable[[int], bool]) -> pytest.MonkeyPatch:
    """Every call that reaches the disk adds its name, and fails where `fails` says so of their count."""

    def reach(name: str) -> None:
        calls.append(name)
        if fails(len(calls)):
            raise OSError(number, os.strerror(number))

    def reaching(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: (reach(name), right(*args, **more))[1]

    first_open = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if not set("xwa+") & set(mode):
            return first_open(file, mode, *args, **more)
        reach("open")
        return _OnFullDisk(first_open(file, mode, *args, **more), reach)

    patch = pytest.MonkeyPatch()
    for name in ("mkdir", "rename", "replace", "link", "symlink", "truncate", "ftruncate", "fsync", "write"):
        patch.setattr(os, name, reaching(name, getattr(os, name)))
    for name in ("copyfile", "copy", "copy2", "move"):
        patch.setattr(shutil, name, reaching(name, getattr(shutil, name)))
    patch.setattr(io, "open", opened)  # of pathlib
    patch.setattr(builtins, "open", opened)
    return patch


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize(
    ("number", "once", "in_parts"),
    [(errno.ENOSPC, False, False), (errno.EIO, True, False), (errno.ENOSPC, False, True)],
)
def test_a_full_disk_at_every_write(
    number: int, once: bool, in_parts: bool, store: SnapshotStore, tmp_path: Path
) -> None:
    """At the first, second, ... call, it alone or all after it: what was there stays, and one line says why there is
    no newer one."""
    snapshot = _in_parts(_snapshot(9)) if in_parts else _snapshot(9)
    for at in range(1, 100):
        said: list[str] = []
        calls: list[str] = []
        checkpointing = Checkpointing(tmp_path, 1, tell=said.append)
        patch = _reaching(calls, number, lambda count, at=at: count == at if once else count >= at)
        try:
            written = checkpointing.write(9, snapshot)
        finally:
            patch.undo()
        assert not list(store.folder.glob("*.tmp")), at
        if written and len(calls) < at:
            break
        newest, _ = store.newest()
        assert newest is not None
        _assert_read(newest, 9 if newest == store.path(9) else 6)
        if written:  # it was done another way, or what failed removes an older one
            assert newest == store.path(9)
            assert not said
        else:
            (line,) = said
            assert re.fullmatch(
                rf"no checkpoint of step 9: expected .*{os.strerror(number)}.* Training continues\.", line
            )
        _assert_read(store.path(6), 6)
        shutil.rmtree(store.path(9), ignore_errors=True)
    assert written, "it was never written"
    assert {"mkdir", "open", "write", "flush", "close", "fsync", "replace", "link", "rename"} <= set(calls)
    if in_parts:
        assert calls.count("open") == 4, "the parts, the random states, the state and the manifest"


def test_what_a_killed_writer_left_is_in_nobodys_way(store: SnapshotStore) -> None:
    for left in ("step-00000009.tmp", "step-00000001.tmp"):  # while it wrote one, and while it removed one
        (store.folder / left).mkdir()
        (store.folder / left / "model.safetensors").write_bytes(b"half")
    assert store.newest()[0] == store.path(6)
    store.write(9, _snapshot(9))
    assert store.newest()[0] == store.path(9)
    assert not list(store.folder.glob("*.tmp"))


def test_a_step_that_was_written_before(store: SnapshotStore) -> None:
    """A resumed run comes by again: a sound one stays, a damaged one is written anew."""
    store.write(6, _snapshot(7))
    _assert_read(store.path(6), 6)
    (store.path(6) / "state.json").write_text("{}")
    store.write(6, _snapshot(6))
    _assert_read(store.path(6), 6)


@pytest.mark.parametrize("read", [open_tensors, read_weights, pretrained._header])
def test_whoever_reads_weights_looks_at_their_manifest(read: Callable[[Path], Any], store: SnapshotStore) -> None:
    path = store.path(6) / "model.safetensors"
    data = path.read_bytes()
    read(path)
    for damaged, fault in ((data[:-1] + bytes([data[-1] ^ 1]), "has another SHA-256"), (data[:-1], "bytes, not ")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"the file that the manifest\.json beside it names.*{fault}"):
            read(path)
    path.write_bytes(data)
    (path.parent / "manifest.json").write_text('{"files": ["of another program"]}')
    read(path)


@pytest.mark.parametrize("lacks", ["loop", "model"])
def test_a_sealed_folder_that_is_no_checkpoint(lacks: str, tmp_path: Path) -> None:
    whole = _snapshot(3)
    tensors = {kind: x for kind, x in whole.tensors.items() if kind != lacks}
    store = SnapshotStore(tmp_path)
    store.write(3, Snapshot(tensors, {name: x for name, x in whole.state.items() if name != lacks}))
    with pytest.raises(ValueError, match=rf"expected a checkpoint that is whole; got .* lacks (a )?{lacks}"):
        read_snapshot(store.path(3))
    newest, ((passed, fault),) = store.newest()
    assert newest is None
    assert passed == store.path(3)
    assert lacks in fault


def test_nothing_is_unpickled(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(where, name, lambda *_, **__: pytest.fail("unpickled"))
    _assert_read(store.path(6), 6)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A group of one process, which writes its parts as one of many does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _in_parts(snapshot: Snapshot) -> Snapshot:
    mesh = init_device_mesh("cpu", (1,))
    parts = {
        kind: {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in snapshot.tensors[kind].items()}
        for kind in ("model", "optimizer")
    }
    parts["optimizer"]["step"] = torch.tensor(3.0)  # every process has it
    return Snapshot({"random": snapshot.tensors["random"]}, snapshot.state, parts)


@pytest.mark.usefixtures("alone_in_a_group")
def test_parts_are_written_and_read(store: SnapshotStore) -> None:
    wanted = _in_parts(_snapshot(9))
    assert all(isinstance(x, DTensor) for x in wanted.parts["model"].values())
    store.write(9, wanted)
    assert sorted(path.name for path in store.path(9).glob("*.safetensors")) == [
        "random.safetensors", "shard-00001-model-00001-of-00001.safetensors",
    ]  # fmt: skip
    _assert_read(store.path(9), 9)
    assert read_snapshot(store.path(9)).tensors["optimizer"]["step"] == 3


def _write_parts(folder: Path, x: torch.Tensor, cuts: list[int]) -> None:
    """The rows of a tensor from each cut to the next in a file of their own."""
    for number, (first, last) in enumerate(zip(cuts, [*cuts[1:], len(x)], strict=True)):
        offsets = json.dumps({"model.x": {"saved_offsets": [first, *[0] * (x.dim() - 1)]}})
        part = {"model.x": x[first:last].clone()}
        save_file(part, folder / f"shard-{number}.safetensors", metadata={"DCP_SHARDING_INFO": offsets})


@pytest.mark.parametrize("cuts", [[0], [0, 3], [0, 1, 2, 5], [0, 5, 5]])
def test_parts_make_the_whole(cuts: list[int], tmp_path: Path) -> None:
    """Also where one process has none."""
    x = torch.randn(5, 3)
    _write_parts(tmp_path, x, cuts)
    assert torch.equal(stored_in(sorted(tmp_path.iterdir()))["model"]["x"], x)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_not_there(lost: int, tmp_path: Path) -> None:
    _write_parts(tmp_path, torch.randn(5, 3), [0, 1, 3])
    files = sorted(tmp_path.iterdir())
    del files[lost]
    found = stored_in(files)["model"]
    with pytest.raises(ValueError, match=r"a checkpoint with all parts of its tensors; got .* lacks some of x"):
        found["x"]


def test_a_part_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    _write_parts(tmp_path, torch.randn(5, 3), [0, 2])
    with pytest.raises(ValueError, match="it holds one process's parts of tensors"):
        open_tensors(tmp_path / "shard-0.safetensors")
