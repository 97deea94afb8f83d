"""`relpos compare --data` on photographs of every kind, two of them broken: results, messages, and going on."""

import contextlib
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from schema import check, written

import relpos.train.evaluate as evaluate
from photographs import make_folder
from relpos.cli import main
from relpos.comparison import Comparison, ComparisonSettings, cost
from relpos.comparison.learned import PIXELS, attention_over_examples, learned
from relpos.comparison.run import metrics
from relpos.data import ImageFolder, ImageTask
from relpos.train import ImageRecipe, right
from relpos_command.requests import CompareRequest

FAST_SHARE = 5  # of its tests, in the fast part

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with a file of no image, one that is empty, and one cut short."""
    folder = make_folder(tmp_path_factory.mktemp("photographs") / "my photos", count=10)
    (folder / "cat" / "zero.png").write_bytes(b"")
    whole = (folder / "grass" / "08-camera.JPEG").read_bytes()
    (folder / "grass" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "grass" / "notes.txt").write_text("no image")
    return folder


def call(photographs: Path, out: Path, *more: str) -> list[str]:
    words = ["compare", "--data", str(photographs), "--positions", "none,relative_2d", "--steps", "3", "--quick"]
    return [*words, "--device", "cpu", "--out", str(out), *more]


SKIP = ("--bad-images", "skip", "--rotate", "--image-size", "32", "--patch", "4")


@pytest.fixture(scope="module")
def finished(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a comparison, and what the command printed."""
    out, printed = tmp_path_factory.mktemp("comparison") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(call(photographs, out, *SKIP))
    return out, " ".join(printed.getvalue().split())


@pytest.mark.slow
def test_results_say_what_was_compared(finished: tuple[Path, str], photographs: Path) -> None:
    results = written(finished[0])
    check(results)
    assert (finished[0] / "report.html").exists()
    options = results["settings"]["task_options"]
    assert results["settings"]["task"] == "images"
    assert options == {
        "images": str(photographs), "image_size": [32, 32], "patch": [4, 4], "bad_images": "skip", "rotate": True,
        "max_pixels": 100_000_000, "contents": options["contents"],
    }  # fmt: skip
    assert options["contents"].startswith("30 images, sha256 ")
    task = results["task"]
    assert (task["title"], task["classes"], task["channels"]) == ("Images in my photos", ["brick", "cat", "grass"], 3)
    assert task["sizes"] == {"train": 21, "validation": 3, "test": 6}
    assert [one["path"] for one in task["skipped"]] == ["cat/zero.png", "grass/cut.jpg"]
    assert task["ignored"] == ["grass/notes.txt"]
    assert [probe["id"] for probe in task["probes"]][-3:] == ["rotation/90", "rotation/180", "rotation/270"]
    assert results["settings"]["recipe"]["batch_size"] == 21
    for record in results["records"]:
        assert {one["probe"] for one in record["metrics"]} == {probe["id"] for probe in task["probes"]}
        assert len(set(record["attention"]["label"])) == 3


@pytest.mark.slow
def test_what_was_left_out_is_printed(finished: tuple[Path, str]) -> None:
    printed = finished[1]
    assert "Skipped 2 of 32 images: cat/zero.png (the file is empty), grass/cut.jpg (it is broken: " in printed
    assert "Ignored 1 file that is no image in a class's folder: grass/notes.txt" in printed
    assert "Batches of 21 instead of 64: there are 21 training images." in printed
    assert "30 images of 3 classes" in printed


def tiny(folder: Path, classes: int, size: tuple[int, int], patch: tuple[int, int]) -> ImageFolder:
    """Grey pictures of a few classes."""
    for number in range(classes):
        (folder / f"c{number}").mkdir(parents=True)
        for turn in range(5):
            path = folder / f"c{number}" / f"{turn}.png"
            Image.linear_gradient("L").rotate(40 * turn + 7 * number).save(path)
    return ImageFolder(folder, size, patch)


@pytest.mark.parametrize(("classes", "shown"), [(2, 2), (4, 3)])
def test_attention_over_few_classes(classes: int, shown: int, tmp_path: Path) -> None:
    task = tiny(tmp_path, classes, (16, 16), (2, 2))
    for path in (tmp_path / "c0").iterdir():
        Image.new("L", (9, 9), 5).save(path)  # of one colour: nothing to stretch to grey values
    found = attention_over_examples(replace(ImageRecipe(), depth=1).build(task, "none"), task)
    assert len(found.image) == len(set(found.label)) == shown
    assert all(math.isfinite(grey) for image in found.image for row in image for grey in row)


