"""The command that repeats a comparison, and its citation."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from relpos.results import Results, SettingsRecord
from relpos_command.visible import visible

YEAR = 2026
"""The year of this version of relpos."""
IMAGE_OPTIONS = ("image_size", "patch", "bad_images", "rotate", "max_pixels")
"""The `settings.task_options` that are options of the command; others, such as a fingerprint, only describe."""


_OPTION = {"batch_size": "--batch-size", "learning_rate": "--lr"}
"""Recipe fields with their own option."""


def command_line(results: Results) -> str:
    """The command that repeats this comparison; only the results' folder is left to the reader.

    If functions or datasets were passed in Python, it is the call of `relpos.compare` instead.
    """
    settings = results.settings
    own = {name: held for name in _FUNCTIONS if (held := as_given(settings, name)) is not None}
    if settings.task == "datasets" or not all(map(_is_typed, own.values())):
        return _call(settings, own)
    words = ["relpos", "compare", "--data", _data(settings), *_image_options(settings.task_options)]
    for name, held in own.items():
        words += [f"--{name}", held]
    if "evaluate" in own:
        words += ["--better", str(settings.better)]
    if settings.what != "position":
        words += ["--what", settings.what, "--choices", ",".join(settings.choices)]
    words += ["--positions", ",".join(settings.positions)]
    words += ["--seeds", str(settings.seeds), "--steps", str(settings.recipe.steps)]
    for name, value in settings.changes.items():
        words += [_OPTION[name], str(value)] if name in _OPTION else ["--set", f"recipe.{name}={_typed(value)}"]
    words += ["--quick"] if settings.quick else []
    words += ["--device", settings.device, "--precision", settings.precision, "--out", "DIR"]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quote a word for a shell; invisible characters become escapes, which bash and zsh read."""
    if visible(word) == word:
        return shlex.quote(word)
    return "$'" + visible(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


_BUILT_IN = ("digits", "text")
"""Names that `--data` does not read as paths."""
_FUNCTIONS = ("model", "step", "evaluate")
_TOLD_APART = re.compile(r"(, (timm|transformers) [^, ]+)?(, sha256 [0-9a-f]{12}(, .*)?)?", re.DOTALL)
"""The text after a function's name in its description: a library's version, a fingerprint, a random number."""


def as_given(settings: SettingsRecord, name: str) -> str | None:
    """The `model`, `step` or `evaluate` of a comparison as the user typed it; else its name; None if it has none.

    Results of older versions have only the name, without the file's folder.
    """
    held: str | None = getattr(settings, name)
    if held is None or name in settings.given:
        return settings.given.get(name)
    end = next(at for at in range(len(held) + 1) if _TOLD_APART.fullmatch(held, at))
    return held[:end]


def _is_typed(held: str) -> bool:
    """Whether the command accepts it: FILE.py:NAME, or a model's name."""
    return held == "swin" or ".py:" in held or held.startswith(("timm:", "hf:"))


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _call(settings: SettingsRecord, own: Mapping[str, str]) -> str:
    """The call in Python; the reader must define the functions and datasets that it names."""
    data = "(train, validation, test)" if settings.task == "datasets" else repr(_data(settings))
    given = {**{name: repr(held) if _is_typed(held) else held for name, held in own.items()}, "data": data}
    if "evaluate" in own:
        given["better"] = repr(settings.better)
    given |= {"positions": repr(settings.positions), "seeds": str(settings.seeds)}
    given |= {"steps": str(settings.recipe.steps)}
    if settings.changes:
        given["recipe"] = repr(settings.changes)
    given |= {
        name: repr(held) for name in IMAGE_OPTIONS if (held := settings.task_options.get(name)) not in (None, False)
    }
    given |= {"quick": "True"} if settings.quick else {}
    given |= {"device": repr(settings.device), "precision": repr(settings.precision), "out": "DIR"}
    return "\n".join(["relpos.compare(", *(f"    {name}={held}," for name, held in given.items()), ")"])


def _data(settings: SettingsRecord) -> str:
    """The value of `--data`: a folder, a file, or the name of data that come with the libraries."""
    own = settings.task_options
    data = own.get("images", own.get("text"))
    return settings.task if data is None else f"./{data}" if data in _BUILT_IN else str(data)


def _image_options(options: Mapping[str, Any]) -> list[str]:
    """`{"image_size": [64, 96], "rotate": True}` as `--image-size 64x96 --rotate`; others are left out."""
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
    """One line: the program, the comparison, and the machine."""
    settings, environment = results.settings, results.environment
    return (
        f"relpos {environment.relpos}, comparison of {', '.join(results.names)} on {results.task.title} "
        f"({settings.seeds} seed{'s' if settings.seeds != 1 else ''}, {settings.recipe.steps} steps"
        f"{', quick run' if settings.quick else ''}), PyTorch {environment.torch}, {environment.processor}."
    )


def bibtex(results: Results) -> str:
    """relpos's BibTeX entry."""
    return (
        "@software{relpos,\n"
        "  author  = {{relpos developers}},\n"
        "  title   = {{relpos}: position mechanisms for Transformers, compared},\n"
        f"  version = {{{results.environment.relpos}}},\n"
        f"  year    = {{{YEAR}}},\n"
        "}"
    )
