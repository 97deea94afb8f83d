"""What is found in a folder of images, which image is for what, and what a person is told where it does not fit."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from relpos.data.folder import Found, assign, list_folder

ENDINGS = (".png", ".jpg")


def put(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"")
    return folder


def found(folder: Path) -> list[tuple[str, str, str]]:
    return [(image.path, image.label, image.split) for image in list_folder(folder, ENDINGS).images]


def test_class_folders_at_any_depth_in_small_and_capital_letters(tmp_path: Path) -> None:
    put(tmp_path, "cat/a.png", "cat/day/one/b.JPG", "dog/c.jpg", "dog/d.PNG")
    listing = list_folder(tmp_path, ENDINGS)
    assert found(tmp_path) == [
        ("cat/a.png", "cat", "train"),
        ("cat/day/one/b.JPG", "cat", "train"),
        ("dog/c.jpg", "dog", "train"),
        ("dog/d.PNG", "dog", "train"),
    ]
    assert listing.classes == ("cat", "dog")
    assert set(listing.taken) == {"validation", "test"}
    assert listing.ignored == ()


def test_what_systems_leave_behind_is_passed_over_and_the_rest_is_named(tmp_path: Path) -> None:
    put(tmp_path, "cat/a.png", "dog/b.png", "cat/.DS_Store", "cat/._a.png", "dog/Thumbs.db", ".git/x/y.png")
    put(tmp_path, "__MACOSX/cat/c.png", "cat/notes.txt", "dog/raw/photo.heic", "licence.md", "cover.png")
    listing = list_folder(tmp_path, ENDINGS)
    assert [image.path for image in listing.images] == ["cat/a.png", "dog/b.png"]
    assert listing.ignored == ("cover.png", "licence.md", "cat/notes.txt", "dog/raw/photo.heic")


def test_a_class_may_be_a_link_and_links_inside_are_named(tmp_path: Path) -> None:
    put(tmp_path, "far/a.png", "here/dog/b.png")
    (tmp_path / "here" / "cat").symlink_to(tmp_path / "far")
    (tmp_path / "here" / "dog" / "round").symlink_to(tmp_path / "here")
    assert [path for path, *_ in found(tmp_path / "here")] == ["cat/a.png", "dog/b.png"]
    assert list_folder(tmp_path / "here", ENDINGS).ignored == ("dog/round",)


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "Val"])
def test_folders_that_are_splits(validation: str, tmp_path: Path) -> None:
    put(tmp_path, *(f"{split}/{label}/a.png" for split in ("train", validation, "test") for label in ("cat", "dog")))
    listing = list_folder(put(tmp_path, "readme.txt"), ENDINGS)
    assert Counter(image.split for image in listing.images) == {"train": 2, "validation": 2, "test": 2}
    assert (f"{validation}/dog/a.png", "dog", "validation") in found(tmp_path)
    assert listing.taken == ()
    assert listing.ignored == ("readme.txt",)


def test_a_split_without_a_folder_is_taken(tmp_path: Path) -> None:
    put(tmp_path, *(f"{split}/{label}/a.png" for split in ("train", "test") for label in ("cat", "dog")))
    assert list_folder(tmp_path, ENDINGS).taken == ("validation",)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put(tmp_path, "train/a.png", "ship/b.png")
    assert list_folder(tmp_path, ENDINGS).classes == ("ship", "train")


REFUSED: list[tuple[Sequence[str], str]] = [
    ((), r"expected images in .*DIR, in a folder for each class; got no folders in it\. Name"),
    (("a.png", "b.png"), r"expected a folder for each class; got images without one in .*DIR, such as a\.png\. Move"),
    (
        ("train/cat/a.png", "Train/cat/b.png"),
        r"expected folders whose names differ by more than capitals; got .*[Tt]rain and .*[Tt]rain\. Join them",
    ),
    (("cat/a.png",), r"expected at least two classes; got one, 'cat', in .*DIR\. Each class is a folder"),
    (("cat/a.png", "dog/.x"), r"expected images in .*DIR/dog, a class's folder; got none\. Add some or remove it"),
    (("cat/a.png", "dog/b.txt"), r"DIR/dog, a class's folder; got none but 1 other files, such as b\.txt\."),
    (("train/cat/a.png", "train/dog/b.png", "test/cat/c.png"), r"the class 'dog' in every split; got none for test in"),
    (("train/cat/a.png", "train/dog/b.png", "val/cat/c.png", "val/dog/d.png", "val/cow/e.png"),
     r"expected the classes of train in validation; got also 'cow' in .*DIR\. Add it to train, or remove it"),
    (("train/cat/a.png", "train/dog/b.png", "val/cat/c.png", "val/dog/.d"), r"DIR/val/dog, a class's folder; got none"),
    (("train/cat/a.png", "more/dog/b.png"), r"only the folders train, val and test; got .*DIR/more\. Move it"),
    (("train/cat/a.png", "val/cat/b.png", "valid/cat/c.png"), r"one folder for validation; got .*val and .*valid\."),
    (("val/cat/a.png", "test/cat/b.png"), r"expected a folder train with test, val; got none in .*DIR\. Add it"),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "says"), REFUSED, ids=[says[-25:] for _, says in REFUSED])
def test_what_is_missing_is_named(paths: Sequence[str], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "DIR"
    folder.mkdir()
    with pytest.raises(ValueError) as caught:
        list_folder(put(folder, *paths), ENDINGS)
    assert re.search(says, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder of images; got .*gone, which is not there\. Name"):
        list_folder(tmp_path / "gone", ENDINGS)
    (tmp_path / "cat.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a folder of images; got the file .*cat\.zip\. Name"):
        list_folder(tmp_path / "cat.zip", ENDINGS)


def images(label: str, count: int, split: str = "train") -> list[Found]:
    return [Found(f"{label}/{number:03}.png", label, split) for number in range(count)]  # type: ignore[arg-type]


def test_the_rule_by_hand() -> None:
    every = images("cat", 20) + images("dog", 7)
    splits = assign(every, ("cat", "dog"), ("test", "validation"))
    for label, test, validation in (("cat", 4, 2), ("dog", 1, 1)):
        paths = [image.path for image in every if image.label == label]
        ordered = sorted(paths, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
        mine = {split: {one.path for one in there if one.label == label} for split, there in splits.items()}
        assert mine["test"] == set(ordered[:test])
        assert mine["validation"] == set(ordered[test : test + validation])
        assert mine["train"] == set(ordered[test + validation :])


def test_the_split_depends_on_paths_alone() -> None:
    every = images("cat", 30) + images("dog", 30)
    assert assign(every, ("cat", "dog"), ("test", "validation")) == assign(
        every[::-1], ("cat", "dog"), ("test", "validation")
    )


def test_three_images_are_enough_and_two_are_not() -> None:
    splits = assign(images("cat", 3) + images("dog", 9), ("cat", "dog"), ("test", "validation"))
    assert all([image.label for image in there].count("cat") == 1 for there in splits.values())
    with pytest.raises(
        ValueError, match=r"at least 3 readable images of 'cat' for train and test and validation; got 2"
    ):
        assign(images("cat", 2) + images("dog", 9), ("cat", "dog"), ("test", "validation"))


def test_only_what_has_no_folder_is_taken_from_train() -> None:
    every = images("cat", 10) + images("cat", 4, "test")
    splits = assign(every, ("cat",), ("validation",))
    assert {split: len(there) for split, there in splits.items()} == {"train": 9, "validation": 1, "test": 4}
    assert all(image.split == "test" for image in splits["test"])


def test_a_split_whose_images_were_all_broken_is_named() -> None:
    with pytest.raises(ValueError, match=r"a readable image of 'dog' for test; got none\. Add images of it there"):
        assign(images("cat", 3) + images("dog", 3) + images("cat", 1, "test"), ("cat", "dog"), ("validation",))