def test_pictures_of_large_images_are_shrunk_by_whole_patches(tmp_path: Path) -> None:
    task = tiny(tmp_path, 2, (240, 120), (10, 10))
    model = replace(ImageRecipe(), depth=1).build(task, "learned")
    found = attention_over_examples(model, task)
    assert (len(found.image[0]), len(found.image[0][0])) == (24 * 4, 12 * 4)
    assert found.grid == [24, 12]
    assert max(len(found.image[0]), len(found.image[0][0])) <= PIXELS
    assert [entry.kind for entry in learned(model)] == ["embedding"]
    wide = replace(ImageRecipe(), depth=1).build(tiny(tmp_path / "wide", 2, (80, 80), (2, 2)), "learned")
    assert learned(wide) == [], "1,600 places: two and a half million similarities"


def asked(task: ImageTask, seeds: int, *positions: str, quick: bool = False) -> ComparisonSettings:
    request = CompareRequest(positions=positions or ("none",), seeds=seeds, device="cpu", quick=quick)
    return ComparisonSettings.make(task, request)


@pytest.mark.parametrize(
    ("size", "patch", "sizes"),
    [
        ((64, 64), (8, 8), [((8, 8), 64, None), ((32, 32), 2, None), ((64, 64), 1, 1)]),
        ((112, 112), (8, 8), [((14, 14), 20, None), ((32, 32), 2, None), ((64, 64), 1, 1)]),
        ((64, 128), (8, 8), [((8, 16), 32, None), ((23, 45), 1, None), ((45, 91), 1, 1)]),
        ((56, 56), (2, 2), [((28, 28), 2, None), ((64, 64), 1, 1)]),
        ((112, 112), (2, 2), [((56, 56), 1, 1)]),
    ],
)
def test_sizes_are_timed_by_tokens(
    size: tuple[int, int], patch: tuple[int, int], sizes: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    task = tiny(tmp_path, 2, size, patch)
    assert [(one.grid, one.batch_size, one.depth) for one in cost.sizes(asked(task, 2), task)] == sizes
    assert len(cost.sizes(asked(task, 2, quick=True), task)) == 1


def test_one_seed_is_a_first_look(tmp_path: Path) -> None:
    """The largest size, and the memory of smaller ones, come from two seeds on."""
    task = tiny(tmp_path, 2, (64, 64), (8, 8))
    one, two, quick = asked(task, 1), asked(task, 2), asked(task, 1, quick=True)
    assert cost.sizes(one, task) == cost.sizes(two, task)[:2]
    assert cost.memory_sizes(one, task) == (1,)
    assert cost.memory_sizes(two, task) == (0, 1, 2)
    assert cost.memory_sizes(quick, task) == (0,)
    training, _ = Comparison(one, task, tmp_path / "out").tasks()
    assert [job.name for job in training] == ["none--recipe--seed0", "memory--none--1"]


def test_a_step_is_timed_on_a_grid_of_any_shape(tmp_path: Path) -> None:
    task = tiny(tmp_path, 2, (20, 30), (4, 5))
    entries = cost.time_steps(asked(task, 1, "none", "relative_2d", quick=True), task)
    assert [(one.position, one.tokens, one.batch_size) for one in entries] == [
        ("none", 30, 136), ("relative_2d", 30, 136),
    ]  # fmt: skip


def test_large_images_are_judged_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny(tmp_path, 3, (16, 16), (2, 2))
    model = replace(ImageRecipe(), depth=1).build(task, "relative_2d").eval()
    whole = metrics(model, task, task.probes, CPU)
    for probe in task.probes:
        if probe.image_size == task.image_size:
            images, labels = task.examples(probe, "test")
            with torch.no_grad():
                wanted = model(images.flatten(0, 1)).argmax(dim=-1).view(3, -1) == labels[:, None]
            assert torch.equal(right(model, task, probe, "test", CPU), wanted)
            assert torch.equal(right(model, task, probe, "test", CPU, trials=1), wanted[:, :1])
    seen: list[int] = []
    real = evaluate.predict

    def counted(model: Any, images: Any, device: Any, batch_size: int) -> Any:
        seen.append(len(images))
        assert len(images) <= max(batch_size, 8)
        return real(model, images, device, batch_size)

    monkeypatch.setattr(evaluate, "predict", counted)
    monkeypatch.setattr(evaluate, "_SCORES", 64**2)  # as if 64 tokens were very many
    assert metrics(model, task, task.probes, CPU) == whole
    assert max(seen) == 8, "one image in its eight placements"
