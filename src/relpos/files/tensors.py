"""Tensors in safetensors files, read one at a time: from a file, a folder, or the shards of an index.

tensors = open_tensors(folder)
tensors.shapes               every name and its shape, without a byte of a tensor
tensors.read(name)           one tensor
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from relpos.core.checks import fail
from relpos.files.manifest import require_sound
from relpos.files.reading import MIB, FileError, fail_to_read, read_json

ENDING, INDEX = ".safetensors", ".safetensors.index.json"
OFFSETS = "DCP_SHARDING_INFO"
"""The header's key if torch.distributed.checkpoint wrote parts of tensors; it holds their offsets."""
_EXPECTED = "safetensors that can be read"
_REMEDY = "Pass a .safetensors file, or a folder with one or with shards and their index."
_INDEX_AT_MOST = 64 * MIB


@dataclass(frozen=True)
class StoredTensors:
    """Tensors in files, by name.

    Attributes:
        files: the file of each tensor, by name.
        shapes: the shape of each tensor, by name, in the order of the files.
    """

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> NDArray[np.float64]:
        """One tensor in float64, whatever its stored dtype."""
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:  # NumPy has no bfloat16
                values: NDArray[np.float64] = file.get_tensor(name).double().numpy()
        except (SafetensorError, OSError) as error:
            fail_to_read(_EXPECTED, path, " ".join(str(error).split()), _REMEDY)
        return values


def open_tensors(path: Path) -> StoredTensors:
    """The tensors of a file, a folder or an index; only headers are read.

    Raises:
        ValueError: there is no file, several without an index, or a damaged one.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(path):
        require_sound(file, _REMEDY)
        for name, shape in _header(file).items():
            files[name], shapes[name] = file, shape
    return StoredTensors(files, shapes)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        index = sorted(path.glob(f"*{INDEX}"))
        found = sorted(path.glob(f"*{ENDING}"))
        if len(index) == 1:
            return _shards(index[0])
        if len(found) != 1:
            came = f"{len(found)} of them in {path}" + (f", and {len(index)} indexes" if index else "")
            fail("one .safetensors file, or one index of shards", came, "Name the file.")
        return found
    if not path.exists():
        fail("a folder or a .safetensors file", f"{path}, which does not exist", _REMEDY)
    if path.name.endswith(INDEX):
        return _shards(path)
    if path.suffix != ENDING:
        fail("a folder or a .safetensors file", f"the file {path}", _REMEDY)
    return [path]


def _shards(index: Path) -> list[Path]:
    """The files that an index names, in its folder."""
    expected = "an index of shards"
    try:
        tree: Any = read_json(index, _INDEX_AT_MOST)
    except FileError as error:
        fail_to_read(expected, index, error, _REMEDY)
    weights = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not weights or not all(isinstance(x, str) for x in weights.values()):
        fail_to_read(expected, index, "it has no weight_map from names to files", _REMEDY)
    names = sorted(set(weights.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            fail_to_read(expected, index, f"its shard {name!r} is not beside it", _REMEDY)
    return [index.parent / name for name in names]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            if OFFSETS in (file.metadata() or {}):
                fail_to_read(_EXPECTED, path, "it holds one process's parts of tensors", "Pass the trained model.")
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        fail_to_read(_EXPECTED, path, " ".join(str(error).split()) or type(error).__name__, _REMEDY)
