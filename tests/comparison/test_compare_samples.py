"""`relpos.compare` on a dataset of Hugging Face and on shards: the figures of the same samples in a folder."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import compare
from torch import nn

from relpos.data import from_hf
from relpos.report.command import command_line
from relpos.results import plain
from relpos.train import ImageRecipe
from sampled import as_dataset, as_folder, files_of, made, write_tar

SIZES: dict[str, Any] = {"image_size": 32, "patch": 4}
SAMPLES = made(60)


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def figures(result: Any) -> list[Any]:
    return [[plain(one) for one in record.metrics] for record in result.results.records]


@pytest.mark.slow
def test_figures_of_every_source_are_those_of_a_folder(tmp_path: Path) -> None:
    recipe = ImageRecipe(depth=1)

    def build(position: str, task: Any) -> nn.Module:  # a closure: all runs stay in this process
        return recipe.build(task, position)

    def run(name: str, data: Any, **options: Any) -> Any:
        asked = {"positions": ["relative_2d"], "quick": True, "batch_size": 8, **options}
        return compare(tmp_path / "out" / name, build, data, **asked)

    folder, _ = run("folder", as_folder(tmp_path / "images", SAMPLES), **SIZES)
    write_tar(tmp_path / "0.tar", files_of(SAMPLES[:33]))
    write_tar(tmp_path / "1.tar", files_of(SAMPLES[33:]))
    expected = figures(folder)
    assert expected
    shards = f"{tmp_path}/{{0,1}}.tar"
    streamed, lines = run("shards", f"wds:{shards}", streaming=True, **SIZES)
    assert figures(streamed) == expected
    assert "Training images are read while training" in lines[0]
    words = shlex.split(command_line(streamed.results).replace("\n", " "))
    assert f"wds:{shards}" in " ".join(words)
    result, _ = run("handed over", from_hf(as_dataset(SAMPLES), **SIZES))
    assert figures(result) == expected
    assert "relpos.data.from_hf(dataset)" in command_line(result.results)
