"""A comparison as one file to share: its page, results, program and versions, without data or who made it.

Left out are the data, samples of them (images with attention, generated text), names of files, folders of paths, and
the names of the machine and of its user. Trained weights and logs stay in the comparison's folder.
"""

import getpass
import io
import json
import re
import socket
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relpos.files.writing import write_whole
from relpos.report.advice import advise
from relpos.report.command import command_line
from relpos.report.export import to_csv
from relpos.report.page import build_page, program_of
from relpos.results import Results, plain, read
from relpos_command.visible import visible

PATHS = ("images", "text", "tokenizer", "model", "step", "evaluate")
"""Fields whose text is a path, or has one: only its last part stays."""
_SAMPLED = ("prompt", "within", "beyond")
_ABSOLUTE = re.compile(r"""(?<![^\s'"(\[=:,])(?:~|[A-Za-z]:)?[/\\](?:[^/\\\s'",;]+[/\\])*([^/\\\s'",;]+)""")


def write_bundle(
    results: Results | Mapping[str, Any], path: Path, *, samples: bool = False, overwrite: bool = False
) -> list[str]:
    """Write the archive; equal results give equal bytes.

    Args:
        samples: keep images with attention and generated text.
        overwrite: replace an existing file.

    Returns:
        The names of its files.

    Raises:
        FileExistsError: the file exists, without `overwrite`.
    """
    files = bundled(results, samples=samples)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    write_whole(path, buffer.getvalue(), new=not overwrite)
    return list(files)


def bundled(results: Results | Mapping[str, Any], *, samples: bool = False) -> dict[str, str]:
    """The files of the archive by name."""
    clean = _clean(read(results), samples)
    advice = advise(clean)
    program = program_of(clean, [*advice.named, *clean.names])
    files = {
        "report.html": build_page(clean),
        "results.json": json.dumps(plain(clean), allow_nan=False) + "\n",
        "numbers.csv": to_csv(clean) + "\n",
    }
    if program is not None:
        files["train.py"] = program["source"]
    return {"README.txt": _readme(clean, samples, program), **files}


def _readme(results: Results, samples: bool, program: Mapping[str, str] | None) -> str:
    own = [f"{name}: {source}" for name, source in results.settings.sources.items()]
    lines = [
        f"A comparison by relpos {results.environment.relpos}: {results.task.title}.",
        *advise(results).lines,
        "",
        "report.html   the page, which needs no network",
        "results.json  all measurements; relpos.results.load_results reads it",
        "numbers.csv   the numbers, one a line",
        *([f"train.py      trains {program['name']}, one seed, without the command"] if program else []),
        "",
        "The command that repeats it (names of data have lost their folders):",
        f"  {command_line(results)}",
        "",
        "Versions and hardware:",
        *(f"  {name}: {value}" for name, value in plain(results.environment).items()),
        "",
        *(["Send beside it, for the program and the command:", *(f"  {one}" for one in own), ""] if own else []),
        "Not included: the data, names of files, trained weights"
        + ("." if samples else ", samples of images or text (--with-samples includes them)."),
    ]
    return visible("\n".join(lines), keep="\n") + "\n"


def _clean(results: Results, samples: bool) -> Results:
    tree: dict[str, Any] = plain(results)
    task = tree["task"]
    for key, name in (("skipped", "path"), ("ignored", None)):
        files = task.get(key) or []
        task[key] = [
            f"file {n}" if name is None else {**one, name: f"file {n}", "reason": one["reason"].replace(one[name], "")}
            for n, one in enumerate(files, 1)
        ]
    for record in tree["records"]:
        if not samples:
            record["attention"] = record["sample"] = None
    kept = {*results.names, *results.task.classes, results.task.name, *(probe.group for probe in results.task.probes)}
    return read(_scrubbed(tree, {name: word for name, word in _private().items() if name not in kept}))


def _private() -> dict[str, str]:
    """The names of this machine and its user, and the words that replace them."""
    host = socket.gethostname()
    found = {host: "host", host.partition(".")[0]: "host", Path.home().name: "user"}
    with suppress(KeyError, OSError, ImportError):  # a user without an account, as in some containers
        found[getpass.getuser()] = "user"
    return {name: word for name, word in found.items() if len(name) > 1}


def _scrubbed(tree: Any, private: Mapping[str, str], key: str = "") -> Any:
    if isinstance(tree, Mapping):
        return {name: _scrubbed(value, private, str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_scrubbed(value, private) for value in tree]
    if not isinstance(tree, str):
        return tree
    text = re.sub(r"^((?:hf|timm|tiktoken):)?.*[/\\]", r"\1", tree, flags=re.DOTALL) if key in PATHS else tree
    text = text if key in _SAMPLED else _ABSOLUTE.sub(r"\1", text)
    for name, word in private.items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
    return text
