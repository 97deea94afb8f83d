"""A worker's answer as bytes: a checksum, a JSON head, then files. Reading one unpickles nothing.

b"relpos answer 1\n"
32 bytes    the SHA-256 of the head
8 bytes     the length of the head, little-endian
head        {"key": ..., "worker": ..., "kind": ..., "record": ..., "machine": ...,
             "files": [{"name", "size", "sha256"}, ...]}
files       their bytes, in this order
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from relpos.files.reading import MIB, FileError, parse_json
from relpos.files.writing import as_json
from relpos_command.visible import visible

BYTES_AT_MOST = 64 * 1024 * MIB
"""The largest answer; it is mostly a model's weights."""
_HEAD_AT_MOST = 1024 * MIB
_MAGIC = b"relpos answer 1\n"
_DIGEST, _LENGTH = 32, 8
_FILES_AT_MOST = 100
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)

Outcome = Literal["finished", "failed", "lost", "refused"]


@dataclass(frozen=True)
class WorkerAnswer:
    """What a worker answers.

    Attributes:
        key: that of the work. worker: the name of the worker, or of its machine.
        kind: "finished"; "failed", it raised an error; "lost", its process ended without a word; "refused", this worker
            has other versions.
        record: the result, of JSON values. error: why there is none.
        files: the files of its folder by name. machine: the name of the machine, "host", and its processor or card.
    """

    key: str
    worker: str
    kind: Outcome = "finished"
    record: Any = None
    error: str = ""
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    machine: dict[str, str] = field(default_factory=dict)


def sealed(answer: WorkerAnswer) -> bytes:
    """The bytes of an answer.

    Raises:
        ArithmeticError: the record has a nan or an inf.
    """
    files = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in answer.files.items()
    ]
    tree = {"key": answer.key, "worker": answer.worker, "kind": answer.kind, "record": answer.record}
    more = {"error": answer.error, "machine": answer.machine, "files": files}
    head = as_json(Path("its record"), {**tree, **more}).encode()
    length = len(head).to_bytes(_LENGTH, "little")
    return b"".join([_MAGIC, hashlib.sha256(head).digest(), length, head, *answer.files.values()])


def opened(data: object, key: str, *, at_most: int = BYTES_AT_MOST) -> WorkerAnswer:
    """The answer in bytes from a worker, which may be anything.

    Raises:
        FileError: they are no answer to the work with this key, damaged, or more than `at_most`.
    """
    if not isinstance(data, bytes):
        raise FileError(f"it is of type {type(data).__name__}, not bytes")
    if len(data) > at_most:
        raise FileError(f"it has {len(data):,} bytes, more than {at_most:,}")
    start = len(_MAGIC) + _DIGEST + _LENGTH
    if not data.startswith(_MAGIC) or len(data) < start:
        raise FileError("it does not begin as a worker's answer does")
    digest, length = data[len(_MAGIC) : start - _LENGTH], int.from_bytes(data[start - _LENGTH : start], "little")
    if length > min(_HEAD_AT_MOST, len(data) - start):
        raise FileError(f"its head claims {length:,} bytes")
    head = data[start : start + length]
    if hashlib.sha256(head).digest() != digest:
        raise FileError("its head does not have the checksum before it")
    tree = parse_json(head)
    if not isinstance(tree, dict) or tree.get("key") != key:
        raise FileError("it answers other work")
    worker, kind, error, listed = (tree.get(name) for name in ("worker", "kind", "error", "files"))
    if not (
        isinstance(worker, str) and isinstance(error, str) and kind in get_args(Outcome) and isinstance(listed, list)
    ):
        raise FileError("its head lacks the worker, the kind, the error or the files")
    machine = tree.get("machine")
    if not isinstance(machine, dict) or any(not isinstance(one, str) or len(one) > 300 for one in machine.values()):
        raise FileError("its head names no machine")
    return WorkerAnswer(
        key,
        visible(worker),
        cast("Outcome", kind),
        tree.get("record"),
        visible(error, keep="\n\t"),
        _files(memoryview(data)[start + length :], listed),
        machine,
    )


def _files(data: memoryview, listed: list[Any]) -> dict[str, bytes]:
    """The files in the rest of an answer, each checked."""
    if len(listed) > _FILES_AT_MOST:
        raise FileError(f"it has {len(listed):,} files, more than {_FILES_AT_MOST}")
    files: dict[str, bytes] = {}
    for entry in listed:
        name, size, digest = (entry.get(x) if isinstance(entry, dict) else None for x in ("name", "size", "sha256"))
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in files:
            raise FileError(f"it has a file named {name!r:.60}")
        if type(size) is not int or not 0 <= size <= len(data):
            raise FileError(f"it is too short for its file {name}")
        files[name], data = bytes(data[:size]), data[size:]
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise FileError(f"its file {name} does not have the checksum in its head")
    if len(data):
        raise FileError(f"{len(data):,} bytes follow its files")
    return files
