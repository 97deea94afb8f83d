"""A folder of images as a task: pixels, splits and placements, against files whose pixels are known; and refusals."""

import errno
import inspect
import itertools
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from photographs import CLASSES, KINDS, make_folder
from relpos.data import ImageFolder, Probe, find_task
from relpos.data.folder import Found, list_folder
from relpos.data.images import _contents

SIZE, PATCH, EDGE = 32, 4, 16
TRAINED = set(itertools.product(range(6, 10), repeat=2))
TESTED = {(6, 6), (6, 8), (8, 6), (8, 8)}


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of coloured noise, of exactly the size of a picture: nothing is scaled or cropped."""
    folder, random = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    for number in range(40):
        path = folder / f"class{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def task(noise: Path) -> ImageFolder:
    return ImageFolder(noise, (SIZE, SIZE), (PATCH, PATCH), rotate=True)


@pytest.fixture
def copy(noise: Path, tmp_path: Path) -> Path:
    """The same in a folder of a test's own."""
    return shutil.copytree(noise, tmp_path / "noise")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("photographs"))


def probe(task: ImageFolder, name: str) -> Probe:
    return next(one for one in task.probes if one.id == name)


def canvases(task: ImageFolder, images: Tensor) -> np.ndarray:
    """Standardised images as the pixels they were, the background as -1."""
    level = task.level
    pixels = images.double() * level.deviation.double() + level.mean.double()
    return torch.where(images == 0, -1.0, pixels.round()).numpy()


def corners(canvas: np.ndarray, picture: np.ndarray) -> tuple[int, int]:
    """Where a picture stands on a canvas that holds nothing else."""
    rows, columns = np.nonzero((canvas != -1).any(axis=0))
    row, column = int(rows.min()), int(columns.min())
    height, width = picture.shape[1:]
    assert np.array_equal(canvas[:, row : row + height, column : column + width], picture)
    assert (rows.max(), columns.max()) == (row + height - 1, column + width - 1), "and nothing around it"
    return row, column


