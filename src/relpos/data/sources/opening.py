"""Open a shard: a file of this machine, or one that a server sends by http.

No other scheme is opened: webdataset's `pipe:` is a command for a shell, and so are its http and cloud URLs inside.
A connection that breaks is made again where it broke. If that fails, it is an error and not a short shard, because
every mechanism must train on the same samples.
"""

from __future__ import annotations

import http.client
import io
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from relpos.core.checks import fail
from relpos.data.sources.cache import BinaryFile, DiskCache
from relpos.files.reading import open_file
from relpos_command.visible import visible

TIMEOUT = 60.0
"""Seconds that a server may be silent."""
ATTEMPTS = 4
"""How often a broken connection is made; before the second it waits `PAUSE` seconds, then twice as long each time."""
PAUSE = 1.0
_NO_LIMIT = 2**63


def is_remote(shard: str) -> bool:
    """Whether a shard is named by http or https.

    Raises:
        ValueError: it is no address.
    """
    try:
        return urlsplit(shard).scheme.lower() in ("http", "https")
    except ValueError as error:  # such as brackets that are no IPv6
        fail("paths or addresses of shards", f"{visible(shard)} ({error})", "Check the address.")


def open_shard(shard: str, cache: DiskCache | None = None) -> BinaryFile:
    """The bytes of a shard, to be read once.

    Args:
        cache: keeps those that a server sends.

    Raises:
        FileError: it is no regular file of this machine. ValueError: a server does not send it.
    """
    if not is_remote(shard):
        return open_file(Path(shard), _NO_LIMIT)
    kept = None if cache is None else cache.open(shard, lambda: _Sent(shard))
    return _Sent(shard) if kept is None else kept


def _opener() -> urllib.request.OpenerDirector:
    """An opener of http and https alone; Python's own also opens ftp, to which a server may redirect."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _Sent(io.RawIOBase):
    """A file that a server sends; continued if the connection breaks."""

    def __init__(self, url: str) -> None:
        self._url, self._at, self._size = url, 0, -1
        self._answer: http.client.HTTPResponse | None = None
        self._failed = 0
        self._version = ""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while True:
            try:
                if self._answer is None:
                    self._connect()
                assert self._answer is not None
                data = self._answer.read(size if size >= 0 else None)
                if not data and size and self._at < self._size:
                    raise http.client.IncompleteRead(b"")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._hang_up(error)
                self._failed += 1
                refused = isinstance(error, ValueError) or (
                    isinstance(error, urllib.error.HTTPError) and error.code < 500
                )
                if refused or self._failed >= ATTEMPTS:
                    self._fail(error)
                time.sleep(PAUSE * 2 ** (self._failed - 1))
                continue
            self._at += len(data)
            if data:
                self._failed = 0
            return data

    def _connect(self) -> None:
        headers = {"Range": f"bytes={self._at}-"} if self._at else {}
        if self._at and self._version:
            headers["If-Range"] = self._version  # a server that has another file by now sends all of it
        answer = _opener().open(urllib.request.Request(self._url, headers=headers), timeout=TIMEOUT)
        self._answer = answer
        if answer.status != http.client.PARTIAL_CONTENT:
            mark = answer.headers.get("ETag") or "W/"
            version = answer.headers.get("Last-Modified", "") if mark.startswith("W/") else mark
            if self._at and version != self._version:
                raise ValueError("it was replaced while it was read")
            self._version = version
            self._size = int(answer.headers.get("Content-Length") or -1)
            left = self._at
            while left:  # the server sends all of it again
                skipped = answer.read(min(left, 2**20))
                if not skipped:
                    raise http.client.IncompleteRead(b"")
                left -= len(skipped)

    def _fail(self, error: Exception) -> NoReturn:
        why = str(error) or type(error).__name__
        fail("a shard that its server sends", f"{visible(self._url)} ({why})", "Check the address and the network.")

    def _hang_up(self, error: Exception) -> None:
        for one in (self._answer, error):
            if isinstance(one, http.client.HTTPResponse | urllib.error.HTTPError):
                one.close()
        self._answer = None

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        super().close()
