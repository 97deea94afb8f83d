"""Photographs as a folder of classes, and the tables of what was compared on them inside timm's ViT.

    python recipes/turned_faces.py make photos/
    relpos compare --model timm:test_vit --data photos/ ... --out runs/photographs      whole in docs/results-timm.md
    python recipes/turned_faces.py page runs/photographs                                its tables, in that page

The photographs are the 100 faces of 25 x 25 pixels that come with scikit-image (a part of Labeled Faces in the Wild),
each turned by 0, 90, 180 and 270 degrees: the class is which way is up (Gidaris et al. 2018). Where eyes and mouth are
decides it. No face is in two splits: 50 are to train on, 10 for validation, 40 to test.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import kendalltau

from relpos.report.measure import Scored
from relpos.report.standings import Contender, outcomes
from relpos.report.statistics import Interval, mean_interval, paired_difference
from relpos.results import Results, load_results

DOCS = Path(__file__).parents[1] / "docs"
TURNS = ("upright", "left", "upside down", "right")
"""Quarter turns counter-clockwise."""
SPLITS = {"train": 50, "validation": 10, "test": 40}
PROBES = ("test", "shift/1", "shift/2", "shift/3")
ON_DIGITS = {"test": 2, "shift/3": 5}
"""The columns of docs/results-digits.md that have the same probes."""
APART = 3.0
"""Points between two mechanisms on digits from which their order there counts as one."""
DRAWS = 10_000


def make(folder: Path) -> None:
    """Write the folder; the same files every time."""
    faces = skimage.data.lfw_subset()[:100]  # those after them are no faces
    order = iter(np.random.default_rng(0).permutation(len(faces)))
    for split, count in SPLITS.items():
        for number in (next(order) for _ in range(count)):
            face = (faces[number] * 255).round().astype(np.uint8)
            for turns, name in enumerate(TURNS):
                file = folder / split / name / f"{number:03}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.ascontiguousarray(np.rot90(face, turns))).save(file)


def whole(results: Results) -> set[int]:
    """The seeds that every mechanism has finished."""
    return set.intersection(*({run.seed for run in results.runs(name)} for name in results.names))


def by_face(results: Results, name: str, probe: str) -> Scored:
    """Each seed's accuracy on each face, over its four turns: images of one face do not vary on their own.

    The seeds are those that every mechanism has finished.
    """
    (found,) = (one for one in results.task.probes if one.id == probe)
    scored = outcomes(results, Contender(name), found)
    return {
        seed: each.reshape(len(TURNS), SPLITS["test"]).mean(axis=0)
        for seed, each in scored.items()
        if seed in whole(results)
    }


def on_digits(names: Sequence[str], probe: str) -> dict[str, float]:
    """What the mechanisms reach on digits, in percent; timm's own position is `learned` there."""
    page, found = (DOCS / "results-digits.md").read_text(encoding="utf-8"), {}
    for name in names:
        (line,) = re.findall(rf"^\| `{re.escape('learned' if name == 'own' else name)}` \|.*$", page, re.MULTILINE)
        found[name] = float(line.split("|")[ON_DIGITS[probe] + 1].split()[0])
    return found


def tau(here: NDArray[np.float64], there: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kendall's tau-b of each row of `here` `[draws, names]` with `there` `[names]`."""
    return np.array([kendalltau(row, there).statistic for row in here])


def rank_correlation(results: Results, probe: str) -> tuple[float, float, float]:
    """Kendall's tau of the accuracies here and on digits, and its 95% interval over seeds and faces drawn anew."""
    names, random = results.names, np.random.default_rng(0)
    scored = [by_face(results, name, probe) for name in names]
    seeds = sorted(set.intersection(*map(set, scored)))
    here = np.stack([np.stack([one[seed] for seed in seeds]) for one in scored])
    there = np.asarray(list(on_digits(names, probe).values()))
    drawn = np.empty((DRAWS, len(names)))
    for number in range(DRAWS):
        some, faces = (random.integers(count, size=count) for count in here.shape[1:])
        drawn[number] = here[:, some][:, :, faces].mean(axis=(1, 2))
    low, high = np.quantile(tau(drawn, there), [0.025, 0.975])
    return float(tau(here.mean(axis=(1, 2))[None], there)[0]), float(low), float(high)


def percent(interval: Interval, *, of_all: bool = True) -> str:
    """A figure with its interval."""
    mean, low, high = (100.0 * x for x in (interval.mean, interval.low, interval.high))
    return f"{mean:.{1 if of_all else 0}f} ({low:.0f} to {high:.0f})"


def figures(results: Results) -> list[str]:
    """Accuracy of each mechanism, the best first, beside that on digits."""
    head = ["accuracy %", "position parameters", "test", "+1 px", "+2 px", "+3 px", "digits: test", "digits: +3 px"]
    lines = [
        f"{len(whole(results))} models of each mechanism:",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    digits = {probe: on_digits(results.names, probe) for probe in ON_DIGITS}
    reached = {name: [mean_interval(by_face(results, name, probe)) for probe in PROBES] for name in results.names}
    for name in sorted(reached, key=lambda one: -reached[one][0].mean):
        count = results.runs(name)[0].parameters.position
        cells = [f"`{name}`", f"{count:,}", *map(percent, reached[name])]
        lines.append(f"| {' | '.join([*cells, *(f'{digits[probe][name]:.1f}' for probe in ON_DIGITS)])} |")
    return lines


def pairs(results: Results) -> list[str]:
    """Which pairs that digits put into an order have it here too, beyond the interval of their difference."""
    lines = []
    for probe, words in (("test", "test images"), ("shift/3", "+3 pixels")):
        digits, found = on_digits(results.names, probe), {"the same": [], "the other way round": [], "undecided": []}
        for one, other in combinations(sorted(results.names, key=lambda name: -digits[name]), 2):
            if digits[one] - digits[other] < APART:
                continue
            ahead = paired_difference(by_face(results, one, probe), by_face(results, other, probe))
            verdict = "undecided" if ahead.covers_zero else "the same" if ahead.mean > 0 else "the other way round"
            found[verdict].append(f"`{one}` over `{other}` ({percent(ahead, of_all=False)})")
        middle, low, high = rank_correlation(results, probe)
        lines.append(
            f"**{words[0].upper()}{words[1:]}**: Kendall's tau {middle:.2f} ({low:.2f} to {high:.2f}). Of the pairs:"
        )
        lines += [
            "",
            *(f"- {verdict}, {len(some)}: {'; '.join(some) or 'none'}." for verdict, some in found.items()),
            "",
        ]
    return lines[:-1]


def page(run: Path) -> None:
    """Write the tables of docs/results-timm.md anew; the words around them are written by hand."""
    results, path = load_results(run), DOCS / "results-timm.md"
    text = path.read_text(encoding="utf-8")
    for name, made in (("figures", figures), ("pairs", pairs)):
        table = "\n".join([f"<!-- {name} -->", *made(results), "<!-- end -->"])
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, table=table: table, text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _, verb, folder = sys.argv
    {"make": make, "page": page}[verb](Path(folder))