def test_pictures_are_the_files_and_labels_their_folders(noise: Path, task: ImageFolder) -> None:
    files = {np.asarray(Image.open(path)).tobytes(): path.parent.name for path in noise.rglob("*.png")}
    met = []
    for split, count in {"train": 28, "validation": 4, "test": 8}.items():
        pictures, labels = task.pictures(split), task.labels(split)  # type: ignore[arg-type]
        assert len(pictures) == len(labels) == task.sizes[split] == count
        for picture, label in zip(pictures.numpy(), labels.tolist(), strict=True):
            met.append(np.ascontiguousarray(picture.transpose(1, 2, 0)).tobytes())
            assert task.classes[label] == files[met[-1]]
        assert torch.bincount(labels).tolist() == [count // 2, count // 2], "as many of each class"
    assert sorted(met) == sorted(files), "every file once"


def test_standardised_by_the_training_pictures_channel_by_channel(task: ImageFolder) -> None:
    pixels = task.pictures("train").double()
    for channel in range(3):
        assert task.level.mean[channel].item() == pytest.approx(pixels[:, channel].mean().item(), rel=1e-6)
        own = pixels[:, channel].std(correction=0).item()
        assert task.level.deviation[channel].item() == pytest.approx(own, rel=1e-6)


def test_batches_place_pictures_inside_one_patch_cell_and_in_all_of_it(task: ImageFolder) -> None:
    pictures = task.pictures("train").numpy()
    number = {picture.tobytes(): at for at, picture in enumerate(pictures)}
    met, order = set(), []
    for images, labels in itertools.islice(task.batches(7, 0), 24):
        for canvas, label in zip(canvases(task, images), labels.tolist(), strict=True):
            row, column = np.argwhere((canvas != -1).any(axis=0))[0]
            seen = canvas[:, row : row + EDGE, column : column + EDGE].astype(np.uint8)
            order.append(number[seen.tobytes()])
            met.add(corners(canvas, pictures[order[-1]]))
            assert task.labels("train")[order[-1]] == label
    assert met == TRAINED
    for epoch in range(6):
        assert sorted(order[28 * epoch : 28 * (epoch + 1)]) == list(range(28)), "an epoch shows every picture once"


EXPECTED: dict[str, set[tuple[int, int]]] = {
    "test": TESTED,
    **{f"shift/{shift}": set(itertools.product((6 - shift, 8, 9 + shift), repeat=2)) - {(8, 8)} for shift in (2, 4, 6)},
    "canvas/40/centred": {(12, 12)},
    "canvas/48/centred": {(16, 16)},
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_pictures_stand_where_the_probe_says(name: str, task: ImageFolder) -> None:
    one = probe(task, name)
    images, labels = task.examples(one, "test")
    assert images.shape == (8, one.trials, 3, *one.image_size)
    assert torch.equal(labels, task.labels("test"))
    for trials, picture in zip(images, task.pictures("test").numpy(), strict=True):
        found = [corners(canvas, picture) for canvas in canvases(task, trials)]
        assert sorted(found) == sorted(EXPECTED[name]), "each corner once"


@pytest.mark.parametrize("canvas", [40, 48])
def test_anywhere_is_anywhere(canvas: int, task: ImageFolder) -> None:
    one = probe(task, f"canvas/{canvas}/anywhere")
    drawn = task._corners(one, 4000, (EDGE, EDGE)).flatten(0, 1)
    assert set(drawn[:, 0].tolist()) == set(drawn[:, 1].tolist()) == set(range(canvas - EDGE + 1))
    images, _ = task.examples(one, "test")
    for trials, picture, where in zip(images, task.pictures("test").numpy(), drawn.view(-1, 2, 2), strict=False):
        assert [corners(image, picture) for image in canvases(task, trials)] == [
            tuple(corner) for corner in where.tolist()
        ]


@pytest.mark.parametrize(("canvas", "edge"), [(40, 20), (48, 24)])
def test_zoomed_grows_with_the_canvas(canvas: int, edge: int, task: ImageFolder) -> None:
    images, _ = task.examples(probe(task, f"canvas/{canvas}/zoomed"), "test")
    wanted = F.interpolate(task.pictures("test").float(), size=edge, mode="bilinear", align_corners=False)
    corner = (canvas - edge) // 2
    inside = images[:, 0, :, corner : corner + edge, corner : corner + edge]
    torch.testing.assert_close(inside, (wanted - task.level.mean) / task.level.deviation)
    rest = images[:, 0].clone()
    rest[:, :, corner : corner + edge, corner : corner + edge] = 0
    assert not rest.any()


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_turns_every_pixel(degrees: int, task: ImageFolder) -> None:
    images, _ = task.examples(probe(task, f"rotation/{degrees}"), "test")
    last = EDGE - 1
    for trials, picture in zip(images, task.pictures("test").numpy(), strict=True):
        turned = np.empty_like(picture)
        for row, column in itertools.product(range(EDGE), repeat=2):  # counter-clockwise: the right edge comes up
            source = {90: (column, last - row), 180: (last - row, last - column), 270: (last - column, row)}[degrees]
            turned[:, row, column] = picture[:, source[0], source[1]]
        assert {corners(canvas, turned) for canvas in canvases(task, trials)} == TESTED


def test_rotation_comes_where_asked(noise: Path, task: ImageFolder) -> None:
    plain = ImageFolder(noise, (SIZE, SIZE), (PATCH, PATCH))
    assert plain.probes == task.probes[:10]
    assert [(one.group, one.x) for one in task.probes[10:]] == [("rotation", x) for x in (90, 180, 270)]
    assert [one.group for one in plain.probes] == ["test"] + ["shift"] * 3 + ["canvas"] * 6


@pytest.mark.parametrize("name", ["test", "shift/4", "canvas/40/anywhere", "canvas/48/zoomed", "rotation/90"])
def test_a_part_of_the_examples_is_a_part_of_all(name: str, task: ImageFolder) -> None:
    one = probe(task, name)
    (images, labels), (few, few_labels) = task.examples(one, "test"), task.examples(one, "test", slice(3, 6))
    assert torch.equal(few, images[3:6])
    assert torch.equal(few_labels, labels[3:6])


@pytest.mark.parametrize(
    ("size", "patch", "grown", "shifts"),
    [
        ((64, 64), (8, 8), [(80, 80), (96, 96)], [4, 8, 12]),
        ((224, 224), (16, 16), [(288, 288), (336, 336)], [8, 16, 24]),
        ((40, 96), (8, 12), [(56, 120), (64, 144)], [4, 8, 12]),
        ((15, 15), (3, 3), [(21, 21), (24, 24)], [1, 3, 4]),
        ((8, 8), (1, 1), [(10, 10), (12, 12)], [1]),
    ],
)
def test_probes_at_other_sizes_stay_on_their_canvas(
    size: tuple[int, int], patch: tuple[int, int], grown: list[Any], shifts: list[int], noise: Path
) -> None:
    task = ImageFolder(noise, size, patch)
    assert [one.x for one in task.probes if one.group == "shift"] == shifts
    assert list(dict.fromkeys(one.image_size for one in task.probes if one.group == "canvas")) == grown
    for one in task.probes:
        images, _ = task.examples(one, "validation")
        assert images.shape == (4, one.trials, 3, *one.image_size)
        picture = task.picture_size
        if one.variant == "zoomed":
            picture = tuple(p * now // was for p, now, was in zip(picture, one.image_size, size, strict=True))
        drawn = task._corners(one, 50, picture).flatten(0, 1)
        assert (drawn >= 0).all()
        assert (drawn + torch.tensor(picture) <= torch.tensor(one.image_size)).all()
    assert next(task.batches(4, 0))[0].shape == (4, 3, *size)


def test_photographs_of_every_kind(photographs: Path) -> None:
    task = ImageFolder(photographs)
    assert task.classes == CLASSES
    assert (task.channels, task.image_size, task.patch_size) == (3, (64, 64), (8, 8))
    assert task.sizes == {"train": 27, "validation": 3, "test": 6}
    assert len(list(photographs.rglob("*.*"))) == 3 * len(KINDS) + 2 * 3
    assert (task.skipped, task.ignored) == ((), ())
    for words in ("36 images of 3 classes", photographs.name, "20% for test", "10% for validation", "64 x 64"):
        assert words in task.description
    for split in ("train", "validation", "test"):
        pixels = task.pictures(split)  # type: ignore[arg-type]
        assert pixels.shape[1:] == (3, 32, 32)
        assert (pixels.float().flatten(1).std(dim=1) > 5).all(), "a picture of something"


def test_grey_pictures_have_one_channel_however_they_are_stored(tmp_path: Path) -> None:
    for label, mode in (("a", "L"), ("b", "RGB"), ("c", "P")):
        (tmp_path / label).mkdir()
        for number in range(3):
            Image.linear_gradient("L").rotate(40 * number).convert(mode).save(tmp_path / label / f"{number}.png")
    assert next(ImageFolder(tmp_path).batches(3, 0))[0].shape == (3, 1, 64, 64)
    Image.new("RGB", (9, 9), (10, 20, 30)).save(tmp_path / "a" / "3.png")
    assert ImageFolder(tmp_path).channels == 3


def test_pictures_of_one_colour_are_fine(copy: Path) -> None:
    for path in copy.rglob("*.png"):
        Image.new("L", (9, 9), 77).save(path)
    assert not next(ImageFolder(copy).batches(2, 0))[0].any()


def test_options_make_the_task_again_and_notice_another_folder(photographs: Path, tmp_path: Path) -> None:
    task = ImageFolder(photographs, (48, 48), (4, 4), rotate=True)
    assert json.loads(json.dumps(task.options)) == task.options
    again = find_task("images", json.loads(json.dumps(task.options)))
    assert (again.options, again.probes, again.sizes) == (task.options, task.probes, task.sizes)
    assert torch.equal(again.examples(task.probes[0], "test")[0], task.examples(task.probes[0], "test")[0])
    copy = shutil.copytree(photographs, tmp_path / "copy")
    assert ImageFolder(copy, (48, 48), (4, 4)).options["contents"] == task.options["contents"], "not where, but what"
    shutil.copy(photographs / "cat" / "01-grey.png", copy / "grass" / "01-grey.png")
    with pytest.raises(ValueError, match=r"expected 36 images, sha256 \w+; got 36 images, sha256 \w+ in .*has changed"):
        find_task("images", {**task.options, "images": str(copy)})
    with pytest.raises(ValueError, match=r"expected options among images, .*; got \{'colour': 1\}"):
        find_task("images", {"colour": 1})
    with pytest.raises(ValueError, match="expected no options for the task digits; got images"):
        find_task("digits", {"images": "x"})


def test_contents_are_splits_paths_and_pixels() -> None:
    image, other = Found("a/1.png", "a", "train"), Found("b/1.png", "b", "train")
    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    usual = _contents({"train": [image], "test": []}, {image: black})
    assert usual.startswith("1 images, sha256 ")
    assert _contents({"train": [image], "test": []}, {image: black.copy()}) == usual
    assert _contents({"train": [image], "test": []}, {image: white}) != usual
    assert _contents({"train": [], "test": [image]}, {image: black}) != usual
    assert _contents({"train": [other], "test": []}, {other: black}) != usual


def test_a_task_travels_without_its_folder(noise: Path, copy: Path) -> None:
    packed = pickle.dumps(ImageFolder(copy, (SIZE, SIZE), (PATCH, PATCH)))
    shutil.rmtree(copy)
    again, here = pickle.loads(packed), ImageFolder(noise, (SIZE, SIZE), (PATCH, PATCH))
    for mine, other in zip(next(again.batches(8, 1)), next(here.batches(8, 1)), strict=True):
        assert torch.equal(mine, other)


def test_broken_images_are_named_or_skipped_where_asked(photographs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photographs, tmp_path / "DIR")
    (folder / "cat" / "zero.png").write_bytes(b"")
    whole = (folder / "grass" / "08-camera.JPEG").read_bytes()
    (folder / "grass" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    says = (
        r"images that can be read; got .*DIR/cat/zero\.png \(the file is empty\); .*DIR/grass/cut\.jpg \(it is broken: "
        r".*\. Repair or remove them, or leave them out with --bad-images skip\.$"
    )
    with pytest.raises(ValueError, match=says):
        ImageFolder(folder)
    task = ImageFolder(folder, bad_images="skip")
    assert [one["path"] for one in task.skipped] == ["cat/zero.png", "grass/cut.jpg"]
    assert task.skipped[0]["reason"] == "the file is empty"
    assert task.options["contents"] == ImageFolder(photographs).options["contents"], "nothing else changes"
    for number in range(9):
        (folder / "cat" / f"zero{number}.png").write_bytes(b"")
    with pytest.raises(ValueError, match="; and 8 more\\. Repair"):
        ImageFolder(folder)


def test_images_with_too_many_pixels_are_refused_or_skipped(noise: Path, copy: Path) -> None:
    Image.new("RGB", (60, 50), "red").save(copy / "class0" / "large.png")
    reason = "it has 3,000 pixels, more than 2,999; --max-pixels raises the limit"
    with pytest.raises(ValueError, match=re.escape(f"class0/large.png ({reason}). Repair or remove them")):
        ImageFolder(copy, max_pixels=2999)
    task = ImageFolder(copy, bad_images="skip", max_pixels=2999)
    assert task.skipped == ({"path": "class0/large.png", "reason": reason},)
    assert task.options["contents"] == ImageFolder(noise).options["contents"], "nothing else changes"
    assert task.options["max_pixels"] == 2999
    assert find_task("images", task.options).options == task.options
    assert not ImageFolder(copy, max_pixels=3000).skipped
    assert ImageFolder(noise).options["max_pixels"] == 100_000_000


def test_options_of_before_the_limit_make_the_task(noise: Path) -> None:
    options = ImageFolder(noise).options
    before = {name: value for name, value in options.items() if name != "max_pixels"}
    assert find_task("images", before).options == options


def test_a_folder_that_may_not_be_read_is_named(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def refuse(folder: Path) -> Any:
        if folder.name == "class1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)  # whoever runs the tests may be root, who reads everything
    with pytest.raises(ValueError, match=r"a folder that can be read; got .*class1 \(Permission denied\)\. "):
        ImageFolder(noise)


def test_names_that_are_no_text_can_be_written_all_the_same(copy: Path) -> None:
    (copy / "class0" / "a\udcff\n\x1b[31m.png").write_bytes(b"")
    (copy / "class0" / "b\udcff.txt").write_bytes(b"")
    task = ImageFolder(copy, bad_images="skip")
    assert task.skipped == ({"path": r"class0/a\udcff\n\x1b[31m.png", "reason": "the file is empty"},)
    assert task.ignored == (r"class0/b\udcff.txt",)
    with pytest.raises(ValueError, match=r"class0/a\\udcff\\n\\x1b\[31m\.png \(the file is empty\)"):
        ImageFolder(copy)


@pytest.mark.parametrize("which", ["class1", "."])
def test_a_class_and_a_folder_have_names_that_a_page_can_show(which: str, copy: Path) -> None:
    renamed = (copy / which).rename((copy / which).with_name("n\udcff") if which != "." else copy.parent / "n\udcff")
    with pytest.raises(ValueError, match=r"expected a folder with a name in UTF-8; got .*/n\\udcff\. Rename it\."):
        ImageFolder(copy if which != "." else renamed)


def test_folders_may_lie_deeper_than_calls(copy: Path) -> None:
    deep = copy / "class0"
    for _ in range(250):
        deep = deep / "d"
        deep.mkdir()
    shutil.copy(copy / "class0" / "00.png", deep / "x.png")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        found = [image.path for image in list_folder(copy, (".png",)).images]
    finally:
        sys.setrecursionlimit(before)
    assert deep.relative_to(copy).as_posix() + "/x.png" in found
    assert len(found) == 41


def test_a_class_that_was_all_broken_is_named(copy: Path) -> None:
    for path in (copy / "class1").iterdir():
        path.write_bytes(b"")
    says = "at least 3 readable images of 'class1' for train and test and validation; got 0"
    with pytest.raises(ValueError, match=says):
        ImageFolder(copy, bad_images="skip")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"image_size": (50, 50)},
            "an image size divisible by the patch size 8 x 8; got 50 x 50. Take 48 or 56 for 50.",
        ),
        (
            {"image_size": (64, 50)},
            "an image size divisible by the patch size 8 x 8; got 64 x 50. Take 48 or 56 for 50.",
        ),
        ({"image_size": (64, 64), "patch": (20, 20)}, "patch size 20 x 20; got 64 x 64. Take 100 for 64."),
        ({"image_size": (33, 33)}, "an image size divisible by the patch size 8 x 8; got 33 x 33. Take 40 for 33."),
        ({"image_size": (32, 32)}, "at least 5 patches per side, of which 4 are margin; got 32 x 32 with patches of"),
        ({"image_size": (0, 64)}, "expected image_size to be an integer of at least 1; got int 0"),
        ({"patch": (0, 8)}, "expected patch to be an integer of at least 1; got int 0"),
        ({"max_pixels": 0}, "expected max_pixels to be an integer of at least 1; got int 0"),
        ({"bad_images": "leave"}, "expected bad_images to be one of 'error', 'skip'; got str 'leave'"),
        ({"image_size": (64, 96), "rotate": True}, "expected square pictures to rotate; got an image size of 64 x 96"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ImageFolder("no such folder", **changes)
