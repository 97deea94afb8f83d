"""Learned positions in a model's weights, found by the names of its parameters; no model is built.

    name ends with                     shape                what it is
    relative_attention_bias(.weight)   [buckets, H]         T5: a bias per bucket of distances
    relative_position_bias_table       [L, H] or [L + 3, H] Swin; BEiT, whose last three rows are the class token's
    tables.0, tables.1                 [L, H]               a bias per offset along an axis
    rel_embeddings(.weight)            [2 k, E]             DeBERTa: a vector per bucket, multiplied by queries and keys
    rel_pos_h, rel_pos_w, rel_pos.0    [2 n - 1, D]         SAM, MViTv2: a vector per axis offset, multiplied by queries
    key_vectors, value_vectors         [2 k + 1, D]         Shaw: a vector per clipped offset

Offset is query - key everywhere. Names and shapes do not determine T5's largest distance, which is not stored, or the
height and width of a window that is not square. They come from `config.json` or a stored `relative_position_index`;
else a note or a reason says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import layer_norm

from relpos.core import LineBias, Sequence
from relpos.files.tensors import StoredTensors
from relpos.position import T5Bias
from relpos.report.drawing.learned_positions import OFFSET
from relpos.report.drawing.mechanism_picture import Axis, Bars, Maps, heads_named, offsets_of

Values = NDArray[np.float64]
_T5_DISTANCE, _DEBERTA_EPS = 128, 1e-7
"""Values of the published configurations, used if none are stored."""
_ADDED, _LENGTH = "added to the score", "length of the vector"
_PREFIX = ("class to patch", "patch to class", "class to class")


@dataclass(frozen=True, eq=False)
class Stored:
    """The learned position in one parameter.

    Attributes:
        name: the parameter's name. kind: its description.
        heads: the number of heads with a bias; 0 if they share it.
        offsets: its offsets, in words.
        pictures: what to draw. note: one or two sentences of remarks.
        rest: a table of values without an offset: the column titles, then one row per head.
    """

    name: str
    kind: str
    heads: int
    offsets: str
    pictures: tuple[Maps | Bars, ...]
    note: str = ""
    rest: tuple[tuple[str, ...], ...] = ()


class _LeftOutError(Exception):
    """Why a parameter is not drawn."""


def stored_positions(tensors: StoredTensors, config: Mapping[str, Any]) -> tuple[list[Stored], list[tuple[str, str]]]:
    """The learned positions found, in layer order, and the names left out, each with the reason.

    Args:
        config: the content of `config.json` beside the weights; {} without one.
    """
    found: list[Stored] = []
    left: list[tuple[str, str]] = []
    for name in sorted(tensors.shapes, key=_natural):
        make = next((make for pattern, make in _KINDS if re.search(rf"(?:^|\.){pattern}$", name)), None)
        if make is None:
            continue
        try:
            if (instead := _replaced_by(name, tensors)) is not None:
                raise _LeftOutError(f"it is not used: {instead} replace it")
            if len(tensors.shapes[name]) != 2:
                raise _LeftOutError(f"it has {len(tensors.shapes[name])} axes, not 2")
            values = tensors.read(name)
            if not np.isfinite(values).all():
                raise _LeftOutError("it has values that are not finite")
            found.append(make(name, values, tensors, config))
        except _LeftOutError as reason:
            left.append((name, str(reason)))
    return found, left


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A sort key: layer 10 comes after layer 9, and the decoder after the encoder."""
    return "decoder" in name, [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _replaced_by(name: str, tensors: StoredTensors) -> str | None:
    """The name of the mechanisms by which `replace_position` replaced a model's own table; None if it did not."""
    parts = name.split(".")
    for depth in range(len(parts)):
        instead = ".".join((*parts[:depth], "positions"))
        stored = rf"{re.escape(instead)}\.\d+\.mechanisms\."
        if not name.startswith(f"{instead}.") and any(re.match(stored, other) for other in tensors.shapes):
            return instead
    return None


def _buckets(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> Stored:
    count, heads = values.shape
    if _is_image(name, tensors):
        raise _LeftOutError("it does not determine distances on a grid")
    configured = config.get("relative_attention_max_distance")
    distance = configured if isinstance(configured, int) and count < configured <= 2**14 else _T5_DISTANCE
    causal = _is_causal(name, tensors)
    try:
        mechanism = T5Bias(heads, num_buckets=count, max_distance=distance, bidirectional=not causal)
    except ValueError as error:
        raise _LeftOutError(f"it is not a table of T5's buckets: {error}") from None
    with torch.no_grad():
        mechanism.relative_attention_bias.copy_(torch.from_numpy(values))
        line = mechanism.terms(Sequence(distance + 1)).of(LineBias)[0]
    along = line.values.double().numpy()[:, -(distance + 1) if causal else 0 :]
    low = 0 if causal else -distance
    title = f"Bias of each head, {count} buckets of distances"
    note = f"Distances from {distance} on share a bucket. " if configured == distance else (
        f"Drawn for a largest distance of {distance}, as in T5: the weights do not contain it. "
    )  # fmt: skip
    note += (
        "Of a decoder: all buckets are for the past." if causal else "Of an encoder: half of the buckets per direction."
    )
    return Stored(
        name, "T5 buckets", heads, _range(low, distance),
        (Bars(title, heads_named(heads), along, _axis(OFFSET, low, distance), _ADDED),), note,
    )  # fmt: skip


def _table(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> Stored:
    rows, heads = values.shape
    is_image = _is_image(name, tensors) if ".positions." in f".{name}" else True
    if is_image:
        return _of_window(name, values, *_window(name, rows, tensors))
    prefix = 3 if rows % 2 == 0 else 0
    high = (rows - prefix - 1) // 2
    strip = Bars("Bias of each head", heads_named(heads), values[: 2 * high + 1].T, _axis(OFFSET, -high, high), _ADDED)
    one = Stored(name, "table of a sequence", heads, _range(-high, high), (strip,), rest=_rest(values, prefix))
    if is_image is not None:
        return one
    try:
        window = _of_window(name, values, *_window(name, rows, tensors))
    except _LeftOutError:
        return replace(one, note="Drawn for a sequence: no name shows whether tokens are a sequence or a grid.")
    offsets = f"{one.offsets}, or {window.offsets}"
    note = "Drawn for both: no name shows whether tokens are a sequence or a grid, and the number of rows fits both."
    return replace(
        one, kind="table of a sequence or a grid", offsets=offsets, pictures=one.pictures + window.pictures, note=note
    )


def _of_window(name: str, values: Values, height: int, width: int, prefix: int) -> Stored:
    rows, heads = values.shape
    maps = values[: rows - prefix].T.reshape(heads, 2 * height - 1, 2 * width - 1)
    axes = (_axis(f"row {OFFSET}", 1 - height, height - 1), _axis(f"column {OFFSET}", 1 - width, width - 1))
    picture = Maps(f"Bias of each head, {height} x {width}", heads_named(heads), maps, *axes, _ADDED, marked=(0, 0))
    kind = "table with a class token" if prefix else "table of a window"
    offsets = f"{_range(1 - height, height - 1)} rows, {_range(1 - width, width - 1)} columns"
    return Stored(name, kind, heads, offsets, (picture,), rest=_rest(values, prefix))


def _window(name: str, rows: int, tensors: StoredTensors) -> tuple[int, int, int]:
    """Rows and columns of a table's window, and its number of rows for a class token."""
    index = f"{name.rpartition('.')[0]}.relative_position_index".lstrip(".")
    if len(tensors.shapes.get(index, ())) == 2:
        pairs = tensors.read(index)
        for prefix, first in ((0, 0), (3, 1)):
            line = pairs[first, first:]
            falls = line[0] - np.arange(len(line))
            width = int(np.argmax(line != falls)) if (line != falls).any() else len(line)
            height = len(line) // width
            if height * width == len(line) and rows - prefix == (2 * height - 1) * (2 * width - 1):
                return height, width, prefix
    for prefix in (0, 3):
        span = math.isqrt(max(rows - prefix, 0))
        if span % 2 and span * span == rows - prefix:
            return (span + 1) // 2, (span + 1) // 2, prefix
    raise _LeftOutError(f"its {rows} rows fit no square window, and no relative_position_index is stored")


def _rest(values: Values, prefix: int) -> tuple[tuple[str, ...], ...]:
    if not prefix:
        return ()
    cells = (("head", *_PREFIX), *((str(head), *(f"{x:+.3f}" for x in row)) for head, row in enumerate(values[-3:].T)))
    return tuple(tuple(cell.replace("-", "\N{MINUS SIGN}") for cell in row) for row in cells)


def _of_axis(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> Stored:
    high = _odd(values) // 2
    which = _AXES.get(name.rpartition(".")[2], "axis")
    strip = Bars(
        "Bias of each head", heads_named(values.shape[1]), values.T, _axis(f"{which} {OFFSET}", -high, high), _ADDED
    )
    return Stored(name, f"table of {which} offsets", values.shape[1], _range(-high, high), (strip,))


def _disentangled(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> Stored:
    if len(values) % 2:
        raise _LeftOutError(f"it has {len(values)} rows, an odd number")
    half = len(values) // 2
    axis = _axis(f"bucket of {OFFSET}", -half, half - 1)
    values, normed = _normed(name, values, tensors, config)
    note = "Each head projects these vectors with its own weights; their effect on a score depends on the tokens."
    note = f"{note} Drawn after {normed}, which the model applies to them." if normed else note
    return Stored(name, "DeBERTa's vectors", 0, f"buckets {_range(-half, half - 1)}", _of_vectors(values, axis), note)


def _normed(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> tuple[Values, str | None]:
    """Vectors after the LayerNorm that DeBERTa's encoder may have for them, and its name; None without one."""
    norm = f"{name.removesuffix('.weight').rpartition('.')[0]}.LayerNorm".lstrip(".")
    shapes = [tensors.shapes.get(f"{norm}.{parameter}") for parameter in ("weight", "bias")]
    if shapes != [values.shape[1:]] * 2:
        return values, None
    weight, bias = (torch.from_numpy(tensors.read(f"{norm}.{parameter}")) for parameter in ("weight", "bias"))
    eps = config.get("layer_norm_eps")
    eps = eps if isinstance(eps, float) and 0 < eps < 1 else _DEBERTA_EPS
    return layer_norm(torch.from_numpy(values), weight.shape, weight, bias, eps).numpy(), norm


def _vectors(name: str, values: Values, tensors: StoredTensors, config: Mapping[str, Any]) -> Stored:
    high = _odd(values) // 2
    which = _AXES.get(name.rpartition(".")[2], "")
    axis = _axis(f"{which} {OFFSET}".strip(), -high, high)
    note = "All heads share these vectors; their effect on a score depends on the query."
    return Stored(
        name, f"vectors of {which} offsets".replace("  ", " "), 0, _range(-high, high), _of_vectors(values, axis), note
    )


def _of_vectors(values: Values, axis: Axis) -> tuple[Maps | Bars, ...]:
    """The lengths of the vectors, and the similarity of every two of at most `_ALIKE` of them."""
    lengths = np.linalg.norm(values, axis=1)
    every = -(-len(values) // _ALIKE)
    centred = (values - values.mean(axis=0))[::every]
    sizes = np.linalg.norm(centred, axis=1, keepdims=True)
    alike = (centred / np.where(sizes > 0, sizes, 1)) @ (centred / np.where(sizes > 0, sizes, 1)).T
    ticks = tuple((axis.first + (at - axis.first) / every, text) for at, text in axis.ticks)
    thinned = Axis(axis.label, axis.first, ticks)
    return (
        Bars("Length of each vector", ("",), lengths[None], axis, _LENGTH),
        Maps("Similarity of two vectors", ("",), alike[None], thinned, thinned, "cosine, mean subtracted", 1.0),
    )


def _odd(values: Values) -> int:
    if len(values) % 2 == 0:
        raise _LeftOutError(f"it has {len(values)} rows, an even number")
    return len(values)


def _is_causal(name: str, tensors: StoredTensors) -> bool:
    """Whether the layers with this table are causal."""
    if "decoder" in name:
        return True
    if any("encoder" in other for other in tensors.shapes):
        return False
    if any(re.search(rf"(?:^|\.)(?:{_WRITERS})\.", other) for other in tensors.shapes):
        return True
    raise _LeftOutError("no name shows whether it belongs to an encoder or a decoder")


def _is_image(name: str, tensors: StoredTensors) -> bool | None:
    """Whether a table's tokens are patches, by the embedding in the nearest enclosing module; None if unknown."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        around = "".join(f"{part}." for part in parts[:depth])
        others = [f".{other[len(around) :]}" for other in tensors.shapes if other.startswith(around)]
        words, patches = (any(re.search(rf"\.{begins}", other) for other in others) for begins in (_WORDS, "patch"))
        if words or patches:
            return not words
    return None


def _axis(label: str, low: int, high: int) -> Axis:
    return Axis(label, low, offsets_of(low, high - low + 1))


def _range(low: int, high: int) -> str:
    return f"{low:+d} to {high:+d}".replace("-", "\N{MINUS SIGN}").replace("+0", "0")


_ALIKE = 64
_WRITERS = "wte|embed_tokens|lm_head|token_embed"
"""Names of the word embedding in models that generate text: GPT-2, Llama, relpos."""
_WORDS = rf"(?:{_WRITERS}|word_embeddings|shared)\."
_AXES = {"rel_pos_h": "row", "rel_pos_w": "column", "0": "row", "1": "column"}
_Make = Callable[[str, Values, StoredTensors, Mapping[str, Any]], Stored]
_KINDS: tuple[tuple[str, _Make], ...] = (
    (r"relative_attention_bias(?:\.weight)?", _buckets),
    (r"relative_position_bias_table", _table),
    (r"tables\.[01]", _of_axis),
    (r"rel_embeddings(?:\.weight)?", _disentangled),
    (r"rel_pos_[hw]|rel_pos\.[01]", _vectors),
    (r"(?:key|value)_vectors", _vectors),
)
KNOWN = ("relative_attention_bias", "relative_position_bias_table", "rel_embeddings", "rel_pos_h")
"""Names that a message gives as examples."""
