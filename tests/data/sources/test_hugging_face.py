"""Datasets of Hugging Face, written by the library itself. The hub is not reached; its errors are its library's."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import pytest

from relpos.data import Text, find_data, find_task, from_hf, notes
from relpos.data.sources.hugging_face import HuggingFace
from relpos.data.sources.source import LabelledImage, Unreadable
from relpos.data.sources.splitting import split_of
from sampled import as_dataset, made, png

SIZES: dict[str, Any] = {"image_size": 32, "patch": 4}


@pytest.fixture(autouse=True, scope="module")
def no_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def rows(**columns: Any) -> Any:
    """A dataset whose column picture has images."""
    features = datasets.Dataset.from_dict({name: one for name, one in columns.items() if name != "picture"}).features
    count = len(next(iter(columns.values())))
    pictures = columns.get("picture", [{"bytes": png(number), "path": None} for number in range(count)])
    return datasets.Dataset.from_dict(
        {"picture": pictures, **columns}, features=datasets.Features({"picture": datasets.Image(), **features})
    )


def read(data: Any, **options: Any) -> list[LabelledImage | Unreadable]:
    return list(HuggingFace(data, image_at_most=10_000, **options).read("train", 0))


def test_columns_are_found_or_named() -> None:
    two = rows(number=[1, 2], name=["a", "b"], weight=[0.5, 0.5])
    listed = r"The columns are number \(numbers\), name \(text\), weight \(float64\)"
    with pytest.raises(
        ValueError, match=r"expected one column of labels; got the columns number .*: --label-column NAME"
    ):
        read(two)
    with pytest.raises(ValueError, match=rf"expected a column of labels as --label-column; got 'weight'.* {listed}"):
        read(two, label_column="weight")
    with pytest.raises(
        ValueError, match=r"expected a column of images as --image-column; got 'nam', which is none\. The"
    ):
        read(two, image_column="nam")
    labels = {name: [one.label for one in read(two, label_column=name)] for name in ("number", "name")}  # type: ignore[union-attr]
    assert labels == {"number": ["1", "2"], "name": ["a", "b"]}
    classes = two.cast_column("number", datasets.ClassLabel(names=["x", "y", "z"]))
    assert [one.label for one in read(classes)] == ["y", "z"], "the only column of classes"  # type: ignore[union-attr]


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(0))
    pictures = [
        {"bytes": png(0), "path": "a.png"},
        None,
        {"bytes": None, "path": str(secret)},
        {"bytes": None, "path": str(tmp_path)},
        {"bytes": b"x" * 20_000, "path": None},
        {"bytes": png(1), "path": None},
    ]
    data = rows(name=["a", "b", "c", "d", "e", None], picture=pictures)
    found = read(data)
    assert [one.name for one in found if isinstance(one, LabelledImage)] == ["train 0", "train 2"]
    reasons = [one.reason for one in found if isinstance(one, Unreadable)]
    assert reasons == [
        "it has no image", f"{tmp_path.name}: it is a folder", "it has 20,000 bytes", "its name is None"
    ]  # fmt: skip
    unlabelled = as_dataset(made(2), "class").map(lambda row: {"name": -1})
    assert [one.reason for one in read(unlabelled) if isinstance(one, Unreadable)] == ["its name is -1"] * 2


def test_a_folder_reads_no_file_outside(tmp_path: Path) -> None:
    """A saved dataset may name any path as an image's; only the bytes in it are read."""
    (tmp_path / "secret.png").write_bytes(png(0))
    pictures = [{"bytes": None, "path": str(tmp_path / "secret.png")}, {"bytes": png(1), "path": None}]
    raw = datasets.Dataset.from_dict({"picture": pictures, "name": ["a", "b"]})
    raw.save_to_disk(str(tmp_path / "saved"))
    info = tmp_path / "saved" / "dataset_info.json"
    struct = re.compile(r'"picture": \{.*?\n    \}(?=,\n    "name")', re.DOTALL)
    info.write_text(struct.sub('"picture": {"_type": "Image"}', info.read_text()))
    found = read(str(tmp_path / "saved"))
    assert found[0] == Unreadable("train 0", "its image is not in the dataset's own files")
    assert isinstance(found[1], LabelledImage)


