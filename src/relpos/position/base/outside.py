"""Mechanisms that are not relpos's: in a file that the user names, and in installed packages.

    FILE.py:NAME                                the class or function NAME of a file, known by the name FILE.NAME
    [project.entry-points."relpos.positions"]   in a package: my_name = "package.module:NAME"

NAME is a class with `from_site(site)`, another class or a function called with a `Site`, or a `Preset`. A file runs
only if `from_file` or `with_files` is called, which the command and `relpos.compare` do for the names that the user
typed: a name in a model's folder or in results never runs one.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from relpos.core.checks import fail, shape_of
from relpos.core.user_file import load_name, read_source, split_file
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import OFFERS, OUTSIDE, SCHEDULE, Preset
from relpos.position.base.site import Site

GROUP = "relpos.positions"
"""The group of entry points by which a package offers mechanisms."""
_ANY_AXES = (1, 2, 3)
_JOINTS = re.compile(rf"([+{SCHEDULE}])")


@dataclass(frozen=True)
class MechanismFile:
    """`FILE.py:NAME` as it was when the user named it; unpickling makes its mechanism known in another process.

    Attributes:
        path: the file. name: the class or function. source: the file's content; modules beside it are not included.
        typed: as the user typed it.
    """

    path: Path
    name: str
    source: bytes
    typed: str

    @property
    def key(self) -> str:
        """The mechanism's name, which can be part of a file's name."""
        return f"{re.sub(r'[^0-9A-Za-z_-]', '_', self.path.stem)}.{self.name}"

    @property
    def described(self) -> str:
        """The file and a fingerprint: another content is another mechanism."""
        return f"{self.path.name}:{self.name}, sha256 {hashlib.sha256(self.source).hexdigest()[:12]}"

    def register(self) -> Preset:
        """Run the file and make its mechanism known by `key` in this process.

        Raises:
            ValueError: the file fails or has no such mechanism, or another file's has this key.
        """
        known = _FILES.get(self.key)
        if known is not None and known.path != self.path:
            fail(f"one mechanism named {self.key}", f"{known.path} and {self.path}", "Rename one of the files.")
        if known != self or self.key not in OUTSIDE:
            found = load_name(self.path, self.name, self.source, "a mechanism")
            OUTSIDE[self.key] = _preset(found, self.key, self.described, f"{self.path.name}:{self.name}")
        _FILES[self.key] = self
        return OUTSIDE[self.key]

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.path, self.name, self.source, self.typed)


_FILES: dict[str, MechanismFile] = {}


def _registered(path: Path, name: str, source: bytes, typed: str) -> MechanismFile:
    made = MechanismFile(path, name, source, typed)
    made.register()
    return made


def from_file(typed: str) -> Preset:
    """Run a Python file and make one of its mechanisms known by a name, in this process.

    Models, `create_position` and `from_pretrained` then find it by that name, `mine.TwoSlope` for `mine.py:TwoSlope`.

    Args:
        typed: `"FILE.py:NAME"`: a class with `from_site(site)`, another class or a function that is called with a
            `relpos.Site`, or a `Preset`.

    Returns:
        Its preset.

    Raises:
        ValueError: no such file, it fails, it has no such mechanism, or another file's mechanism has the same name.

    Examples:
        >>> relpos.position.from_file("mine.py:TwoSlope").name  # doctest: +SKIP
        'mine.TwoSlope'
    """
    found = split_file(typed) if isinstance(typed, str) else None
    if found is None:
        fail("a mechanism as FILE.py:NAME", shape_of(typed), 'Write for example "mine.py:TwoSlope".')
    path, name = found
    return MechanismFile(path, name, read_source(path), typed).register()


def with_files(typed: str) -> str:
    """A name, sum or schedule with each `FILE.py:NAME` in it replaced by the name of its mechanism, after running it.

    Raises:
        ValueError: as `from_file`.
    """
    if not isinstance(typed, str) or ".py:" not in typed:
        return typed
    parts = (part.strip() for part in _JOINTS.split(typed))
    return "".join(from_file(part).name if split_file(part) is not None else part for part in parts)


def files_in(names: tuple[str, ...]) -> dict[str, MechanismFile]:
    """The files of the mechanisms in these names, sums and schedules, by the mechanisms' names."""
    parts = dict.fromkeys(part for name in names for part in _JOINTS.split(name))
    return {part: _FILES[part] for part in parts if part in _FILES}


def sources_of(names: tuple[str, ...]) -> dict[str, str]:
    """Where the mechanisms in these names come from, if not from relpos: a file or package, with a fingerprint."""
    files = files_in(names)
    parts = dict.fromkeys(part for name in names for part in _JOINTS.split(name))
    packaged = {part: _from_packages()[part][1] for part in parts if part in _from_packages()}
    return {name: one.described for name, one in files.items()} | packaged


def presets_of_packages() -> dict[str, Preset]:
    """The mechanisms that installed packages offer, by name."""
    return {name: preset for name, (preset, _) in _from_packages().items()}


@cache
def _from_packages() -> dict[str, tuple[Preset, str]]:
    """The same with the package and its version. One that cannot be loaded is left out, with a warning."""
    found: dict[str, tuple[Preset, str]] = {}
    for entry in metadata.entry_points(group=GROUP):
        package = "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        try:
            if not re.fullmatch(r"[a-z0-9_.-]+", entry.name):
                fail("a name of lower-case letters, digits, _ and -", repr(entry.name), "Rename the entry point.")
            found[entry.name] = (_preset(entry.load(), entry.name, package, f"{entry.value} of {package}"), package)
        except Exception as error:  # of another package's code
            said = " ".join(str(error).split())
            warnings.warn(f"left out the position {entry.name} of {package}: {said}", stacklevel=2)
    return found


def _preset(found: Any, name: str, source: str, where: str) -> Preset:
    """The preset of what a file or a package has under a name."""
    if isinstance(found, Preset):
        return replace(found, name=name, aliases=(), near=())
    if not callable(found) or isinstance(found, Mechanism):
        remedy = "Name a class with from_site(site), or a function that takes a relpos.Site."
        fail(f"a mechanism at {where}", shape_of(found), remedy)
    kind = found if isinstance(found, type) else None
    build = found.from_site if kind is not None and hasattr(kind, "from_site") else found
    said = inspect.getdoc(found) if kind is None or kind.__doc__ else None
    summary = " ".join((said or "").split("\n\n")[0].split())
    is_bias = kind is not None and issubclass(kind, OffsetBias)
    axes = getattr(kind, "axes", None) if is_bias else None
    return Preset(
        name=name,
        title=name.rpartition(".")[2],
        build=_built_by(build, where),
        summary=summary or f"A mechanism of {where}.",
        source=source,
        token_axes=(1, 2) if axes == 1 else _ANY_AXES if not isinstance(axes, int) else (axes,),
        family="bias" if is_bias else "other",
    )


def _built_by(build: Callable[[Site], Any], where: str) -> Callable[[Site], Mechanism]:
    """The user's function with its errors in one line."""

    def built(site: Site) -> Mechanism:
        try:
            mechanism = build(site)
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("expected "):
                raise
            said = " ".join(str(error).split())
            raise ValueError(
                f"expected {where} to be built for a relpos.Site; got {type(error).__name__}: {said}. "
                "Write from_site(cls, site), or a function of the site."
            ) from error
        if not isinstance(mechanism, Mechanism):
            fail(f"a mechanism from {where}", shape_of(mechanism), "Return the mechanism for the site.")
        return mechanism

    return built


OFFERS.append(presets_of_packages)
