"""Damage to files, as disks and people do it: for the tests of everything that reads what relpos wrote."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OTHERS: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, "text", [], [[1]], {}, {"a": 1})


def cut_or_flipped(data: bytes, count: int) -> Iterator[bytes]:
    """A file cut anywhere, and one with a byte or three changed."""
    draw = random.Random(0)
    for _ in range(count):
        yield data[: draw.randrange(len(data))]
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 3))):
            damaged[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        if damaged != data:
            yield bytes(damaged)


def changed(tree: Any) -> Iterator[Any]:
    """The tree with one value of another type, one key less, or one key more: at every place in turn."""
    inside = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in inside:
        for other in (*OTHERS, *changed(value)):
            copied = copy.copy(tree)
            copied[key] = other
            if json.dumps(copied) != json.dumps(tree):
                yield copied
        copied = copy.copy(tree)
        del copied[key]
        yield copied
    if isinstance(tree, dict):
        yield {**tree, "more": 1}


def odd_files(path: Path) -> Iterator[str]:
    """In place of a file something else, one after another."""
    path.unlink()
    path.mkdir()
    yield "it is a folder"
    path.rmdir()
    os.mkfifo(path)
    yield "it is a named pipe"
    path.unlink()
    path.symlink_to("/dev/zero")
    yield "it is a device"
    path.unlink()
    with path.open("wb") as file:
        file.truncate(50_000_000_000)
    yield r"it has 50,000,000,000 bytes, more than [\d,]+"
    path.write_bytes(b"")
    yield r".*"