def test_a_dataset_of_the_hub_reads_only_files_that_were_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset of the hub may name any path as an image's, also of a file that was not fetched with it."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for place in (tmp_path, kept):
        (place / "a.png").write_bytes(png(0))
    (kept / "link.png").symlink_to(tmp_path / "a.png")
    paths = [kept / "a.png", tmp_path / "a.png", kept / ".." / "a.png", kept / "link.png"]
    data = rows(name=["a"] * 4, picture=[{"bytes": None, "path": str(path)} for path in paths])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", kept)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    found = read("some/name")
    assert isinstance(found[0], LabelledImage)
    assert [one.reason for one in found[1:] if isinstance(one, Unreadable)] == [
        "its image is not in the dataset's own files"
    ] * 3


def test_each_split_names_its_classes_by_its_own_numbers() -> None:
    def part(*names: str) -> Any:
        return rows(name=[0, 1]).cast_column("name", datasets.ClassLabel(names=list(names)))

    def labels(**parts: Any) -> dict[str, list[str]]:
        source = HuggingFace(datasets.DatasetDict(parts), image_at_most=10_000)
        assert source.classes == ("cat", "dog")
        return {split: [one.label for one in source.read(split, 0)] for split in parts}  # type: ignore[arg-type,union-attr]

    assert labels(train=part("cat", "dog"), test=part("dog", "cat")) == {
        "train": ["cat", "dog"], "test": ["dog", "cat"]
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"expected the classes of train in every split; got cow in test\. Give"):
        labels(train=part("cat", "dog"), test=part("dog", "cow"))
    with pytest.raises(ValueError, match=r"got no names in name in validation\."):
        labels(train=part("cat", "dog"), validation=rows(name=[0, 1]))
    with pytest.raises(ValueError, match=r"got cat, dog in test\."):
        labels(train=rows(name=[0, 1]), test=part("cat", "dog"))


def test_splits_of_a_folder(tmp_path: Path) -> None:
    parts = {"train": as_dataset(made(20)), "valid": as_dataset(made(4)), "extra": as_dataset(made(2))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    task = find_data(f"hf:{tmp_path}/saved", **SIZES)
    assert (task.sizes["validation"], task.sizes["train"] + task.sizes["test"]) == (4, 20)
    alone = find_data(f"hf:{tmp_path}/saved:train", **SIZES)
    assert sum(alone.sizes.values()) == 20
    assert find_task("samples", alone.options).options == alone.options
    with pytest.raises(ValueError, match="expected a split among train, valid, extra; got 'no'"):
        find_data(f"hf:{tmp_path}/saved:no")
    with pytest.raises(ValueError, match=r"expected a split train; got valid, extra of Dataset.*Name the one to use"):
        from_hf(datasets.DatasetDict({name: parts[name] for name in ("valid", "extra")}))
    with pytest.raises(
        ValueError, match=r"Name a folder that save_to_disk has written; for images in folders leave out hf:"
    ):
        find_data(f"hf:{tmp_path}")


def hub_error(name: str) -> Exception:
    import huggingface_hub.errors as hub

    if name == "gated":
        response: Any = SimpleNamespace(headers={}, request=None, status_code=403)
        return hub.GatedRepoError("403 Client Error.\n\nAccess to dataset a/b is restricted.", response=response)
    return {
        "absent": datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub"),
        "private": datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."),
        "script": RuntimeError("Dataset scripts are no longer supported, but found b.py"),
        "config": ValueError("Config name is missing.\nPlease pick one among the available configs: ['c', 'd']"),
        "offline": hub.OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled."),
        "split": ValueError("Unknown split \"x\". Should be one of ['train', 'test']."),
    }[name]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("gated", "Ask for access on its page, then log in with: hf auth login."),
        ("absent", "Check the name; if it is private, log in with: hf auth login."),
        ("private", "Ask for access on its page, then log in with: hf auth login."),
        ("script", "relpos runs no code of a dataset: use a version of it in Parquet."),
        ("config", "Name a configuration: hf:NAME@CONFIG."),
        ("offline", "Check the network; or save it with save_to_disk on another machine, and name the folder."),
        ("split", "Check the name, the split and the network"),
    ],
)
def test_errors_of_the_hub_in_one_line(error: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((*names, *options.items()))
        raise hub_error(error)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="expected a dataset that can be read; got hf:a/b@c:x ") as caught:
        find_data("hf:a/b@c:x", streaming=True)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert asked == [("a/b", "c", ("split", "x"), ("streaming", True))], "and nothing about remote code"


