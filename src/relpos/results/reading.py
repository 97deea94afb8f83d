"""Read an untrusted `results.json`: the result is valid for every page, or an error is raised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, cast

from relpos.results.consistency import require_consistent
from relpos.results.schema import SCHEMA_VERSION, Results
from relpos.results.typed import ResultsError, typed

BYTES_AT_MOST = 2**30


def read(tree: object, name: str = "results") -> Results:
    """Results from JSON values; `Results` are returned unchanged.

    Raises:
        ResultsError: the values have another schema, or are inconsistent.
    """
    if isinstance(tree, Results):
        return tree
    if not isinstance(tree, Mapping):
        raise ResultsError(f"{name}: expected a JSON object, got {type(tree).__name__}")
    version = tree.get("schema_version")
    if version != SCHEMA_VERSION:
        age, remedy = "another", "read it with the relpos that wrote it"
        if isinstance(version, int) and version < SCHEMA_VERSION:
            age, remedy = "an older", "compare in a new folder: relpos compare --out NEW"
        wanted = f"expected schema_version {SCHEMA_VERSION}, got {version!r:.60}"
        raise ResultsError(f"{name} was written by {age} version of relpos: {wanted}; {remedy}")
    try:
        results = cast(Results, typed(Results, tree, name))
        require_consistent(results, name)
    except RecursionError:
        raise ResultsError(f"{name}: expected few nested brackets, got thousands") from None
    return results


def load_results(path: str | Path) -> Results:
    """Read `results.json`, or the one in a folder.

    Raises:
        ResultsError: the file is missing, is not JSON, has another schema, or its values are inconsistent.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    if not path.exists():
        raise ResultsError(f"no results at {path}: expected the results.json that `relpos compare --out DIR` writes")
    if not path.is_file():  # a pipe may never end
        raise ResultsError(f"expected a regular file for {path}, got something else: name the results.json itself")
    if (size := path.stat().st_size) > BYTES_AT_MOST:
        raise ResultsError(f"expected at most {BYTES_AT_MOST:,} bytes in {path}, got {size:,}: name another file")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # from JSON, UTF-8, numbers with thousands of digits, brackets
        message = f"{path} is not JSON ({error}): repeat `relpos compare` with the same --out, which writes it anew"
        raise ResultsError(message) from None
    return read(tree, str(path))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
