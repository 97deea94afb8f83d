"""Tensors in safetensors files, full or sharded: each process writes its parts, and any number of processes can read
them.

shard-00001-model-00001-of-00001.safetensors    of the first process: "model.blocks.0.norm.weight", ...
shard-00002-model-00001-of-00001.safetensors    of the second

torch.distributed.checkpoint writes them, with each part's offset in the full tensor in the file's header. A tensor that
every process holds in full is in one of the files. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from relpos.core.checks import fail
from relpos.files.tensors import OFFSETS
from relpos.files.writing import WriteError


def write_shards(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write this process's parts of tensors, by kind and name. All processes must call it.

    Raises:
        WriteError: a process cannot write; all processes raise it.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {f"{kind}.{name}": x for kind, every in tensors.items() for name, x in every.items()}
    # Without save_distributed each process would write its parts as full tensors into the same file.
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(named, storage_writer=writer)
    except CheckpointException as error:  # not a subclass of Exception
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError):
            message = f"expected process {rank} to write into {folder}; got {cause.strerror or cause}."
            raise WriteError(message, cause.errno) from cause
        raise RuntimeError(f"process {rank} wrote no part of a checkpoint: {cause}") from cause


class StoredParts(Mapping[str, Tensor]):
    """Tensors by name; each is read and assembled from its parts on access."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Path, str, list[int] | None]]] = {}

    def add(self, name: str, path: Path, key: str, offset: list[int] | None) -> None:
        """Add a part: its file, its key there, and its offset in the tensor; None for a full tensor."""
        self._parts.setdefault(name, []).append((path, key, offset))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        read = [(offset, _read(path, key)) for path, key, offset in self._parts[name]]
        if len(read) == 1 and not any(read[0][0] or ()):
            return read[0][1]
        parts = [(offset or [0] * x.dim(), x) for offset, x in read if x.numel()]
        shape = [
            max(sizes) for sizes in zip(*(map(sum, zip(at, x.shape, strict=True)) for at, x in parts), strict=True)
        ]
        if sum(x.numel() for _, x in parts) != math.prod(shape):
            path = self._parts[name][0][0].parent
            fail("a checkpoint with all parts of its tensors", f"{path}, which lacks some of {name}", "Use another.")
        whole = parts[0][1].new_empty(shape)
        for at, x in parts:
            whole[tuple(slice(first, first + size) for first, size in zip(at, x.shape, strict=True))] = x
        return whole


def stored_in(files: Iterable[Path]) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of files by kind. The kind is the file's name for full tensors, and the key's first component for
    parts."""
    found: dict[str, StoredParts] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "null"))
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, name = key.partition(".") if offsets else (path.stem, "", key)
                found.setdefault(kind, StoredParts()).add(
                    name, path, key, offsets[key]["saved_offsets"] if offsets else None
                )
    return dict(found)


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        x: Tensor = file.get_tensor(key)
    return x
