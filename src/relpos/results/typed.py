"""Convert JSON values to the schema's dataclasses and back, field by field; an error locates the first fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from relpos.results.schema import is_required
from relpos_command.visible import visible

LARGEST, LARGEST_WHOLE = 1e60, 10**15
"""The largest magnitudes: any float32 is below, and squares are finite; integers fit into NumPy's."""


class ResultsError(ValueError):
    """A results file that cannot be read; the message, always one line, says what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def plain(value: Any) -> Any:
    """JSON values of a dataclass; empty optional fields are left out."""
    if is_dataclass(value):
        own = [(one, getattr(value, one.name)) for one in fields(value)]
        return {one.name: plain(held) for one, held in own if is_required(one) or held not in (None, [], {})}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, a dataclass of the schema or the type of one of its fields; a dataclass stays as it is.

    Nested lists of numbers, which the schema declares as `Any`, are not converted.

    Raises:
        ResultsError: it has another type; the message starts with `where`.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (UnionType, Union):  # Python 3.11 gives Union for a Literal or None
        return _one_of([one for one in inside if one is not NoneType], value, where, null=NoneType in inside)
    if origin is Literal:
        return value if value in inside else _fail(where, " or ".join(inside), value)
    if origin is list:
        if not isinstance(value, list | tuple):
            _fail(where, "a list", value)
        if inside[0] in (int, str, float):
            odd = [one for one in value if not _is(inside[0], one)]
            return list(value) if not odd else _fail(where, f"a list of {_WORDS[inside[0]]}", odd[0])
        return [typed(inside[0], one, f"{where}[{index}]") for index, one in enumerate(value)]
    if origin is dict:
        return _mapping(inside[1], value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    return value if _is(kind, value) else _fail(where, _WORDS[kind], value)


_WORDS = {bool: "true or false", int: "whole numbers up to 1e15", float: "numbers up to 1e60", str: "text in UTF-8"}


def _is(kind: type, value: Any) -> bool:
    """Whether a value has a scalar type and the page can show it: finite, or text that can be encoded."""
    if kind is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int):
        return kind in (int, float) and -LARGEST_WHOLE <= value <= LARGEST_WHOLE
    return kind is float and isinstance(value, float) and bool(-LARGEST <= value <= LARGEST)


def _one_of(kinds: list[Any], value: Any, where: str, *, null: bool) -> Any:
    if value is None and null:
        return None
    if len(kinds) == 1:
        return typed(kinds[0], value, where)
    wanted = " or ".join(_WORDS[one] for one in kinds)
    return value if any(_is(one, value) for one in kinds) else _fail(where, wanted, value)


def _mapping(kind: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _fail(where, "an object", value)
    if kind is Any:
        _require_shown(value, where)
    return {name: typed(kind, one, f"{where}.{name}") for name, one in value.items()}


def _require_shown(value: Any, where: str) -> None:
    """Raise unless a value of any kind is JSON that a page can show."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            typed(str, name, where)
            _require_shown(one, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for one in value:
            _require_shown(one, where)
    elif value is not None and not any(_is(kind, value) for kind in _WORDS):
        _fail(where, "text in UTF-8, a number up to 1e60, true, false or null", value)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        _fail(where, "an object", value)
    hints = _hints(kind)
    needed = {one.name for one in fields(kind) if is_required(one)}
    if missing := sorted(needed - set(value)):
        raise ResultsError(f"{where}: missing {', '.join(missing)}")
    if unknown := sorted(map(str, set(value) - set(hints))):
        raise ResultsError(f"{where}: unknown {', '.join(unknown)}")
    return kind(**{name: typed(hints[name], one, f"{where}.{name}") for name, one in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fail(where: str, wanted: str, came: Any) -> NoReturn:
    raise ResultsError(f"{where}: expected {wanted}, got {came!r:.60}")
