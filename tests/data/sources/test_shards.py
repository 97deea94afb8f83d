"""WebDataset's shards: fields, samples that cannot be used, and tars that mean harm, of which nothing runs."""

import gzip
import io
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from relpos.data import from_wds, notes
from relpos.data.sources import tar
from relpos.data.sources.shards import SHARDS_AT_MOST, ShardFiles, expand, splits_of
from relpos.data.sources.source import LabelledImage, Unreadable
from sampled import files_of, made, png, write_tar

GOOD = list(files_of(made(12)))


def read(path: Path | str, **options: Any) -> tuple[list[str], dict[str, str]]:
    """The labels of the samples of one shard, and the reason for each that cannot be used."""
    source = ShardFiles(str(path), image_at_most=10_000, **options)
    found = list(source.read("train", 0))
    bad = {one.name: one.reason for one in found if isinstance(one, Unreadable)}
    return [one.label for one in found if isinstance(one, LabelledImage)], bad


def test_what_webdataset_reads(tmp_path: Path) -> None:
    """Its own writer and reader agree with this one on the samples."""
    import webdataset

    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(5):
            label = str(number % 2)
            writer.write({"__key__": f"in/a.folder/{number}", "png": png(number), "cls": label, "seg.png": png(9)})
    source = ShardFiles(str(path), "png", image_at_most=10**6)
    mine = [(one.image, one.label) for one in source.read("train", 0) if isinstance(one, LabelledImage)]
    with path.open("rb") as file:
        files = webdataset.tariterators.tar_file_expander([{"url": "a.tar", "stream": file}])
        theirs = list(webdataset.tariterators.group_by_keys(files))
    assert mine == [(one["png"], one["cls"].decode()) for one in theirs]
    assert len(mine) == 5


def test_fields_that_are_found(tmp_path: Path) -> None:
    files = [("1.jpg", png(0)), ("1.json", b'{"of": {"kind": 7}}'), ("1.txt", b"a cat"), ("1.pyd", b"x")]
    path = write_tar(tmp_path / "a.tar", files)
    assert read(path) == (["a cat"], {})
    assert read(path, label_column="json.of.kind") == (["7"], {})
    assert read(path, image_column="PNG;jpg", label_column="json.of.kind") == (["7"], {})
    assert read(path, label_column="TXT") == (["a cat"], {})
    for wrong in ("json.of", "json.of.kind.more", "json.no", "json.0"):
        assert read(path, label_column=wrong) == ([], {"a.tar/1": f"its {wrong} is no name or number of a class"})
    both = write_tar(tmp_path / "b.tar", [*files, ("1.png", png(1))])
    with pytest.raises(
        ValueError, match=r"expected one field of images; got the fields jpg, png, json, txt, pyd\. Name"
    ):
        read(both)
    with pytest.raises(ValueError, match=r"expected one field of labels among cls, .*; got the fields png"):
        read(write_tar(tmp_path / "c.tar", [("1.png", png(0))]))
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected shards with samples; got .*empty.tar \(it is cut short\)"):
        read(tmp_path / "empty.tar")


def test_samples_that_cannot_be_used_are_left_out_and_counted_in_one_line(tmp_path: Path) -> None:
    files = [
        *GOOD,
        ("x1.png", png(50)),  # no label
        ("x2.cls", b"a"),  # no image
        ("x3.png", b"\0" * 20_000), ("x3.cls", b"a"),  # more bytes than an image may have
        ("x4.png", png(51)), ("x4.cls", b"\xff\n"),
        ("x5.png", png(52)), ("x5.png", png(53)), ("x5.cls", b"b"),
        *GOOD[:2],
        ("../x6.png", png(54)), ("../x6.cls", b"a"),
        ("/x7.png", png(55)), ("/x7.cls", b"a"),
    ]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", files)
    labels, bad = read(path)
    assert labels == [*"aaaaaabbbbbb", "b"]
    assert bad == {
        "a.tar/x1": "it lacks cls",
        "a.tar/x2": "it lacks png",
        "a.tar/x3": "png: it has 20,000 bytes, more than 10,000",
        "a.tar/x4": "its cls is no name or number of a class",
        "a.tar/x5.png": "its name repeats",
        "a.tar/000": "its name repeats",
        "a.tar/../x6": "its name leads out of the folder",
        "a.tar//x7": "its name leads out of the folder",
    }
    splits = write_tar(tmp_path / "val.tar", GOOD), write_tar(tmp_path / "test.tar", GOOD)
    path.rename(tmp_path / "train.tar")
    pattern = f"{tmp_path}/{{train,val,test}}.tar"
    (line,) = [one for one in notes(from_wds(pattern, image_size=32, patch=4)) if one.startswith("Skipped")]
    assert line.startswith("Skipped 8 of 45 images: train.tar/x1 (it lacks cls), ")
    assert line.endswith(", and 3 more")
    with pytest.raises(
        ValueError, match=r"got train.tar/x1 \(it lacks cls\)\. Repair them, or leave them out: --bad-data"
    ):
        from_wds(pattern, image_size=32, patch=4, bad_data="fail")
    assert sorted(tmp_path.iterdir()) == sorted([*splits, tmp_path / "train.tar"]), "nothing was written"


