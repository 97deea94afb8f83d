"""Files to pixels: every mode, depth, orientation and shape, against pixels known beforehand; and what is broken."""

import contextlib
import errno
import io
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import relpos.data.decode
from relpos.data.decode import decode, decode_all, endings

RAMP = np.linspace(0, 255, 12 * 8).astype(np.uint8).reshape(12, 8)
COLOURS = np.stack([RAMP, RAMP[::-1], 255 - RAMP], axis=2)


def stored(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    return io.BytesIO(stored(image, kind, **options))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(stored(Image.fromarray(COLOURS)))
    return tmp_path / "a.png"


def same_size(data: bytes) -> np.ndarray:
    return decode(io.BytesIO(data), (12, 8))


def filled(*colour: int) -> np.ndarray:
    return np.tile(np.uint8(colour), (12, 8, 1))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def palette(indices: np.ndarray, *colours: int) -> Image.Image:
    image = Image.fromarray(indices.astype(np.uint8), "P")
    image.putpalette(list(colours))
    return image


FOUR = palette(RAMP // 64, 0, 0, 0, 250, 0, 0, 0, 240, 0, 0, 0, 230)
FOUR_SHOWN = np.array([[0, 0, 0], [250, 0, 0], [0, 240, 0], [0, 0, 230]])[RAMP // 64]
ALPHA = np.where(np.arange(96).reshape(12, 8) % 2, 255, 0).astype(np.uint8)
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (8, 12), (0, 0, 255))]}
RED = Image.new("RGB", (8, 12), (255, 0, 0))
LYING = Image.fromarray(np.rot90(COLOURS))  # as a camera on its side stores it, to be shown turned clockwise
KNOWN: dict[str, tuple[bytes, np.ndarray]] = {
    **{f"colour in {kind}": (stored(Image.fromarray(COLOURS), kind), COLOURS) for kind in ("PNG", "BMP", "TIFF")},
    "colour in WEBP": (stored(Image.fromarray(COLOURS), "WEBP", lossless=True), COLOURS),
    "grey": (stored(Image.fromarray(RAMP)), np.stack([RAMP] * 3, axis=2)),
    "black and white": (
        stored(Image.fromarray(RAMP > 127)),
        np.where(RAMP[:, :, None] > 127, filled(255, 255, 255), 0),
    ),
    **{f"a palette in {kind}": (stored(FOUR, kind), FOUR_SHOWN) for kind in ("PNG", "GIF")},
    "transparent parts are white": (
        stored(Image.fromarray(np.dstack([COLOURS, ALPHA]), "RGBA")),
        np.where(ALPHA[:, :, None] == 255, COLOURS, 255),
    ),
    "a transparent colour of a palette": (
        stored(palette(RAMP > 127, 1, 2, 3, 4, 5, 6), transparency=0),
        np.where(RAMP[:, :, None] > 127, [4, 5, 6], 255),
    ),
    "colours of print": (stored(Image.new("CMYK", (8, 12), (255, 0, 0, 0)), "TIFF"), filled(0, 255, 255)),
    **{
        f"the first frame of {kind}": (stored(RED, kind, **FRAMES, lossless=True), filled(255, 0, 0))
        for kind in ("GIF", "WEBP", "TIFF", "PNG")
    },
    "the camera's orientation": (stored(LYING, exif=turned(6)), COLOURS),
    **{f"no orientation {n}": (stored(Image.fromarray(COLOURS), exif=turned(n)), COLOURS) for n in (0, 9, 65535)},
}


@pytest.mark.parametrize("what", KNOWN)
def test_pixels_are_those_that_are_known(what: str) -> None:
    data, wanted = KNOWN[what]
    assert np.array_equal(same_size(data), wanted)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_depth_and_range(kind: str) -> None:
    deep = (np.arange(96).reshape(12, 8) * 40).astype(np.uint16)  # twelve bits in use: dark, and not one value lost
    found = same_size(stored(Image.fromarray(deep), kind))
    np.testing.assert_allclose(found, np.repeat(deep[:, :, None] / 257, 3, axis=2), rtol=1e-5)
    assert len(np.unique(found)) == 96


