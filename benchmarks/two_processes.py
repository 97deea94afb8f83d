"""The loss of `relpos train` by torchrun on two processes, beside that of one.

    python benchmarks/two_processes.py [--steps 400] [--out FILE.json] [--picture FILE.png]

They train the same model on digits, in float32, with the recipe's own AdamW. A third run shows what rounding alone
does: one process that adds each batch up from two parts (`--accumulate 2`). Curves are read from the checkpoint of the
last step but one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from relpos.report.drawing.canvas import drawing, to_png
from relpos.train.snapshots import SnapshotStore, read_snapshot

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "two-processes.json"
PICTURE = ROOT / "docs" / "two-processes.png"
POSITION = "relative_2d"


RUNS = {"1 process": (1, 1), "2 processes": (2, 1), "1 process, batches in two parts": (1, 2)}
"""Processes, and parts of a batch."""


def _curve(folder: Path, processes: int, accumulate: int, steps: int) -> dict[str, Any]:
    """The curve of a run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    train = ["-m", "relpos", "train", "--position", POSITION, "--batch-size", "32", "--device", "cpu"]
    given = ["--steps", str(steps + 1), "--checkpoint-every", str(steps), "--accumulate", str(accumulate)]
    command = [sys.executable, *(launcher if processes > 1 else []), *train, *given, "--out", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert json.loads((folder / "config.json").read_text())["processes"] == processes
    store = SnapshotStore(folder / "checkpoints")
    assert store.steps() == [steps], store.steps()
    curve: dict[str, Any] = read_snapshot(store.path(steps)).state["loop"]["curve"]
    return curve


def _apart(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)]


def _drawn(curves: dict[str, dict[str, Any]]) -> Figure:
    """The curves, and below them how far others are from the first; nothing where they are equal."""
    first, *others = curves
    dots = {"linestyle": "", "marker": "o"}
    rings = dots | {"color": "#444444", "markersize": 5.5, "markerfacecolor": "none", "markeredgewidth": 0.8}
    looks = ({"color": "#0072b2", "linewidth": 1.4}, dots | {"color": "#d55e00", "markersize": 2.5}, rings)
    styles = dict(zip(curves, looks, strict=True))
    with drawing(ink="#333333", size=9):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for name, curve in curves.items():
            above.plot(curve["step"], curve["loss"], label=name, **styles[name])
        above.set_ylabel("training loss")
        above.set_ylim(bottom=0)
        above.legend()
        for name in others:
            apart = [x or float("nan") for x in _apart(curves[first], curves[name])]
            below.semilogy(curves[name]["step"], apart, **styles[name])
        below.set_ylim(1e-8, 1)
        below.set_ylabel(f"difference from\n{first}")
        below.set_xlabel("step")
    return figure


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="the loss on two processes beside that on one")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: _curve(Path(folder) / name, *how, asked.steps) for name, how in RUNS.items()}
    first, *others = curves
    assert all(curve["step"] == curves[first]["step"] for curve in curves.values())
    apart = {name: max(_apart(curves[first], curves[name])) for name in others}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    found = {"versions": versions, "position": POSITION, "steps": asked.steps, "differences": apart, "curves": curves}
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    to_png(_drawn(curves), asked.picture, dots_per_inch=150)
    for name, most in apart.items():
        print(f"{name}: losses differ by at most {most:.1e}, validation {curves[name]['validation']}")


if __name__ == "__main__":
    main()