def cut(content: bytes) -> bytes:
    """All but the last sample and a half."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return content[: archive.getmembers()[-3].offset_data + 100]


def at_a_border(content: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return content[: archive.getmembers()[-2].offset]


def damaged(content: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        at = archive.getmembers()[-2].offset
    return content[:at] + b"\xff" * 512 + content[at + 512 :]


def long_header(content: bytes) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2**20
    return content[: content.rindex(b"011.png")] + member.tobuf() + b"x" * 2**20


def claims(size: int, name: str) -> Any:
    """Ends with a header of so many bytes, of which none are there."""

    def change(content: bytes) -> bytes:
        member = tarfile.TarInfo(name)
        member.size = size
        return content[: content.rindex(b"011.png")] + member.tobuf()

    return change


def chained_headers(content: bytes) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1
    return content[: content.rindex(b"011.png")] + (member.tobuf() + bytes(512)) * 1200


@pytest.mark.parametrize(
    ("change", "samples", "reason"),
    [
        (cut, 10, "it is cut short"),
        (at_a_border, 10, "it is cut short"),
        (damaged, 10, "it is damaged"),
        (claims(2**60, "x.bin"), 11, "it is cut short"),
        (claims(9_000, "x.png"), 10, "it is cut short"),
        (chained_headers, 10, "it is damaged: too many headers of one file"),
        (long_header, 10, "a header of it has 1,048,576 bytes, more than 65,536"),
    ],
)
def test_tars_that_break_off(change: Any, samples: int, reason: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", GOOD)
    path.write_bytes(change(path.read_bytes()))
    labels, bad = read(path)
    assert (len(labels), bad) == (samples, {"a.tar": reason})
    assert read(path)[0] == labels


def test_sparse_files_are_left_out(tmp_path: Path) -> None:
    """Of a few bytes, they claim any number of zeros."""
    sparse = tarfile.TarInfo("000.png")
    sparse.pax_headers = {"GNU.sparse.size": "9000", "GNU.sparse.map": "9000,0", "GNU.sparse.name": "000.png"}
    path = write_tar(tmp_path / "a.tar", GOOD[1:])
    path.write_bytes(sparse.tobuf(tarfile.PAX_FORMAT) + path.read_bytes())
    labels, bad = read(path)
    assert (len(labels), bad) == (11, {"a.tar/000": "png: it is a sparse file"})


def test_compressed_tars_and_those_that_unfold_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar.gz", GOOD, "w:gz")
    assert read(path) == ([*"aaaaaabbbbbb"], {})
    path.write_bytes(path.read_bytes()[:-2000])
    assert read(path)[1] == {"a.tar.gz": "it is cut short"}
    monkeypatch.setattr(tar, "_FREE", 2**16)
    bomb = write_tar(tmp_path / "b.tgz", [*GOOD, ("x.bin", bytes(2**22))], "w:gz")
    assert read(bomb) == ([*"aaaaaabbbbbb"], {"b.tgz": "it unfolds to more than 100 times its size"})
    (tmp_path / "c.tgz").write_bytes(gzip.compress(b"no tar" * 1000))
    with pytest.raises(ValueError, match=r"c.tgz \(it is damaged\)"):
        read(tmp_path / "c.tgz")


class Runs:
    """A pickle that writes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "it ran"))


