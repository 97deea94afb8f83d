"""The libraries whose models are changed: which versions were tested, and whether the installed source is one of them.

For every method a mixin depends on, `fingerprints.json` holds digests of its source and the version of each.
`scripts/fingerprints` writes it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cache
from importlib import metadata, resources
from typing import Any

import torch

from relpos.adapters.common import interface
from relpos.core.checks import fail

EXTRAS = {"transformers": "hf", "timm": "timm", "torchvision": "torchvision", "monai": "monai"}
"""Library name to the extra that installs it."""

DISTRIBUTIONS = {"nemo": "nemo_toolkit", "espnet2": "espnet"}
"""Top-level package to its name in the package index, where they differ."""


@cache
def imported(name: str) -> Any:
    """Import a module of transformers or timm. Both libraries import torchvision.

    torchvision from PyPI is a CUDA build. With a CPU build of torch its import fails because two operators are missing,
    and the libraries fail with it. Defining the operators' schemas is enough. If torchvision works or is absent,
    nothing is done.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            _REGISTERED.append(torch.library.Library("torchvision", "FRAGMENT"))
            _REGISTERED[-1].define(f"{operator}{schema}")
    return importlib.import_module(name)


_REGISTERED: list[torch.library.Library] = []  # a garbage-collected library removes its schemas


def require_importable(library: str) -> None:
    """Raise a one-line error if a library cannot be imported, with the usual remedy."""
    try:
        imported(library)
    except Exception as error:  # torchvision for another torch raises RuntimeError, and transformers wraps it
        reason = " ".join(str(error).split())[:200]
        if library not in EXTRAS:
            remedy = f"Run pip install {DISTRIBUTIONS.get(library, library)}."
            fail(f"{library}, importable", f"{type(error).__name__}: {reason}", remedy)
        fail(
            f"{library}, importable",
            f"{type(error).__name__}: {reason}",
            f"Run pip install 'relpos[{EXTRAS[library]}]'. If torchvision is a build for another torch: "
            f"{torchvision_command()}",
        )


def torchvision_command() -> str:
    """The command that installs torchvision's build for the installed torch, in place of another: torchvision
    0.(n + 15) goes with torch 2.n, both from one index."""
    version, _, build = torch.__version__.partition("+")
    known = build == "cpu" or build.startswith(("cu", "rocm", "xpu"))
    index = f" --index-url https://download.pytorch.org/whl/{build}" if known else ""
    return f"pip install --force-reinstall --no-deps torchvision==0.{int(version.split('.')[1]) + 15}.*{index}"


def note_on_torchvision() -> str | None:
    """A line where `imported` had to work around a torchvision that is a build for another torch; else None."""
    if not _REGISTERED:
        return None
    return (
        "torchvision is a build for another torch (operator torchvision::nms does not exist); relpos works around it. "
        f"To mend it: {torchvision_command()}"
    )


def version_of(path: str) -> str:
    """The installed version of the library of a module or class, by its full name."""
    package = path.partition(".")[0]
    return metadata.version(DISTRIBUTIONS.get(package, package))


@cache
def known() -> dict[str, dict[str, str]]:
    """Full name of a method to {digest of its source: library version that has it}."""
    text = resources.files("relpos.adapters").joinpath("fingerprints.json").read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def digests(path: str, reads: tuple[str, ...], *, switches: bool) -> Iterator[tuple[str, str]]:
    """The methods and functions that a mixin depends on, each with the digest of its source.

    Args:
        path: the class that the mixin is put in front of.
        reads: as in `kinds.Replaced`.
        switches: whether the class calls the attention function that its configuration selects.
    """
    file, _, name = path.rpartition(".")
    owner = getattr(imported(file), name)
    if switches:
        eager = ("eager_attention_forward",) if hasattr(imported(file), "eager_attention_forward") else ()
        reads = (*reads, *eager, *interface.READS)
    for read in reads:
        where = read if "." in read else f"{path if hasattr(owner, read) else file}.{read}"
        source = inspect.getsource(getattr(owner, read)) if hasattr(owner, read) else _source(where)
        yield where, hashlib.sha256(" ".join(source.split()).encode()).hexdigest()[:16]


def _source(where: str) -> str:
    """The source of a function by its full name; empty if this version has no such function."""
    file, _, name = where.rpartition(".")
    try:
        return inspect.getsource(getattr(imported(file), name))
    except (ImportError, AttributeError):
        return ""


def strange(path: str, reads: tuple[str, ...], *, switches: bool) -> str | None:
    """Why the installed source of a class is not a tested one; None if it is. Arguments as in `digests`."""
    library = path.partition(".")[0]
    found = list(digests(path, reads, switches=switches))
    unknown = [where for where, digest in found if digest not in known().get(where, {})]
    if not unknown:
        return None
    run = sorted({version for where, _ in found for version in known().get(where, {}).values()})
    return (
        f"{', '.join(unknown)} of {library} {version_of(path)} differs from the source "
        f"tested ({library} {', '.join(run) or 'none'})"
    )
