"""Small images with a class each, as the files of a folder, as tars, and as a dataset of Hugging Face."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image


class Made(NamedTuple):
    """An image as PNG, its key and its class."""

    key: str
    image: bytes
    label: str


def png(seed: int, size: tuple[int, int] = (20, 24)) -> bytes:
    """Coloured noise."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def made(count: int) -> list[Made]:
    """Two classes, one after the other, as the names of files are sorted."""
    return [Made(f"{number:03}", png(number), "ab"[2 * number // count]) for number in range(count)]


def split_by_hash(image: bytes) -> str:
    """The split of an image where there is none, by its definition."""
    fraction = int(hashlib.sha256(image).hexdigest()[:16], 16) / 16**16
    return "test" if fraction < 0.2 else "val" if fraction < 0.3 else "train"


def as_folder(folder: Path, samples: Iterable[Made]) -> Path:
    """DIR/split/class/key.png, split by hash."""
    for one in samples:
        path = folder / split_by_hash(one.image) / one.label / f"{one.key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.image)
    return folder


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar of these files."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def files_of(samples: Iterable[Made]) -> Iterator[tuple[str, bytes]]:
    """The files of a shard."""
    for one in samples:
        yield f"{one.key}.png", one.image
        yield f"{one.key}.cls", one.label.encode()


def as_dataset(samples: list[Made], kind: str = "string") -> Any:
    """A dataset of Hugging Face with the columns picture and name."""
    import datasets

    label = datasets.ClassLabel(names=["a", "b"]) if kind == "class" else datasets.Value(kind)
    columns = {
        "picture": [{"bytes": one.image, "path": None} for one in samples],
        "name": [one.label for one in samples],
    }
    features = datasets.Features({"picture": datasets.Image(), "name": label})
    return datasets.Dataset.from_dict(columns, features=features)


@contextmanager
def served(files: Mapping[str, bytes | int], asked: list[str], *, cut: int = 0) -> Iterator[str]:
    """The address of a server of these files on this machine.

    Args:
        files: the content of each, or the status of its error.
        asked: receives what is asked for. cut: breaks the first connection to each file after so many bytes, if not 0.
    """
    broken: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            asked.append(self.path + (f" from {begin}" if begin else ""))
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
                return
            content = files.get(self.path.lstrip("/"), 404)
            if isinstance(content, int):
                self.send_error(content)
                return
            mark = f'"{hashlib.sha256(content).hexdigest()}"'
            begin = begin if self.headers.get("If-Range", mark) == mark else 0
            self.send_response(206 if begin else 200)
            self.send_header("ETag", mark)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            if cut and self.path not in broken:
                broken.add(self.path)
                self.wfile.write(content[:cut])
                return
            self.wfile.write(content[begin:])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