def test_pickles_are_refused_if_named_and_never_read_if_not(tmp_path: Path) -> None:
    mark, harm = tmp_path / "mark", tmp_path / "shards"
    harm.mkdir()
    content = pickle.dumps(Runs(mark))
    fields = ("pyd", "pickle", "pkl", "pth", "pt", "npy", "npz")
    files = [*GOOD[:2], *((f"000.{field}", content) for field in fields)]
    path = write_tar(harm / "a.tar", files)
    for field in fields:
        for option in ("image_column", "label_column"):
            with pytest.raises(ValueError, match=f"got {field}, which is or may hold a pickle") as caught:
                read(path, **{option: field})
            assert "\n" not in str(caught.value)
    assert read(path) == (["a"], {})
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "it would have run"


@pytest.mark.parametrize("scheme", ["pipe:", "PIPE:", " pipe:", "{a,pipe:}", "gs://", "file:", "{pipe,http}:"])
def test_commands_and_other_schemes_are_refused(scheme: str, tmp_path: Path) -> None:
    for command in (f"{scheme}touch {tmp_path}/mark", f"{scheme}{tmp_path}/a.tar"):
        with pytest.raises(ValueError, match=r"expected shards on this machine, or by http or https; got ") as caught:
            from_wds(command)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_patterns() -> None:
    assert expand("a-{00..02}.tar") == ["a-00.tar", "a-01.tar", "a-02.tar"]
    assert expand("http://x/{b,c}/{1..2}.tar")[-1] == "http://x/c/2.tar"
    letters = "{" + "{a..z}" * 9 + ",c}"
    for many in (
        letters,
        "{0..9%s}" % ("9" * 30),
        "{0..999999999\n}",
        "{0..999999999999}.tar",
        "{0..999}{0..999}.tar",
        "{{a,b}" + "{a,b}" * 60 + ",c}",
        "{a,b}" * 60,
    ):
        with pytest.raises(ValueError, match=f"expected at most {SHARDS_AT_MOST:,} shards"):
            expand(many)
    assert len(expand("imagenet-{train-{0000..1281},validation-{00..49}}.tar")) == 1332
    assert expand(r"a\{1,2\}{b,c\,d}{9..1..4}") == [f"a{{1,2}}{x}{n}" for x in ("b", "c,d") for n in (9, 5, 1)]
    assert len(expand("{0..9999999..100}{}{x}.tar")) == SHARDS_AT_MOST
    for odd in ("{0..3.tar", "0}.tar", "{a,}}{.tar", "{" * 5000):
        with pytest.raises(ValueError, match="expected braces in pairs"):
            expand(odd)


def test_a_relative_pattern_is_expanded_before_it_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's own name may have braces and commas."""
    folder = tmp_path / "in {a,b}"
    folder.mkdir()
    files = [str(write_tar(folder / f"{name}.tar", GOOD)) for name in "ab"]
    monkeypatch.chdir(folder)
    for pattern in ("{a,b}.tar", "./{a..b}.tar", f"{{a,{tmp_path}/in \\{{a\\,b\\}}/b}}.tar"):
        source = ShardFiles(pattern, image_at_most=10_000)
        monkeypatch.chdir("/")
        again = ShardFiles((source.shown or "").removeprefix("wds:"), image_at_most=10_000)
        monkeypatch.chdir(folder)
        assert source._names == again._names == {"train": files}
        assert again.shown == source.shown
    with pytest.raises(ValueError, match=re.escape("got /no/a.tar, which does not")):
        from_wds("/no/a.tar")


def test_splits_that_names_state() -> None:
    assert splits_of(["x/train-0.tar", "x/val-0.tar", "x/Train-1.tar"]) == {
        "train": ["x/train-0.tar", "x/Train-1.tar"],
        "validation": ["x/val-0.tar"],
    }
    assert splits_of(["test/0.tar", "train/0.tar"]) == {"train": ["train/0.tar"], "test": ["test/0.tar"]}
    for all_train in (
        ["training-0.tar", "val-0.tar"],
        ["val-0.tar"],
        ["train-val-0.tar", "test.tar"],
        ["train.tar", "b"],
    ):
        assert splits_of(all_train) == {"train": all_train}
