"""Write `docs/results.md`, the schema of `results.json`, from the dataclasses that it is read and written by."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from relpos.results import SCHEMA_VERSION, Results, is_required

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TEXT = """# `results.json`: the schema, version {version}

`relpos compare` writes one file per finished piece of work under `DIR/records/`, as `{{"sha256": ..., "record": ...}}`
with the checksum of the record's text, and gathers the records into `DIR/results.json`. A record with another
checksum is an error that names it; remove it, and the same command computes it again. Page and table are made from
`results.json` alone: `relpos.results.load_results(path)` reads it. A field marked "may be absent" is left out if it
does not apply; no number is nan or inf. A reader should refuse a `schema_version` that it does not know.
Written by `python recipes/results_page.py`.
"""


def schema_page() -> str:
    """`docs/results.md`: a table for each dataclass."""
    parts = [TEXT.format(version=SCHEMA_VERSION)]
    for section in _sections(Results):
        hints = get_type_hints(section, include_extras=True)
        rows = []
        for one in fields(section):
            kind, text = get_args(hints[one.name])
            optional = "" if is_required(one) else "; may be absent"
            rows.append(f"| `{one.name}` | {_type_words(kind)}{optional} | {text} |")
        head = f"## {section.__name__}\n\n{section.__doc__}\n\n| field | type | meaning |\n|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _sections(section: type) -> list[type]:
    """`section`, then all that its fields are made of, each once."""
    found = [section]
    for kind in get_type_hints(section).values():
        for one in (kind, *get_args(kind)):
            if is_dataclass(one) and isinstance(one, type):
                found += [other for other in _sections(one) if other not in found]
    return found


def _type_words(kind: Any) -> str:
    if kind is Any:
        return "lists of numbers"
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(_type_words(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is list:
        return f"list of {_type_words(get_args(kind)[0])}"
    if get_origin(kind) is dict or get_origin(kind) is Literal:
        return "object" if get_origin(kind) is dict else "string"
    words = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return words.get(kind, f"[{kind.__name__}](#{kind.__name__.lower()})")


if __name__ == "__main__":
    PAGE.write_text(schema_page())
    print(PAGE)