def test_floating_point_and_32_bits_are_stretched() -> None:
    values = np.linspace(-3, 5, 96, dtype=np.float32).reshape(12, 8)
    found = same_size(stored(Image.fromarray(values), "TIFF"))
    np.testing.assert_allclose(found[:, :, 0], (values + 3) / 8 * 255, atol=1e-3)
    wide = (np.arange(96).reshape(12, 8) * 100000).astype(np.int32)
    found = same_size(stored(Image.fromarray(wide), "TIFF"))
    np.testing.assert_allclose(found[:, :, 2], np.arange(96).reshape(12, 8) / 95 * 255, rtol=1e-4)
    flat = same_size(stored(Image.fromarray(np.full((12, 8), 7.0, dtype=np.float32)), "TIFF"))
    assert np.array_equal(flat, np.zeros((12, 8, 3)))


@pytest.mark.parametrize("shape", [(40, 90), (33, 1000), (5, 3), (1, 1)])
@pytest.mark.parametrize("size", [(20, 32), (32, 8)])
def test_any_shape_becomes_the_size_asked_for(shape: tuple[int, int], size: tuple[int, int]) -> None:
    assert decode(file_of(Image.new("L", shape[::-1], 9)), size).shape == (*size, 3)


@pytest.mark.parametrize("lying", [True, False])
def test_the_longer_side_is_cropped_evenly(lying: bool) -> None:
    thirds = np.repeat(np.uint8([10, 200, 90]), 30)[None].repeat(30, axis=0)  # its middle third is square
    found = decode(file_of(Image.fromarray(thirds if lying else thirds.T)), (10, 10))
    assert np.array_equal(found[2:-2, 2:-2], np.full((6, 6, 3), 200))
    assert abs(found.astype(int) - 200).max() < 40, "an edge takes a little of what was cropped"


def test_a_large_photograph_is_read_at_a_fraction_and_looks_the_same() -> None:
    smooth = np.add.outer(np.arange(1200), np.arange(1600)) * 255 // 2800
    image = Image.fromarray(np.stack([smooth, smooth[::-1], smooth[:, ::-1]], axis=2).astype(np.uint8))
    photograph = decode(file_of(image, "JPEG", quality=95), (24, 24)).astype(int)
    assert abs(photograph - decode(file_of(image), (24, 24))).max() <= 3


@pytest.mark.parametrize("edge", [192, 100])
def test_a_small_photograph_keeps_its_detail(edge: int) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (24, 24), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((edge, edge), Image.Resampling.NEAREST)
    photograph = decode(file_of(image, "JPEG", quality=95), (24, 24)).astype(int)
    assert abs(photograph - decode(file_of(image), (24, 24))).mean() < 6


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


BROKEN: dict[str, bytes] = {
    "empty.png": b"",
    "text.png": b"these are words",
    "cut.png": cut(stored(Image.fromarray(COLOURS))),
    "cut.jpg": cut(stored(Image.fromarray(np.tile(COLOURS, (9, 9, 1))), "JPEG")),
    "cut.gif": cut(stored(Image.fromarray(RAMP), "GIF")),
    "nan.tif": stored(Image.fromarray(np.full((4, 4), np.nan, dtype=np.float32)), "TIFF"),
    "huge.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 9, 9, 1, 24, 0, 0, 0, 0, 0, 0),
}
REASONS = {
    "empty.png": "the file is empty",
    "text.png": "Pillow finds no image in it",
    "cut.gif": "Pillow finds no image in it",
    "gone.png": "it cannot be read: No such file",
}


def test_what_is_broken_gets_a_reason_and_the_rest_its_pixels(tmp_path: Path) -> None:
    for name, data in {**BROKEN, "fine.png": stored(Image.fromarray(COLOURS))}.items():
        (tmp_path / name).write_bytes(data)
    names = ["fine.png", *BROKEN, "gone.png"]
    seen: list[tuple[int, int]] = []
    found = decode_all([tmp_path / name for name in names], (12, 8), lambda done, of: seen.append((done, of)))
    assert np.array_equal(found[0], COLOURS)
    for name, reason in zip(names[1:], found[1:], strict=True):
        assert isinstance(reason, str), name
        assert reason.startswith(REASONS.get(name, "it is broken: ")), reason
        assert "\n" not in reason
    assert seen == [(done, len(names)) for done in range(1, len(names) + 1)]


