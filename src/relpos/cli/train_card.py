"""The model card of a training run: the model, how to load it, its data, its figures with intervals, its recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relpos_command.visible import visible

if TYPE_CHECKING:
    from relpos.data import Task
    from relpos.models.pretrained import PretrainedModel
    from relpos.train import Recipe

PICTURE = "position.png"


def card_of_run(
    model: PretrainedModel,
    folder: str,
    task: Task,
    position: str,
    recipe: Recipe,
    about: Mapping[str, Any],
    metric: Mapping[str, Any],
) -> tuple[str, dict[str, bytes]]:
    """The card as Markdown, and its files by name.

    Intervals and the picture need the libraries of `relpos[report]`; without them the card has only figures, and says
    so.

    Args:
        about: the run's data in its configuration: seed, versions, validation. metric: the result of `measured` on the
            test data.
    """
    from relpos.models.card import FRONT, usage
    from relpos.position import find
    from relpos.position.base.outside import files_in

    kind, preset = type(model).__name__, find(position)
    parameters = sum(x.numel() for x in model.parameters())
    drawn = _picture(model, position)
    sizes = ", ".join(f"{count:,} {split}" for split, count in task.sizes.items())
    unit = "bytes" if task.kind == "text" else "images"
    paragraphs = [
        f"{FRONT}\n# {folder}",
        f"A `relpos.{kind}` with {parameters:,} parameters, trained from scratch by `relpos train`.",
        usage(kind, folder),
        *(f"Before loading: `relpos.position.from_file({one.typed!r})`." for one in files_in((position,)).values()),
        f"## Position\n\n{preset.title} (`{position}`). {preset.summary} Source: {preset.source}.",
        *([f"![Its position after training]({PICTURE})"] if drawn else []),
        f"## Data\n\n{task.title}: {task.description} {unit.capitalize()}: {sizes}.",
        f"## Figures\n\n{_figures(task, about, metric)}",
        f"## Recipe\n\n{_table('field', recipe.to_json())}",
        f"## Run\n\n{_table('setting', {name: about[name] for name in about if not name.startswith('validation_')})}",
    ]
    return visible("\n\n".join(paragraphs) + "\n", keep="\n"), ({PICTURE: drawn} if drawn else {})


def _table(heading: str, rows: Mapping[str, Any]) -> str:
    return "\n".join([f"| {heading} | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _reporting() -> bool:
    return all(importlib.util.find_spec(name) for name in ("scipy", "matplotlib"))


def _figures(task: Task, about: Mapping[str, Any], metric: Mapping[str, Any]) -> str:
    """The figures on test data, with their interval, and on validation data."""
    share = task.measure == "accuracy"
    validation = about[f"validation_{task.measure}"]

    def figure(value: float | None) -> str:
        if value is None:
            return "not finite"
        return f"{value:.1%}" if share else f"{value:.3f} bits per byte"

    on_validation = f"Validation {task.measure.replace('_', ' ')}: {figure(validation)}."
    test = metric[task.measure]
    if test is None or not _reporting():
        why = "" if test is None else " The interval needs relpos[report]."
        return f"Test {task.measure.replace('_', ' ')}: {figure(test)}.{why} {on_validation}"
    import numpy as np

    from relpos.report.measure import ACCURACY, BITS

    measure = ACCURACY if share else BITS
    each = np.asarray(metric["correct"], dtype=np.float64) / metric["trials"] if share else np.asarray(metric["values"])
    interval = measure.interval({about["seed"]: each})
    return (
        f"Test {measure.name}: **{measure.figure(interval.mean)}**, 95% interval {measure.bounds(interval)} over "
        f"{interval.images:,} {measure.tested}. There is one seed, so the interval is about this model, not about its "
        f"position mechanism. {on_validation}"
    )


def _picture(model: Any, position: str) -> bytes | None:
    """The picture of its mechanisms as PNG; None if there are none, or no library to draw with."""
    from relpos.cli.show_verb import TRAINED_AT_MOST, strips_of

    if not _reporting() or model.coordinates.count > TRAINED_AT_MOST:
        return None
    from relpos.report.drawing.canvas import png_bytes
    from relpos.report.drawing.mechanism_picture import DOTS_PER_INCH, picture

    _, strips = strips_of(model.to("cpu"))
    if not strips:
        return None
    return png_bytes(picture(f"{position} after training", "", strips), dots_per_inch=DOTS_PER_INCH)
