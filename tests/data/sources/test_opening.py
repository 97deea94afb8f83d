"""Shards of a server, and the cache that keeps them: every test has a server of its own on this machine."""

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from relpos.data import from_wds
from relpos.data.sources import opening
from relpos.data.sources.cache import DiskCache, bytes_of
from relpos.data.sources.opening import open_shard
from sampled import files_of, made, served, write_tar

SIZES: dict[str, Any] = {"image_size": 32, "patch": 4}
CONTENT = os.urandom(300_000)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PAUSE", 0.0)


def whole(address: str, cache: DiskCache | None = None) -> bytes:
    with open_shard(address, cache) as file:
        return b"".join(iter(lambda: file.read(70_001) or b"", b""))


def test_samples_of_a_server_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", files_of(made(30)))
    mine = from_wds(str(path), **SIZES)
    asked: list[str] = []
    with served({"a.tar": path.read_bytes()}, asked) as address:
        for streaming in (False, True):
            sent = from_wds(f"{address}/{{a..a}}.tar", streaming=streaming, cache=tmp_path / "c", **SIZES)
            assert sent.options["contents"].startswith("30 images")
            for one, other in itertools.islice(zip(sent.batches(4, 0), mine.batches(4, 0), strict=True), 9):
                assert all((x == y).all() for x, y in zip(one, other, strict=True))
    assert asked == ["/a.tar"], "once: the cache had it for the second task and the epochs"


def test_a_connection_that_breaks_is_made_again_where_it_broke() -> None:
    asked: list[str] = []
    with served({"a": CONTENT}, asked, cut=100_000) as address:
        assert whole(f"{address}/a") == CONTENT
    assert asked == ["/a", "/a from 100000"]


def test_a_server_that_fails_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with served({}, asked) as address:
        for path, reason in {
            "no": r"HTTP Error 404: Not Found",
            "to/file:///etc/passwd": "HTTP Error 302",
            "to/ftp://127.0.0.1/a": "HTTP Error 302",
        }.items():
            with pytest.raises(ValueError, match=rf"expected a shard that its server sends; got {address}/") as caught:
                whole(f"{address}/{path}")
            assert reason in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="refused"):
        whole(f"{address}/a")
    with pytest.raises(ValueError, match="expected a shard that its server sends"):
        from_wds(f"{address}/a.tar", **SIZES)


def test_a_server_that_fails_later_ends_a_run_and_drops_no_shard(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", files_of(made(30)))
    files: dict[str, Any] = dict.fromkeys(("1.tar", "2.tar"), path.read_bytes())
    with served(files, []) as address:
        task = from_wds(f"{address}/{{1..2}}.tar", streaming=True, survey=40, **SIZES)
        files["2.tar"] = 503
        with pytest.raises(ValueError, match=rf"got {address}/2.tar \(HTTP Error 503"):
            next(task.batches(40, 0))
        with pytest.raises(ValueError, match=rf"got {address}/2.tar \(HTTP Error 503"):
            from_wds(f"{address}/{{1..2}}.tar", **SIZES)
    for odd in ("http://[::1/a.tar", "http://a..b/a.tar"):
        with pytest.raises(ValueError, match=r"expected .*; got http") as caught:
            from_wds(odd, **SIZES)
        assert "\n" not in str(caught.value)


def test_a_shard_that_is_replaced_while_it_is_sent_is_an_error() -> None:
    files: dict[str, Any] = {"a": CONTENT}
    with served(files, [], cut=100_000) as address, open_shard(f"{address}/a") as file:
        assert file.read(50_000) == CONTENT[:50_000]
        files["a"] = CONTENT[::-1]
        with pytest.raises(ValueError, match=r"expected a shard that its server sends; got .*/a \(it was replaced"):
            list(iter(lambda: file.read(50_000), b""))


def test_two_at_once_fetch_a_file_once(tmp_path: Path) -> None:
    asked: list[str] = []
    found: list[bytes] = []
    with served({"a": CONTENT}, asked) as address:

        def read() -> None:
            found.append(whole(f"{address}/a", DiskCache(tmp_path, 10**6)))  # a cache of its own, as a process has

        threads = [threading.Thread(target=read) for _ in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert found == [CONTENT] * 6
    assert asked == ["/a"]


def test_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    asked: list[str] = []
    cache = DiskCache(tmp_path, 700_000)
    (tmp_path / "0123456789abcdef.part").write_bytes(b"x" * 10**6)  # of a process that was killed
    with served(dict.fromkeys("abc", CONTENT) | {"large": CONTENT * 3}, asked) as address:
        for name in "abacab":  # c pushes b out, which was fetched after a, but used before it
            assert whole(f"{address}/{name}", cache) == CONTENT
            for age, path in enumerate(sorted(tmp_path.glob("*.file"), key=lambda one: one.stat().st_mtime_ns)):
                os.utime(path, ns=(0, 10**9 * (age + 1)))  # clocks may stand still between two uses
        assert asked == ["/a", "/b", "/c", "/b"]
        assert whole(f"{address}/large", cache) == CONTENT * 3, "larger than the cache: it is not kept"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 700_000
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    cache = DiskCache(tmp_path / "c", 10**6)
    replaced = os.replace

    def full(*paths: Any) -> None:
        if str(paths[1]).endswith(".file"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(*paths)

    with served({"a": CONTENT}, asked) as address:
        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match=r"the cache .*/c is not used: No space left on device; shards are"):
            assert whole(f"{address}/a", cache) == CONTENT
        assert whole(f"{address}/a", cache) == CONTENT
        monkeypatch.setattr(os, "replace", replaced)
        (tmp_path / "file").write_bytes(b"")
        with pytest.warns(RuntimeWarning, match="is not used"):
            assert whole(f"{address}/a", DiskCache(tmp_path / "file", 10**6)) == CONTENT
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix != ".lock"]


def test_sizes() -> None:
    assert [bytes_of(one) for one in ("20GB", "5 kB", "1tb", 7, "3MB", "9B")] == [
        2 * 10**10,
        5000,
        10**12,
        7,
        3 * 10**6,
        9,
    ]
    for wrong in ("", "0", "GB", "-1GB", "1.5GB", "20GiB", "1e9"):
        with pytest.raises(ValueError, match="expected a size such as 20GB"):
            bytes_of(wrong)
