"""An option of the command as a field of a dataclass: its parser, its help, and the words that repeat it.

A request is a frozen dataclass whose fields are made by `option`. Its parser, its help, its defaults and its bounds
follow from them, and so do the request of a command line (`read`) and the words that ask for a request (`written`).
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

R = TypeVar("R")

_DIGITS_SHOWN = 40
_MOST_PIXELS = 4096
"""The largest height or width of an image or a patch, in pixels."""


@dataclass(frozen=True)
class Option:
    """How a field of a request is typed.

    Attributes:
        help: its line in the help; the default is added to it.
        flag: such as `--no-memory`; without it, it follows from the field's name.
        type: reads one typed word, and raises `ArgumentTypeError`. choices: the words it may be.
        metavar: stands for the value in the help.
        default_in_words: the default in the help, where the field's is None.
        positional: whether it has no flag. repeated: whether it may be typed several times.
        bounds: the least and the most of a whole number.
        read: makes the field's value of what was typed, given the flag; raises `ValueError`.
        write: makes typed words of the field's value, one for each time it is typed.
        stated: whether a command that repeats a run has it even if it is the default, which another version may change.
    """

    help: str
    flag: str | None = None
    type: Callable[[Any], Any] | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    default_in_words: str | None = None
    positional: bool = False
    repeated: bool = False
    bounds: tuple[int, int] | None = None
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], list[str]] | None = None
    stated: bool = False


def option(default: Any = MISSING, help: str = "", metavar: str | None = None, **how: Any) -> Any:
    """A field of a request that is an option of the command, a word unless `how` says otherwise: see `Option`."""
    if default is not False and default is not True and "choices" not in how and "bounds" not in how:
        how.setdefault("type", words)
    if "bounds" in how:
        least, most = how["bounds"]
        how["type"] = whole(at_least=least, at_most=most)
    return field(default=default, metadata={"option": Option(help, metavar=metavar, **how)})


def options_of(kind: type) -> dict[str, Option]:
    """The options of a request by the names of its fields: its own first, then those of its bases."""
    order = [name for part in kind.__mro__ for name in inspect.get_annotations(part)]
    options = {one.name: one.metadata["option"] for one in fields(kind)}
    return {name: options[name] for name in order}


def flag_of(kind: type, name: str) -> str:
    """The flag of a field of a request, such as `--batch-size`; of a positional argument its name."""
    how = options_of(kind)[name]
    return name if how.positional else how.flag or f"--{name.replace('_', '-')}"


def add_options(kind: type, parser: ArgumentParser) -> None:
    """Add the options of a request to a parser."""
    defaults = {one.name: one.default for one in fields(kind)}
    for name, how in options_of(kind).items():
        default, flag = defaults[name], flag_of(kind, name)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=how.help)
            continue
        more: dict[str, Any] = {"metavar": how.metavar, "type": how.type, "choices": how.choices}
        shown = default if default is not MISSING and default is not None else how.default_in_words
        more["help"] = how.help if shown is None else f"{how.help}. Default: {shown}"
        if how.positional:
            more["nargs"] = None if default is MISSING else "?"
        elif default is MISSING:
            more["required"] = True
        elif default is not None:
            more["default"] = default
        if how.repeated:
            more["action"] = "append"
        parser.add_argument(flag, **{key: value for key, value in more.items() if value is not None})


def read(kind: type[R], parsed: Namespace) -> R:
    """The request that was typed.

    Raises:
        ValueError: a value cannot be read; one line.
    """
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        how, flag = one.metadata["option"], flag_of(kind, one.name)
        typed = parsed[flag.removeprefix("--").replace("-", "_")]
        if one.default is True:
            typed = not typed  # the flag of a thing that is done without it
        values[one.name] = how.read(typed, flag) if how.read is not None and typed is not None else typed
    return kind(**values)


def asked(request: Any, names: Sequence[str]) -> list[str]:
    """Of these fields of a request those that ask for something: not the default, unless it is stated."""
    options, defaults = options_of(type(request)), {one.name: one.default for one in fields(request)}
    values = {name: getattr(request, name) for name in names}
    return [name for name, x in values.items() if x is not None and (options[name].stated or x != defaults[name])]


def written(request: Any, names: Sequence[str]) -> Iterator[str]:
    """The words that ask for these fields of a request."""
    for name in asked(request, names):
        how, value, flag = options_of(type(request))[name], getattr(request, name), flag_of(type(request), name)
        if isinstance(value, bool):
            yield flag
            continue
        for word in [str(value)] if how.write is None else how.write(value):
            yield from (flag, word)


def whole(*, at_most: int, at_least: int | None = None) -> Callable[[str], int]:
    """A type of integers within bounds; the lower bound defaults to `-at_most`."""
    low = -at_most if at_least is None else at_least

    def read_whole(word: str | int) -> int:
        text = str(word)  # defaults are parsed too
        sign, digits = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)
        typed = repr(text) if len(text) <= _DIGITS_SHOWN else f"a number of {len(digits):,} digits"
        if not (digits.isascii() and digits.isdecimal()):
            typed = typed if len(text) <= _DIGITS_SHOWN else f"{len(text):,} characters"
            raise ArgumentTypeError(f"expected a whole number; got {typed}")
        # Python reads no more than 4,300 digits.
        number = None if len(digits) > _DIGITS_SHOWN else int(sign + digits)
        if number is None or not low <= number <= at_most:
            raise ArgumentTypeError(f"expected a whole number from {low:,} to {at_most:,}; got {typed}")
        return number

    return read_whole


def number(typed: str | float) -> float:
    """A type of finite numbers of at least 0."""
    try:
        value = float(typed)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"expected a number of at least 0; got {str(typed)[:_DIGITS_SHOWN]!r}")
    return value


def words(text: str) -> str:
    """A type of non-blank text."""
    if not text.strip():
        raise ArgumentTypeError(f"expected a value; got {text!r}")
    return text


def each(typed: str | list[str]) -> str | list[str]:
    """A type for a repeated option; jsonargparse checks single words, then the whole list."""
    return [words(one) for one in typed] if isinstance(typed, list) else words(typed)


def read_names(typed: str, flag: str) -> tuple[str, ...]:
    """Names joined by commas."""
    return tuple(name.strip() for name in typed.split(",") if name.strip())


def write_names(names: Sequence[str]) -> list[str]:
    """The same, as typed."""
    return [",".join(names)]


def read_size(typed: str, flag: str) -> list[int]:
    """`64` or `64x96` as (height, width)."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", typed.strip().lower())
    if not match:
        raise ValueError(f"expected N or HxW for {flag}; got {typed!r}. Write {flag} 64, or {flag} 64x96.")
    if max(len(one) for one in match.groups("")) > 9 or max(map(int, filter(None, match.groups()))) > _MOST_PIXELS:
        raise ValueError(
            f"expected a height and width of at most {_MOST_PIXELS:,} pixels for {flag}; got {typed!r}. "
            "Choose a smaller size."
        )
    return [int(match[1]), int(match[2] or match[1])]


