"""The command that repeats a comparison, and its citation."""

import re
import shlex
from typing import Any

from relpos.results import Results, SettingsRecord
from relpos_command.option import asked, options_of, written
from relpos_command.option_groups import DataOptions
from relpos_command.requests import CompareRequest
from relpos_command.visible import visible

YEAR = 2026
"""The year of this version of relpos."""


def command_line(results: Results, request: CompareRequest | None = None) -> str:
    """The command that repeats this comparison; only the results' folder is left to the reader.

    If functions or datasets were passed in Python, it is the call of `relpos.compare` instead.

    Args:
        request: another one on the same data and functions; its results go into a folder of their own.
    """
    settings = results.settings
    repeated = request is None
    request = requested(settings) if request is None else request
    functions = [getattr(request, name) for name in _FUNCTIONS]
    own = [*functions, request.tokenizer]
    if _handed_over(settings) or not all(isinstance(one, str | None) for one in own):
        return _call(request, repeated=repeated)
    folder = ["--out", "DIR"] if repeated else []
    return " ".join(map(_quoted, ["relpos", "compare", *written(request, _ORDER), *folder]))


def requested(settings: SettingsRecord) -> CompareRequest:
    """The request that repeats a comparison. A function that only Python can hand over is a `_Name`."""
    named = {name: as_given(settings, name) for name in _FUNCTIONS}
    functions: dict[str, Any] = {
        name: text if text is None or _is_typed(text) else _Name(text) for name, text in named.items()
    }
    changes = dict(settings.changes)
    name_of_data = _handed_over(settings)
    read = {} if name_of_data else settings.task_options  # data of Python are read before they are handed over
    options: dict[str, Any] = {name: read.get(name) for name in options_of(DataOptions) if name != "data"}
    return CompareRequest(
        **{
            **options,
            "rotate": bool(options["rotate"]),
            "streaming": bool(options["streaming"]),
            "tokenizer": None if name_of_data else tokenizer_of(settings),
        },
        **functions,
        data=_data(settings) if name_of_data is None else _Name(name_of_data),
        better=settings.better if named["evaluate"] is not None else None,
        what=settings.what,
        choices=tuple(settings.choices) if settings.what != "position" else None,
        positions=tuple(typed_position(settings, name) for name in settings.positions),
        seeds=settings.seeds,
        devices_per_trial=settings.devices_per_trial,
        steps=settings.recipe.steps,
        batch_size=changes.pop("batch_size", None),
        lr=changes.pop("learning_rate", None),
        recipe=changes or None,
        quick=settings.quick,
        device=settings.device,
        precision=settings.precision,
    )


def tokenizer_of(settings: SettingsRecord) -> Any:
    """The tokenizer's name; a `_Name` if it is an object of Python; None for bytes."""
    named = settings.task_options.get("tokenizer")
    return named if named is None or str(named).startswith(("hf:", "tiktoken:")) else _Name("tokenizer")


_FIRST = (
    "data", "image_column", "label_column", "text_column", "streaming", "buffer", "survey", "bad_data", "tokenizer",
    "documents", "image_size", "patch", "bad_images", "rotate", "max_pixels", "model", "step", "evaluate", "better",
    "what", "choices", "positions", "seeds", "steps", "recipe", "batch_size", "lr",
)  # fmt: skip
_ORDER = [*_FIRST, *(name for name in options_of(CompareRequest) if name not in (*_FIRST, "out"))]
"""The order of the options in the command."""


class _Name:
    """An expression of Python, which `repr` gives as it is."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __repr__(self) -> str:
        return self.code


def _quoted(word: str) -> str:
    """Quote a word for a shell; invisible characters become escapes, which bash and zsh read."""
    if visible(word) == word:
        return shlex.quote(word)
    return "$'" + visible(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


_BUILT_IN = ("digits", "text")
"""Names that `--data` does not read as paths."""
_FUNCTIONS = ("model", "step", "evaluate")
_FINGERPRINT = re.compile(r"(, (timm|transformers) [^, ]+)?(, sha256 [0-9a-f]{12}(, .*)?)?", re.DOTALL)
"""The text after a function's name in its description: a library's version, a fingerprint, a random number."""


def as_given(settings: SettingsRecord, name: str) -> str | None:
    """The `model`, `step` or `evaluate` of a comparison as the user typed it; else its name; None if it has none.

    Results of older versions have only the name, without the file's folder.
    """
    text: str | None = getattr(settings, name)
    if text is None or name in settings.given:
        return settings.given.get(name)
    end = next(at for at in range(len(text) + 1) if _FINGERPRINT.fullmatch(text, at))
    return text[:end]


def typed_position(settings: SettingsRecord, name: str) -> str:
    """A position, sum or schedule with its mechanisms of files as the user typed them."""
    return "".join(settings.given.get(part, part) for part in re.split("([+~])", name))


def _is_typed(text: str) -> bool:
    """Whether the command accepts it: FILE.py:NAME, or a model's name."""
    return text == "swin" or ".py:" in text or text.startswith(("timm:", "torchvision:", "hf:"))


def _call(request: CompareRequest, *, repeated: bool) -> str:
    """The call in Python; the reader must define the functions and datasets that it names."""
    arguments = [f"    {name}={getattr(request, name)!r}," for name in asked(request, _ORDER)]
    return "\n".join(["relpos.compare(", *arguments, *(["    out=DIR,"] if repeated else []), ")"])


def _handed_over(settings: SettingsRecord) -> str | None:
    """An expression for data that only Python can hand over; None for those that the command takes."""
    if settings.task == "datasets":
        return "(train, validation, test)"
    return "relpos.data.from_hf(dataset)" if settings.task_options.get("handed_over") else None


def _data(settings: SettingsRecord) -> str:
    """The value of `--data`: a folder, a file, or the name of data that come with the libraries."""
    options = settings.task_options
    data = options.get("images", options.get("text", options.get("source")))
    return settings.task if data is None else f"./{data}" if data in _BUILT_IN else str(data)


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
