"""Files that others wrote: what is read, and what is said of everything else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relpos.files.reading import DEEPEST, FileError, fail_to_read, open_file, parse_json, read_file, read_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_json_comes_back(tree: Any) -> None:
    assert parse_json(json.dumps(tree).encode()) == tree


@given(PLAIN, st.integers(0, 10_000), st.binary(max_size=3), st.booleans())
def test_damaged_json_is_json_or_an_error_of_one_line(tree: Any, offset: int, bytes_: bytes, cut: bool) -> None:
    text = json.dumps(tree).encode()
    offset %= len(text) + 1
    damaged = text[:offset] + bytes_ + (b"" if cut else text[offset + len(bytes_) :])
    said = ""
    try:
        parse_json(damaged)
    except FileError as error:
        said = str(error)
    assert not said or said.startswith("it is not readable JSON (")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "Expecting value"),
        (b"{", "property name"),
        (b"{} {}", "Extra data"),
        (b"\xff\xfe{\0}\0", "can't decode byte 0xff"),
        (b"[1, NaN]", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"[1e999]", "1e999 is no number"),
        (b"1" * 5000, "4300 digits"),
        (b"[" * 1_000_000, f"more than {DEEPEST} deep"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), f"more than {DEEPEST} deep"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, f"more than {DEEPEST} deep"),
    ],
)
def test_what_is_no_json(text: bytes, says: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_json(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


def test_as_deep_as_may_be() -> None:
    parse_json(b"[" * DEEPEST + b"]" * DEEPEST)


def test_a_file_of_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"[12]")
    assert read_file(path, 4) == b"[12]"
    assert read_json(path, 4) == [12]
    with pytest.raises(FileError, match=r"^it has 4 bytes, more than 3$"):
        read_file(path, 3)
    with pytest.raises(FileError, match=r"^it has 4 bytes, more than 3; do this$"):
        open_file(path, 3, "do this")


def test_a_file_is_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_file(tmp_path / "empty", 10) == b""
    if Path("/proc/self/status").exists():  # like /proc/kmsg, from which whoever reads waits for the next message
        assert read_file(Path("/proc/self/status"), 10) == b""


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "it is a named pipe"),
        (Path("/dev/zero"), "it is a device"),
        (tmp_path / "gone", "it cannot be read: No such file or directory"),
        (tmp_path / "pipe" / "x", "it cannot be read: Not a directory"),
        (tmp_path / ("x" * 300), "it cannot be read: File name too long"),
    ):
        with pytest.raises(FileError, match=f"^{says}$"):
            read_file(path, 10)


def test_the_message_names_file_fault_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^expected a file; got x/y \(it is a folder\)\. Go away\.$"):
        fail_to_read("a file", Path("x/y"), FileError("it is a folder"), "Go away.")