@pytest.fixture
def no_picture(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """What is no regular file under an image's name. A reader that opens the pipe meets a writer, and does not hang."""
    paths = {name: tmp_path / f"{name}.png" for name in ("folder", "pipe", "device", "socket", "circle", "linked")}
    paths["folder"].mkdir()
    paths["device"].symlink_to("/dev/null")
    paths["circle"].symlink_to(paths["circle"])
    paths["linked"].symlink_to(tmp_path / "fine")
    (tmp_path / "fine").write_bytes(stored(Image.fromarray(COLOURS)))
    os.mkfifo(paths["pipe"])
    writer = threading.Thread(target=lambda: os.close(os.open(paths["pipe"], os.O_WRONLY)), daemon=True)
    writer.start()
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):  # a socket's address must be short
        server.bind("socket.png")
    yield paths
    os.close(os.open(paths["pipe"], os.O_RDONLY | os.O_NONBLOCK))
    writer.join()


def test_regular_files_alone_are_read(no_picture: dict[str, Path]) -> None:
    linked, *others = decode_all([no_picture["linked"], *no_picture.values()], (12, 8))[:-1]
    assert np.array_equal(linked, COLOURS), "a link to an image is one"
    found = dict(zip(no_picture, others, strict=False))
    assert found == {
        "folder": "it is a folder",
        "pipe": "it is a named pipe",
        "device": "it is a device",
        "socket": "it is a socket",
        "circle": "it cannot be read: Too many levels of symbolic links",
    }


def test_a_file_that_may_not_be_read_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a.png")

    monkeypatch.setattr(Path, "open", refuse)  # whoever runs the tests may be root, who reads everything
    assert decode_all([file], (12, 8)) == ["it cannot be read: Permission denied"]


def claims(rows: int, columns: int) -> bytes:
    """A small PNG whose header says that it is large."""
    data = bytearray(stored(Image.fromarray(COLOURS)))
    data[16:24] = struct.pack(">II", columns, rows)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_pixels_and_bytes_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(claims(30_000, 30_000))
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(claims(30_000, 30_000)), 22)
    (tmp_path / "b.ico").write_bytes(icon + claims(30_000, 30_000))  # 16 x 16, says the icon around it
    with (tmp_path / "c.webp").open("wb") as file:  # Pillow reads a WEBP whole; this one has no blocks on the disk
        file.write(b"RIFF\0\0\0\0WEBPVP8 ")
        file.truncate(50_000_000_000)
    limits = ["900,000,000 pixels, more than 100,000,000"] * 2 + ["50,000,000,000 bytes, more than 800,000,000"]
    found = decode_all(sorted(tmp_path.iterdir()), (12, 8))
    assert found == [f"it has {limit}; --max-pixels raises the limit" for limit in limits]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "PCX", "JPEG2000"])
def test_the_limit_on_pixels_is_the_same_for_every_kind(kind: str, tmp_path: Path) -> None:
    (tmp_path / "fits").write_bytes(stored(Image.new("RGB", (32, 24), 9), kind))
    (tmp_path / "large").write_bytes(stored(Image.new("RGB", (32, 25), 9), kind))
    fits, large = decode_all([tmp_path / "fits", tmp_path / "large"], (12, 8), max_pixels=32 * 24)
    assert isinstance(fits, np.ndarray)
    assert large == "it has 800 pixels, more than 768; --max-pixels raises the limit"
    (raised,) = decode_all([tmp_path / "large"], (12, 8), max_pixels=800)
    assert isinstance(raised, np.ndarray)


def test_pixels_in_the_works_stay_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, lock = 0, 0, threading.Lock()
    plain = relpos.data.decode._plain

    def counted(image: Image.Image) -> Image.Image:
        nonlocal now, most
        with lock:
            now, most = now + image.width * image.height, max(most, now + image.width * image.height)
        time.sleep(0.002)
        with lock:
            now -= image.width * image.height
        return plain(image)

    monkeypatch.setattr(relpos.data.decode, "_plain", counted)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for number, edge in enumerate((5, 20, 7, 20, 10, 20, 3, 20) * 3):
        (tmp_path / f"{number:02}.png").write_bytes(stored(Image.new("L", (edge, edge), number)))
    found = decode_all(sorted(tmp_path.iterdir()), (4, 4), max_pixels=500)
    assert [int(one[0, 0, 0]) for one in found if not isinstance(one, str)] == list(range(24))
    assert 400 < most <= 500, "several at a time, together no more than one may have"


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
FUZZED = {
    "PNG": stored(Image.fromarray(COLOURS)),
    "GIF": stored(Image.fromarray(RAMP), "GIF", save_all=True, append_images=[Image.fromarray(RAMP.T)]),
    "JPEG": stored(Image.fromarray(COLOURS), "JPEG", exif=TURNED),
    "TIFF": stored(Image.fromarray(COLOURS), "TIFF", compression="tiff_lzw"),
    "BMP": stored(Image.fromarray(COLOURS), "BMP"),
    "WEBP": stored(Image.fromarray(COLOURS), "WEBP"),
    "ICO": stored(Image.fromarray(COLOURS), "ICO"),
}


