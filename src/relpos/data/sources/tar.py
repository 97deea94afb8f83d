"""The files of an untrusted tar, one after another, without writing any.

Python's `tarfile` reads it as a stream. webdataset's own reader does so, too, but reads every member whole, whatever
its size, takes damage inside a tar for its end, and opens URLs by a shell. Here a member is bytes only if it is asked
for and small enough, headers and compression are bounded, and a tar that is cut short says so.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Self

from relpos.data.sources.cache import BinaryFile
from relpos.files.reading import FileError

HEADER_AT_MOST = 2**16
"""Bytes of a header for a long name or for attributes, which `tarfile` reads into memory."""
EXPANDS_AT_MOST = 100
"""How many times its bytes a compressed tar may unfold to; images hardly shrink."""
_FREE = 2**24
_LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class _Member(tarfile.TarInfo):
    """A header; one that is damaged, or lacks, is an error, and not the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros, which ends every tar
            raise
        except tarfile.HeaderError:
            raise FileError("it is cut short" if len(buf) < tarfile.BLOCKSIZE else "it is damaged") from None
        if found.type in _LONG and found.size > HEADER_AT_MOST:
            raise FileError(f"a header of it has {found.size:,} bytes, more than {HEADER_AT_MOST:,}")
        return found


class _Unfolded:
    """A compressed file, unfolded while it is read, by at most `EXPANDS_AT_MOST`."""

    def __init__(self, file: BinaryFile) -> None:
        self._file, self._read, self._given = file, 0, 0
        self._plain: IO[bytes] = gzip.GzipFile(fileobj=_FoldedFile(self._folded))  # type: ignore[call-overload]

    def _folded(self, size: int) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        return data

    def read(self, size: int) -> bytes:
        data = self._plain.read(size)
        self._given += len(data)
        if self._given > _FREE + EXPANDS_AT_MOST * self._read:
            raise FileError(f"it unfolds to more than {EXPANDS_AT_MOST} times its size")
        return data


class _Ending:
    """A stream whose end is met once: `tarfile` would go on to read nothing, as often as a header claims blocks."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read, self._ended = read, False

    def read(self, size: int) -> bytes:
        data = self._read(size)
        if not data and self._ended:
            raise FileError("it is cut short")
        self._ended = not data
        return data


class _FoldedFile:
    """What `gzip` needs of a file."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read


def members(
    file: BinaryFile, compressed: bool, wanted: Callable[[str], int | None]
) -> Iterator[tuple[str, bytes | str | None]]:
    """The regular files of a tar, in order: the name, and the bytes, or the reason why there are none.

    Args:
        wanted: the most bytes of the file of this name; None if it is not asked for, and then has no bytes.

    Raises:
        FileError: the tar is damaged, cut short, or a bomb. ValueError: the file's own, of a server that fails.
    """
    stream: Any = _Ending((_Unfolded(file) if compressed else file).read)
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else it remembers every header
                if not member.isreg():
                    continue
                most = wanted(member.name)
                if most is None:
                    yield member.name, None
                elif member.issparse():  # a few bytes may claim any number of zeros
                    yield member.name, "it is a sparse file"
                elif member.size > most:
                    yield member.name, f"it has {member.size:,} bytes, more than {most:,}"
                else:
                    data = archive.extractfile(member)
                    assert data is not None
                    yield member.name, data.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        short = isinstance(error, EOFError) or "unexpected end" in str(error)
        raise FileError("it is cut short" if short else f"it is damaged: {error}") from None
    except RecursionError:  # headers for a long name, each of the next
        raise FileError("it is damaged: too many headers of one file") from None
    except (ValueError, OverflowError) as error:  # zlib's, or numbers in a header that are none
        if isinstance(error, FileError) or getattr(error, "fault", None) is not None:  # or a server that fails
            raise
        raise FileError(f"it is damaged: {error}") from None
