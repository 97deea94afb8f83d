"""A worker's answer: what comes back, and that forged ones are refused without running anything of theirs."""

import hashlib
import json
import pickle
from typing import Any

import pytest

from relpos.comparison.answer import WorkerAnswer, opened, sealed
from relpos.files.reading import FileError

FILES = {"losses.jsonl": b"{}\n", "model.safetensors": b"\0\1"}
ANSWER = WorkerAnswer("k", "host", record={"x": 1.5}, error="none", files=FILES, machine={"host": "host"})


def with_head(**changes: Any) -> bytes:
    """The answer with another head, whose checksum is right."""
    data = sealed(ANSWER)
    length = int.from_bytes(data[48:56], "little")
    head = json.dumps({**json.loads(data[56 : 56 + length]), **changes}).encode()
    return b"".join(
        [data[:16], hashlib.sha256(head).digest(), len(head).to_bytes(8, "little"), head, data[56 + length :]]
    )


def listed(name: str, size: Any, data: bytes) -> dict[str, Any]:
    return {"name": name, "size": size, "sha256": hashlib.sha256(data).hexdigest()}


def test_an_answer_comes_back() -> None:
    assert opened(sealed(ANSWER), "k") == ANSWER
    assert opened(with_head(), "k") == ANSWER


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"a": "dict"}, "of type dict"),
        (pickle.dumps(ANSWER), "does not begin"),
        (sealed(ANSWER)[:40], "does not begin"),
        (sealed(ANSWER)[:48] + b"\xff" * 8, "claims 18,446,744,073,709,551,615 bytes"),
        (sealed(ANSWER).replace(b'"x":1.5', b'"x":9.5'), "checksum before it"),
        (with_head(record=float("nan")), "NaN is no number"),
        (with_head(key="other"), "other work"),
        (with_head(kind="good"), "lacks"),
        (with_head(machine={"host": 1}), "names no machine"),
        (with_head(files=[]), "5 bytes follow"),
        (with_head(files=[{}] * 101), "101 files"),
        (with_head(files=[listed("../a", 3, b"{}\n")]), "named '../a'"),
        (with_head(files=[listed(".bashrc", 3, b"{}\n")]), "named '.bashrc'"),
        (with_head(files=[listed("a", 3, b"{}\n"), listed("a", 2, b"\0\1")]), "named 'a'"),
        (with_head(files=[listed("a", 6, b"")]), "too short"),
        (with_head(files=[listed("a", -1, b"")]), "too short"),
        (with_head(files=[listed("a", True, b"")]), "too short"),
        (sealed(ANSWER)[:-1] + b"\2", "model.safetensors does not have the checksum"),
        (sealed(ANSWER) + b"more", "4 bytes follow"),
    ],
)
def test_a_forged_answer_is_refused(data: object, why: str) -> None:
    with pytest.raises(FileError, match=why):
        opened(data, "k")


def test_what_cannot_be_printed_is_escaped() -> None:
    """A page cannot hold half of a surrogate pair, as names of files in errors have it."""
    answer = opened(with_head(worker="n\x1b[2J", error="a\n\tno caf\udce9"), "k")
    assert (answer.worker, answer.error) == ("n\\x1b[2J", "a\n\tno caf\\udce9")


def test_an_answer_has_a_limit() -> None:
    with pytest.raises(FileError, match="more than 100"):
        opened(sealed(ANSWER), "k", at_most=100)
