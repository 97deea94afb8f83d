"""The command that asks for a comparison, and how to cite it."""

import shlex
from collections.abc import Mapping
from typing import Any

from relpos.results import Results, SettingsRecord

YEAR = 2026
"""Of this version of relpos."""
IMAGE_OPTIONS = ("image_size", "patch", "bad_images", "rotate", "max_pixels")
"""What of `settings.task_options` the command takes; the rest, such as a fingerprint of the images, only describes."""


def command_line(results: Results) -> str:
    """The command that asks for this comparison; only the folder for the results is the reader's own."""
    settings = results.settings
    words = ["relpos", "compare", "--data", _data(settings), *_image_options(settings.task_options)]
    if settings.what != "position":
        words += ["--what", settings.what, "--choices", ",".join(settings.choices)]
    words += ["--positions", ",".join(settings.positions)]
    words += ["--seeds", str(settings.seeds), "--steps", str(settings.recipe.steps)]
    words += ["--quick"] if settings.quick else []
    words += ["--device", settings.device, "--precision", settings.precision, "--out", "DIR"]
    return shlex.join(words)


def _data(settings: SettingsRecord) -> str:
    """What `--data` takes: a folder, a file, or the name of data that come with the libraries."""
    own = settings.task_options
    return str(own.get("images", own.get("text", settings.task)))


def _image_options(options: Mapping[str, Any]) -> list[str]:
    """`{"image_size": [64, 96], "rotate": True}` as `--image-size 64x96 --rotate`; what has no option is left out."""
    words: list[str] = []
    for name in IMAGE_OPTIONS:
        value, flag = options.get(name), f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            sides = [str(side) for side in value]
            words += [flag, sides[0] if len(set(sides)) == 1 else "x".join(sides)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def citation(results: Results) -> str:
    """One line that says which program, which comparison, and where it ran."""
    settings, environment = results.settings, results.environment
    return (
        f"relpos {environment.relpos}, comparison of {', '.join(results.names)} on {results.task.title} "
        f"({settings.seeds} seed{'s' if settings.seeds != 1 else ''}, {settings.recipe.steps} steps"
        f"{', quick run' if settings.quick else ''}), PyTorch {environment.torch}, {environment.processor}."
    )


def bibtex(results: Results) -> str:
    """relpos as BibTeX has it."""
    return (
        "@software{relpos,\n"
        "  author  = {{relpos developers}},\n"
        "  title   = {{relpos}: position mechanisms for Transformers, compared},\n"
        f"  version = {{{results.environment.relpos}}},\n"
        f"  year    = {{{YEAR}}},\n"
        "}"
    )