def test_names_that_are_none() -> None:
    for name, line in {
        "hf:": "expected hf:NAME, hf:FOLDER or wds:SHARDS as data; got 'hf:'.",
        "hf:a b": "expected hf:NAME, hf:NAME@CONFIG or hf:FOLDER",
        "hf:./no/such": "expected a folder that save_to_disk has written; got ./no/such, which does not exist",
    }.items():
        with pytest.raises(ValueError, match=re.escape(line)):
            find_data(name)
    with pytest.raises(ValueError, match="expected a dataset of the library datasets, or its name; got"):
        from_hf(3)
    with pytest.raises(ValueError, match=r"expected a dataset that says what its columns hold \(features\)"):
        from_hf(datasets.IterableDataset.from_generator(lambda: iter([{"x": 1}])))


class TestDocuments:
    """Of a column of text; `Text` has the rest."""

    DOCUMENTS: ClassVar = [f"{number} " + "some words of a document. " * 20 for number in range(300)]

    def test_they_are_split_by_hash_of_each(self, tmp_path: Path) -> None:
        data = datasets.Dataset.from_dict({"body": [*self.DOCUMENTS, None, self.DOCUMENTS[0]], "n": list(range(302))})
        data.save_to_disk(str(tmp_path / "saved"))
        task = find_data(f"hf:{tmp_path}/saved", documents="packed")
        assert isinstance(task, Text)
        assert task.is_packed
        assert "301 documents of saved (column body; 1 rows without a text left out) as bytes" in notes(task)[0]
        for split, (least, most) in {"validation": (0, 0.05), "test": (0.05, 0.13), "train": (0.13, 1)}.items():
            where = [int(hashlib.sha256(one.encode()).hexdigest()[:16], 16) / 16**16 for one in self.DOCUMENTS]
            mine = [one for one, at in zip(self.DOCUMENTS, where, strict=True) if least <= at < most]
            size = sum(map(len, mine)) + len(self.DOCUMENTS[0]) * (self.DOCUMENTS[0] in mine)
            assert task.sizes_in_bytes[split] == size, split  # type: ignore[index]
        assert find_task("text", task.options).options == task.options
        with pytest.raises(ValueError, match=r"expected a text in every row; got none in row 300 of train"):
            find_data(f"hf:{tmp_path}/saved", bad_data="fail")

    def test_of_a_stream_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from relpos.data.sources import texts

        monkeypatch.setattr(texts, "STREAMED", 120_000)
        parts = {
            "train": datasets.Dataset.from_dict({"text": self.DOCUMENTS}).to_iterable_dataset(),
            "test": datasets.Dataset.from_dict({"text": self.DOCUMENTS[:20]}).to_iterable_dataset(),
            "validation": datasets.Dataset.from_dict({"text": ["x" * 3000]}).to_iterable_dataset(),
        }
        task = from_hf(datasets.IterableDatasetDict(parts), streaming=True, text_column="text")
        assert "the first 120,000 bytes" in task.description
        assert list(task.leakage) == [
            "Leakage: 19 of 19 test documents are identical to training documents, byte for byte, among the first 250."
        ]
        assert task.leakage[0] in task.description

    def test_options_of_images_do_not_fit(self) -> None:
        data = datasets.Dataset.from_dict({"text": self.DOCUMENTS})
        with pytest.raises(ValueError, match="expected images with image_size and rotate; got documents"):
            from_hf(data, image_size=32, rotate=True)
        with pytest.raises(ValueError, match="expected documents with tokenizer; got images"):
            from_hf(as_dataset(made(9)), tokenizer="bytes")


def test_shares_by_hash() -> None:
    marks = [number.to_bytes(8, "big") + bytes(8) for number in range(0, 2**64, 2**64 // 1000)]
    assert {split_of(one, ("test", "validation")) for one in marks[:199]} == {"test"}
    assert {split_of(one, ("test", "validation")) for one in marks[201:299]} == {"validation"}
    assert {split_of(one, ("validation",)) for one in marks[:99]} == {"validation"}
    assert {split_of(one, ("validation",)) for one in marks[101:]} == {"train"}