def write_size(size: int | Sequence[int]) -> list[str]:
    """The same, as typed."""
    numbers = [str(one) for one in ([size] if isinstance(size, int) else size)]
    return [numbers[0] if len(set(numbers)) == 1 else "x".join(numbers)]


_INCH = {"in": 1.0, "cm": 2.54, "mm": 25.4, "pt": 72.27}
"""How many of a unit are an inch; a point is TeX's."""


def read_width(typed: str, flag: str) -> float:
    """`3.25in`, `8.3cm`, `83mm` or `240pt` in inches."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,9})?)(in|cm|mm|pt)", typed.strip().lower())
    if not match:
        units = "in, cm, mm or pt"
        raise ValueError(f"expected a number and {units} for {flag}; got {typed!r:.60}. Write {flag} 3.25in.")
    return float(match[1]) / _INCH[match[2]]


def read_recipe(changes: Sequence[str], flag: str) -> dict[str, Any]:
    """`["recipe.weight_decay=0.1", "recipe.norm=rmsnorm"]` as fields and values."""
    fields_of_recipe: dict[str, Any] = {}
    for change in changes:
        key, equals, typed = change.partition("=")
        name = key.strip().removeprefix("recipe.")
        if not equals or name == key.strip() or not name:
            remedy = f"Write for example {flag} recipe.weight_decay=0.1."
            raise ValueError(f"expected {flag} recipe.KEY=VALUE; got {flag} {change}. {remedy}")
        try:
            fields_of_recipe[name] = json.loads(typed)
        except ValueError:
            fields_of_recipe[name] = typed.strip()  # a name needs no quotes
    return fields_of_recipe


def read_pairs(typed: Sequence[str], flag: str) -> dict[str, Any]:
    """`["timeout_min=240", "partition=gpu"]` as names and values."""
    pairs: dict[str, Any] = {}
    for one in typed:
        key, equals, value = (part.strip() for part in one.partition("="))
        if not equals or not key.isidentifier():
            raise ValueError(f"expected {flag} KEY=VALUE; got {flag} {one}. Write for example {flag} timeout_min=240.")
        try:
            pairs[key] = json.loads(value)
        except ValueError:
            pairs[key] = value  # a name needs no quotes
    return pairs


def write_recipe(changes: dict[str, Any]) -> list[str]:
    """The same, as typed."""
    return [
        f"recipe.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in changes.items()
    ]
