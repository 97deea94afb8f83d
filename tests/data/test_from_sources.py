"""Images of Hugging Face's datasets and of WebDataset's shards: the same as in a folder, in memory and as streams."""

import itertools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from relpos.data import ImageFolder, ImageTask, find_data, find_task, from_hf, from_wds, notes
from relpos.data.sources.source import SampleSource
from relpos.data.survey import Survey
from sampled import Made, as_dataset, as_folder, files_of, made, png, split_by_hash, write_tar

SIZES: dict[str, Any] = {"image_size": 32, "patch": 4}
SAMPLES = made(40)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `images`, two shards, and a dataset on disk, of the same samples in the same order."""
    folder = tmp_path_factory.mktemp("samples")
    as_folder(folder / "images", SAMPLES)
    write_tar(folder / "0.tar", files_of(SAMPLES[:25]))
    write_tar(folder / "1.tar", files_of(SAMPLES[25:]))
    as_dataset(SAMPLES, "class").save_to_disk(str(folder / "saved"))
    return folder


@pytest.fixture(scope="module")
def images(place: Path) -> ImageFolder:
    return ImageFolder(place / "images", (32, 32), (4, 4))


def shards(place: Path, **options: Any) -> Any:
    return find_data(f"wds:{place}/{{0..1}}.tar", **(SIZES | options))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def batches(task: Any, count: int, size: int = 5, seed: int = 3, start: int = 0) -> list[Any]:
    return list(itertools.islice(task.batches(size, seed, start=start), count))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("source", ["wds", "saved", "handed over", "an iterable"])
def test_the_same_samples_as_in_a_folder_bit_for_bit(
    source: str, streaming: bool, place: Path, images: ImageFolder
) -> None:
    if source == "wds":
        task = shards(place, streaming=streaming)
    elif source == "saved":
        task = find_data(f"hf:{place / 'saved'}", streaming=streaming, **SIZES)
    else:
        data = as_dataset(SAMPLES)
        task = from_hf(
            data if source == "handed over" else data.to_iterable_dataset(num_shards=3), streaming=streaming, **SIZES
        )
    assert task.sizes == images.sizes
    assert (task.classes, task.channels) == (images.classes, images.channels)
    for one, other in zip(batches(task, 14), batches(images, 14), strict=True):
        assert same(one, other)
    for probe, (split, chosen) in itertools.product(
        images.probes, [("validation", slice(None)), ("test", slice(2, 9))]
    ):
        assert same(task.examples(probe, split, chosen), images.examples(probe, split, chosen))


def test_a_task_is_sent_and_made_again(place: Path) -> None:
    for streaming in (False, True):
        task = shards(place, streaming=streaming)
        for made_again in (pickle.loads(pickle.dumps(task)), find_task(task.name, task.options)):
            assert same(batches(made_again, 1)[0], batches(task, 1)[0])
            assert made_again.options == task.options
    write_tar(place / "0.tar", files_of(SAMPLES[:24]))
    with pytest.raises(ValueError, match="The data have changed"):
        find_task(task.name, task.options)
    write_tar(place / "0.tar", files_of(SAMPLES[:25]))
    with pytest.raises(ValueError, match="handed over again"):
        find_task("samples", from_hf(as_dataset(SAMPLES), **SIZES).options)


def test_no_sample_moves_when_others_are_added(tmp_path: Path) -> None:
    def placed(count: int) -> dict[bytes, str]:
        task = from_wds(str(write_tar(tmp_path / "a.tar", files_of(made(count)))), **SIZES)
        assert isinstance(task, ImageTask)
        splits = ("train", "validation", "test")
        return {x.numpy().tobytes(): split for split in splits for x in task.pictures(split)}  # type: ignore[attr-defined]

    few, many = placed(40), placed(60)
    assert {picture: many[picture] for picture in few} == few


def test_splits_by_the_names_of_shards_and_leakage_between_them(tmp_path: Path) -> None:
    parts = {
        "train": SAMPLES,
        "val": [Made("x", png(100), "a"), SAMPLES[0]],
        "test": [SAMPLES[1], SAMPLES[1], SAMPLES[0]],
    }
    for name, samples in parts.items():
        files = [(f"{number}{path}", data) for number, one in enumerate(samples) for path, data in files_of([one])]
        write_tar(tmp_path / f"{name}-0.tar", files)
    for streaming in (False, True):
        task = from_wds(f"{tmp_path}/{{train,val,test}}-0.tar", streaming=streaming, **SIZES)
        assert task.sizes == {"train": 40, "validation": 2, "test": 3}
        assert list(task.leakage) == [
            "Leakage: 1 of 2 validation images are identical to training images, byte for byte.",
            "Leakage: 3 of 3 test images are identical to training images, byte for byte.",
            "Leakage: 1 of 3 test images are identical to validation images, byte for byte.",
        ]
        assert all(line in notes(task)[0] for line in task.leakage)


def test_leakage_in_a_stream_says_among_how_many(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        write_tar(tmp_path / f"{name}.tar", files_of(SAMPLES))
    task = from_wds(f"{tmp_path}/{{train,val,test}}.tar", streaming=True, survey=30, **SIZES)
    count = sum(task.sizes.values())
    assert count < 120
    assert task.leakage
    assert all(line.endswith(f"byte for byte, among the first {count}.") for line in task.leakage)  # type: ignore[attr-defined]


def test_samples_that_are_not_named_are_counted() -> None:
    task = Mock(
        spec=ImageTask, ignored=(), left_out=1440, sizes={"train": 60}, options={"source": "x"}, description="x"
    )
    task.name = "samples"
    task.skipped = [{"path": str(number), "reason": "broken"} for number in range(1000)]
    assert notes(task)[1].startswith("Skipped 1440 of 1500 images: 0 (broken), ")
    assert notes(task)[1].endswith(", and 1435 more")


class TestStreams:
    """Order and interruptions. 28 training samples in blocks of 8."""

    @pytest.fixture
    def stream(self, place: Path) -> Any:
        return shards(place, streaming=True, buffer=8)

    def test_every_epoch_has_every_sample_once_in_another_order(self, stream: Any, images: ImageFolder) -> None:
        whole = images.sizes["train"]
        known = sorted(x.numpy().tobytes() for x in images.pictures("train"))
        seen = []
        for pixels, _ in batches(stream, 2 * whole, size=1):
            row, column = (int(x.min()) for x in (pixels[0, 0] != 0).nonzero(as_tuple=True))
            picture = pixels[0, :, row : row + 16, column : column + 16]
            seen.append((picture * stream.level.deviation + stream.level.mean).round().byte().numpy().tobytes())
        assert sorted(seen[:whole]) == sorted(seen[whole:]) == known
        assert seen[:whole] != seen[whole:]
        assert not same(batches(stream, 1, seed=1)[0], batches(stream, 1, seed=2)[0])

    def test_it_goes_on_where_it_stopped_without_decoding_what_went_before(
        self, stream: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = batches(stream, 40, size=3)
        decoded: list[int] = []
        reading = type(stream._reading)
        honest = reading.decoded
        monkeypatch.setattr(reading, "decoded", lambda self, some: (decoded.append(len(some)), honest(self, some))[1])
        for start in range(0, 40, 7):
            decoded.clear()
            assert all(map(same, batches(stream, 3, size=3, start=start), whole[start : start + 3]))
            assert sum(decoded) <= 18, "at most the three blocks of six that three batches come from"

    def test_broken_images_of_the_survey_are_left_out_as_in_memory(self, tmp_path: Path) -> None:
        broken = next(text for text in (b"no image %d" % n for n in range(99)) if split_by_hash(text) == "train")
        large = next(x for x in (png(n, (50, 50)) for n in range(99)) if split_by_hash(x) == "train")
        odd = [Made("x", broken, "a"), Made("y", large, "a")]
        path = write_tar(tmp_path / "a.tar", files_of([*SAMPLES[:20], *odd, *SAMPLES[20:]]))
        held, stream = (
            from_wds(str(path), streaming=streaming, max_pixels=1000, **SIZES) for streaming in (False, True)
        )
        assert all(map(same, batches(stream, 9), batches(held, 9)))
        reasons = ["Pillow finds no image in it", "it has 2,500 pixels, more than 1,000; --max-pixels raises the limit"]
        assert notes(stream)[1] == f"Skipped 2 of 42 images: a.tar/x ({reasons[0]}), a.tar/y ({reasons[1]})"

    def test_samples_that_the_survey_has_not_met(self, tmp_path: Path) -> None:
        samples = made(60)
        odd = next(text for text in (b"no image %d" % n for n in range(99)) if split_by_hash(text) == "train")
        last = next(n for n in range(59, 50, -1) if split_by_hash(samples[n].image) == "train")
        files = list(files_of(samples))
        files[2 * 51] = (files[2 * 51][0], odd)
        path = write_tar(tmp_path / "a.tar", files)
        task = from_wds(str(path), streaming=True, survey=50, **SIZES)
        assert "training goes on to the others; leakage is counted among these" in task.description
        with pytest.warns(
            RuntimeWarning, match=r"training left out 1 sample a.tar/051 \(Pillow finds no image in it\)"
        ):
            found = batches(task, 8)
        resumed = from_wds(str(path), streaming=True, survey=50, **SIZES)
        with pytest.warns(RuntimeWarning):
            assert all(map(same, batches(resumed, 3, start=5), found[5:]))
        failing = from_wds(str(path), streaming=True, survey=50, bad_data="fail", **SIZES)
        with pytest.raises(ValueError, match="051"):
            batches(failing, 1)
        files[2 * last + 1] = (files[2 * last + 1][0], b"c")
        other = from_wds(str(write_tar(path, files)), streaming=True, survey=50, **SIZES)
        line = rf"expected one of the 2 classes of the survey; got 'c' of a.tar/0{last}"
        with pytest.raises(ValueError, match=line):
            batches(other, 1)

    def test_what_training_leaves_out_is_counted_in_one_line(self, tmp_path: Path) -> None:
        files = list(files_of(made(60)))
        del files[2 * 55], files[2 * 51]  # two images beyond the survey,
        del files[3]  # and a label that the survey misses
        task = from_wds(str(write_tar(tmp_path / "a.tar", files)), streaming=True, survey=50, **SIZES)
        with pytest.warns(RuntimeWarning) as said:
            found = [batches(task, count, start=start) for count, start in ((20, 0), (3, 18))]  # two epochs and more
        assert all(map(same, found[0][18:], found[1]))
        line, again = (str(one.message) for one in said)
        assert line == again == "training left out 2 samples, such as a.tar/051 (it lacks png)"

    def test_a_shard_that_goes_ends_a_run(self, tmp_path: Path) -> None:
        for name in "12":
            write_tar(tmp_path / f"{name}.tar", files_of(made(30)))
        task = from_wds(f"{tmp_path}/{{1..2}}.tar", streaming=True, **SIZES)
        (tmp_path / "2.tar").unlink()
        with pytest.raises(ValueError, match=r"expected the shards that were there before training; got 2.tar \("):
            batches(task, 1)

    def test_too_few_for_a_batch(self, stream: Any) -> None:
        with pytest.raises(ValueError, match="expected a batch size from 1 to"):
            batches(stream, 1, size=100)


def test_equal_numbers_as_classes_have_one_order() -> None:
    """Whatever the seed of Python's hashes is."""
    found = Survey(("test", "validation"), False)
    names = ["0" * zeros + "1" for zeros in range(8)]
    found.labels["train"] = [*names, "2"]
    assert found.classes(Mock(spec=SampleSource, classes=None)) == (*reversed(names), "2")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"image_size": [32]}, "expected image_size as one number, or rows and columns; got list [32]."),
        ({"patch": (4, 4, 4)}, "expected patch as one number, or rows and columns; got tuple (4, 4, 4)."),
        ({"buffer": 5}, "expected buffer with streaming; got buffer=5 alone."),
        ({"text_column": "x"}, "expected text_column with data of hf:"),
        ({"cache_size": "5GB"}, "expected cache_size with cache"),
        ({"bad_images": "skip"}, "expected bad_data for samples; got bad_images."),
        ({"bad_data": "no"}, "bad_data"),
        ({"cache": "c", "cache_size": "5 apples"}, "expected a size such as 20GB or 500MB"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], line: str, place: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        shards(place, **options)
    assert "\n" not in str(caught.value)


def test_options_of_samples_need_samples(place: Path) -> None:
    with pytest.raises(ValueError, match="expected data of hf: or wds: with bad_data, streaming; got"):
        find_data(place / "images", streaming=True, bad_data="fail")


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