@pytest.mark.parametrize("kind", list(FUZZED))
def test_damage_gives_pixels_or_a_reason(kind: str, tmp_path: Path) -> None:
    random, data = np.random.default_rng(0), np.frombuffer(FUZZED[kind], dtype=np.uint8)
    paths = []
    for number in range(60):
        damaged = data[: random.integers(1, len(data) + 1)].copy() if number % 2 else data.copy()
        for _ in range(random.integers(1, 4)):  # most in the first bytes, where the header is
            damaged[min(len(damaged) - 1, int(random.exponential(40)))] = random.integers(256)
        paths.append(tmp_path / f"{number:02}")
        paths[-1].write_bytes(damaged.tobytes())
    (tmp_path / "whole").write_bytes(data.tobytes())
    whole, *found = decode_all([tmp_path / "whole", *paths], (12, 8), max_pixels=1_000_000)
    assert isinstance(whole, np.ndarray)
    for one in found:
        if isinstance(one, str):
            assert "\n" not in one
            assert one.startswith(("it is broken: ", "it has ", "Pillow finds no image in it")), one
        else:
            assert one.shape == (12, 8, 3)


def test_memory_that_one_image_takes_is_that_images_fault(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(_: Image.Image) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(relpos.data.decode, "_plain", claim)
    assert decode_all([file], (12, 8)) == ["memory ran out while it was decoded"]


def test_pillow_says_nothing_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(stored(Image.fromarray(COLOURS), "TIFF"))
    at = data.index(struct.pack("<HHIH", 277, 3, 1, 3))  # samples per pixel
    data[at + 8 : at + 10] = struct.pack("<H", 2048)
    (tmp_path / "a.tif").write_bytes(data)
    (found,) = decode_all([tmp_path / "a.tif"], (12, 8))
    assert isinstance(found, str)
    assert capfd.readouterr() == ("", "")


def test_large_images_are_no_bombs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    (found,) = decode_all([file], (12, 8))
    assert np.array_equal(found, COLOURS)
    assert Image.MAX_IMAGE_PIXELS == 10, "other users of Pillow keep their limit"


def test_an_interruption_leaves_no_threads(file: Path) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        decode_all([file] * 50, (12, 8), stop)
    assert threading.active_count() == before


def test_endings_are_those_that_pillow_opens() -> None:
    assert {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm"} <= endings()
    assert ".pdf" not in endings(), "written by Pillow, never read"


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 12\n%%EndComments\nshowpage\n"


def iptc(content: bytes) -> bytes:
    """A file of IPTC that holds another."""
    fields = {(3, 20): b"\0\0\0\x08", (3, 30): b"\0\0\0\x0c", (3, 60): b"\1\0", (3, 120): b"\0\0\0\5"}
    fields[8, 10] = content
    return b"".join(struct.pack(">BBBH", 0x1C, *tag, len(value)) + value for tag, value in fields.items())


@pytest.mark.parametrize("content", [EPS, iptc(EPS)])
def test_no_program_is_run(content: bytes, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript for EPS, whatever the file is called."""
    from PIL import EpsImagePlugin

    ran: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args: ran.append(args))
    with contextlib.suppress(Exception), Image.open(io.BytesIO(content)) as image:
        image.load()
    assert ran, "it would have run"
    ran.clear()
    file.write_bytes(content)
    assert decode_all([file, content], (12, 8)) == ["Pillow finds no image in it"] * 2
    assert not ran
    assert not {".eps", ".ps", ".iim", ".wmf", ".h5", ".mpg"} & endings()
