"""Files of speech toolkits and of Chronos from the wheels of the package index, without what these packages need.

Each wheel has a file of attention and models around it; the whole toolkit would install gigabytes. A wheel is
downloaded once, unpacked into `build/wheels`, and imported from there. Of what its files import, absent packages are
replaced by empty ones while they are imported, and heavy packages of its own by bare ones, whose files can be imported
one by one.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "wheels"
MUST = bool(os.environ.get("CI") or os.environ.get("RELPOS_REQUIRE_WHEELS"))
"""Whether a wheel that cannot be downloaded is an error; elsewhere its tests are skipped."""


@dataclass(frozen=True)
class Wheel:
    """A package of the index.

    Attributes:
        package: top-level package.
        requirement: name and version.
        absent: packages that its files import and do not use here.
        bare: packages of its own whose `__init__` would import everything.
    """

    package: str
    requirement: str
    absent: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The folder that it is unpacked into."""
        return FOLDER / self.requirement.replace("==", "-")


WHEELS = (
    Wheel("espnet", "espnet==202511", ("flash_attn", "typeguard")),
    Wheel("nemo", "nemo_toolkit==3.0.0", bare=("nemo", "nemo.collections", "nemo.collections.asr", "nemo.utils")),
    Wheel("speechbrain", "speechbrain==1.1.2", ("torchaudio", "hyperpyyaml", "sentencepiece", "soundfile")),
    Wheel("chronos", "chronos_forecasting==2.3.2", ("einops",), bare=("chronos",)),
)


class Unavailable(Exception):
    """A wheel is not there and could not be downloaded."""


def download() -> None:
    """Put the wheels that are missing into the folder.

    Raises:
        Unavailable: the package index could not be reached, or has another answer.
    """
    missing = [wheel for wheel in WHEELS if not wheel.path.exists()]
    if not missing:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:  # other processes may download the same
        options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "1", "--dest", folder)
        command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", *options)
        ran = subprocess.run([*command, *(wheel.requirement for wheel in missing)], capture_output=True, text=True)
        if ran.returncode:
            raise Unavailable(f"pip download: {' '.join(ran.stderr.split())[-300:]}")
        for wheel in missing:
            unpacked = Path(folder) / wheel.path.name
            zipfile.ZipFile(Path(folder) / f"{wheel.path.name}-py3-none-any.whl").extractall(unpacked)
            with suppress(OSError):  # another process was first
                unpacked.rename(wheel.path)


class _Anything(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    """A class that does nothing; called with a function, as a decorator, it returns that."""

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else object.__new__(cls)

    return _Anything(name, (), {"__new__": made, "__class_getitem__": classmethod(lambda cls, item: cls)})


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent packages, empty; asked last, so that an installed one is found."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def importable() -> Iterator[None]:
    """Let files of the wheels be imported in the block. What was imported stays; empty packages do not.

    Raises:
        Unavailable: as `download`.
    """
    download()
    paths = [str(wheel.path) for wheel in WHEELS if importlib.util.find_spec(wheel.package) is None]
    finder = _Absent(tuple(name for wheel in WHEELS for name in wheel.absent))
    sys.path.extend(paths)
    sys.meta_path.append(finder)
    try:
        for wheel in WHEELS:
            for name in wheel.bare:
                _make_bare(wheel, name)
        yield
    finally:
        sys.meta_path.remove(finder)
        for path in paths:
            sys.path.remove(path)
        for name, module in list(sys.modules.items()):
            lazy = any(kind.__name__ == "LazyModule" for kind in type(module).__mro__)  # whose attributes raise
            if lazy or isinstance(module, _Empty):
                del sys.modules[name]


def _make_bare(wheel: Wheel, name: str) -> None:
    if name in sys.modules or str(wheel.path) not in sys.path:
        return
    module = types.ModuleType(name)
    module.__path__ = [f"{wheel.path}/{name.replace('.', '/')}"]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    if name == "nemo.utils":  # what its __init__ has, and attention uses
        cast = importlib.import_module("nemo.utils.cast_utils")
        module.avoid_float16_autocast_context = cast.avoid_float16_autocast_context  # type: ignore[attr-defined]
