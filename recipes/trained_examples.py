"""Train the examples that come with the package, one for each mechanism that learns: what `relpos show` draws.

    python recipes/trained_examples.py [NAME ...]

Writes src/relpos/report/drawing/examples.safetensors, whole, or with the named ones made anew. The recipes are the
command's, with smaller models and inputs (`relpos.report.drawing.trained_examples` says which), on one thread, so that
the same machine and versions make the same file. About a quarter of an hour on one core.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from relpos.data import find_task
from relpos.position import Mechanism, presets
from relpos.position.base.wrapped import parts_of
from relpos.report.drawing.trained_examples import FILE, HEAD_DIM, HEADS, SEED, SITES, start
from relpos.train import Procedure, Recipe, TrainingRun, fit

OUT = Path(__file__).parent.parent / "src" / "relpos" / "report" / "drawing" / FILE
SIZES: dict[int, dict[str, Any]] = {
    1: {"steps": 300, "warmup_steps": 30, "batch_size": 8, "depth": 2},
    2: {"steps": 300, "warmup_steps": 30, "batch_size": 64, "depth": 2},
}


def examples() -> list[tuple[str, int]]:
    """Names and axes of the mechanisms that learn."""
    every = [(name, axes) for axes in SITES for name, preset in presets().items() if axes in preset.token_axes]
    return [(name, axes) for name, axes in every if any(True for _ in start(name, axes).parameters())]


def of_first_layer(model: Any) -> list[Mechanism]:
    """Its mechanisms: those of the model, and those that stand in the layer because they are made from its states."""
    own = model.blocks[0].attn.position
    return [*parts_of(model.positions.sums()[0]), *([] if own is None else parts_of(own))]


def example(name: str, axes: int) -> dict[str, torch.Tensor]:
    """The parameters of one, trained."""
    task = find_task("digits" if axes == 2 else "text")
    if axes == 1:
        task.length = length = SITES[1].queries.count  # type: ignore[attr-defined]
        vars(task)["probes"] = (replace(task.probes[0], length=length),)  # validation in such pieces
    changes = {**SIZES[axes], "embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS}
    recipe = replace(Recipe.of(task), **changes, position_init_std=SITES[axes].init_std)
    mechanism = start(name, axes)

    def build(position: str, task: Any) -> nn.Module:
        model = recipe.build(task, position)
        for own, began in zip(of_first_layer(model), parts_of(mechanism), strict=True):
            own.load_state_dict(began.state_dict())
        return model

    model, curve = fit(TrainingRun(task, name, recipe, SEED, torch.device("cpu"), Procedure(build)))
    for own, began in zip(of_first_layer(model), parts_of(mechanism), strict=True):
        began.load_state_dict(own.state_dict())
    print(f"{axes}/{name}: {task.measure} {curve.validation[-1]:.3f}", flush=True)
    return {f"{axes}/{name}/{key}": x.half().contiguous() for key, x in mechanism.state_dict().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = [one for one in examples() if len(sys.argv) == 1 or one[0] in sys.argv[1:]]
    tensors = load_file(OUT) if OUT.exists() and len(sys.argv) > 1 else {}
    for name, axes in wanted:
        tensors |= example(name, axes)
        save_file(dict(sorted(tensors.items())), OUT)
    print(f"{OUT.stat().st_size:,} bytes, {len(tensors)} tensors")
