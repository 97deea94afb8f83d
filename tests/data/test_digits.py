"""The digits task, against scikit-learn's own images: what is in each split, and where a digit is placed.

How `CanvasTask` pastes pictures is proven in test_images.py. A digit's corner is found by matching: an image is
un-standardised (its background is 0, its brightest pixel 16), and every 8 x 8 window that holds all its ink is looked
up among the 1,797 originals.
"""

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from relpos.data import TASKS, Digits, find_task

TRAINED = {(row, column) for row in (4, 5) for column in (4, 5)}
SPLITS = ("train", "validation", "test")


@functools.cache
def task() -> Digits:
    return Digits()


@functools.cache
def originals() -> dict[bytes, int]:
    """Pixels of each original to its label."""
    data = load_digits()
    return {image.astype(np.uint8).tobytes(): int(label) for image, label in zip(data.images, data.target, strict=True)}


def corners(images: Tensor, labels: Tensor) -> list[set[tuple[int, int]]]:
    """Of each canvas where a digit of its label may stand on it: one corner, or more for one with empty edges."""
    low, high = images.min(), images.max()
    found = []
    for image, label in zip(((images - low) / (high - low) * 16).round().numpy(), labels.tolist(), strict=True):
        rows, columns = np.nonzero(image)
        windows = itertools.product(
            range(max(0, rows.max() - 7), rows.min() + 1), range(max(0, columns.max() - 7), columns.min() + 1)
        )
        digits = {(r, c): image[r : r + 8, c : c + 8].astype(np.uint8).tobytes() for r, c in windows}
        found.append({corner for corner, digit in digits.items() if originals().get(digit) == label})
    return found


def test_splits_are_the_whole_set_in_fair_shares() -> None:
    assert task().sizes == {"train": 1257, "validation": 180, "test": 360}
    data, together = load_digits(), []
    total = Counter(data.target.tolist())
    for split in SPLITS:
        digits, labels = task().pictures(split)[:, 0], task().labels(split)
        together += [(digit * 16).round().to(torch.uint8).numpy().tobytes() for digit in digits]
        assert [originals()[digit] for digit in together[-len(labels) :]] == labels.tolist()
        counts = Counter(labels.tolist())
        assert all(abs(counts[label] - whole * len(labels) / 1797) <= 1 for label, whole in total.items())
    assert Counter(together) == Counter(image.astype(np.uint8).tobytes() for image in data.images)


def test_the_split_and_the_probes_are_the_same_in_every_task_object() -> None:
    again = Digits()
    for split, probe in [("validation", task().probes[0]), *(("test", probe) for probe in task().probes)]:
        (images, labels), (same, own) = task().examples(probe, split), again.examples(probe, split)
        assert images.shape == (len(labels), probe.trials, 1, *probe.image_size)
        assert images.dtype == torch.float32
        assert torch.equal(images, same)
        assert torch.equal(labels, own)


def test_batches_repeat_by_seed_and_differ_by_seed() -> None:
    first, again, other = (list(itertools.islice(task().batches(64, seed), 3)) for seed in (1, 1, 2))
    for batch, same in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(batch, same, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0]), "batches of one run differ"


def test_training_places_digits_inside_one_patch_cell_and_in_all_of_it() -> None:
    images, labels = next(task().batches(256, 0))
    met: Counter[tuple[int, int]] = Counter()
    for here in corners(images[:, 0], labels):
        assert here & TRAINED, f"a digit at {here}"
        met.update(here & TRAINED)
    assert set(met) == TRAINED
    assert min(met.values()) > 256 / 4 / 2, "about as often in each of the four"


def test_inputs_are_standardised_by_the_training_canvases() -> None:
    images, _ = next(task().batches(1257, 0))
    assert images.mean().abs() < 1e-4
    assert (images.std() - 1).abs() < 1e-3
    for one in task().probes:
        lowest = task().examples(one, "test")[0].min()
        assert torch.allclose(lowest, images.min()), f"{one.id} has another background"


EXPECTED = {
    "test": TRAINED,
    "shift/3": {(row, column) for row in (1, 4, 8) for column in (1, 4, 8) if (row, column) != (4, 4)},
    "canvas/24/centred": {(8, 8)},
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_digits_stand_where_the_probe_says(name: str) -> None:
    (probe,) = (one for one in task().probes if one.id == name)
    images, labels = task().examples(probe, "test", slice(60))
    met = [corners(trial[:, 0], labels) for trial in images.unbind(1)]
    for trials in zip(*met, strict=True):
        assert all(here & EXPECTED[name] for here in trials)
        assert set.union(*trials) >= EXPECTED[name], "every corner is used"


def test_probes_begin_with_the_plain_test_at_the_trained_size() -> None:
    first, *rest = task().probes
    assert (first.id, first.image_size) == ("test", task().image_size)
    assert [one.id for one in rest] == [
        *(f"shift/{shift}" for shift in (1, 2, 3)),
        *(f"canvas/{size}/{where}" for size in (20, 24) for where in ("centred", "anywhere", "zoomed")),
    ]
    for one in rest:
        assert one.image_size == ((int(one.x), int(one.x)) if one.group == "canvas" else (16, 16))


def test_tasks_are_found_by_name() -> None:
    assert isinstance(find_task("digits"), Digits)
    assert set(TASKS) == {"digits", "images", "samples", "stream", "text"}
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        find_task("digit")


@pytest.mark.parametrize("size", [0, 1258])
def test_a_batch_larger_than_the_data_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="expected a batch size from 1 to 1257; got"):
        next(task().batches(size, seed=0))
