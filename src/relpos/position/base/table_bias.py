"""A bias whose value at each offset is a row of a learned table. The rows depend on the line, and are cached on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from types import NoneType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import (
    Coordinates,
    Grid,
    LineBias,
    Lines,
    Offsets,
    Rows,
    Sequence,
    Terms,
    at_least_float32,
    cached,
    lines,
    read,
)
from relpos.core.tree import unchecked
from relpos.position.base.mechanism import bytes_of_lines
from relpos.position.base.offset_bias import OffsetBias

_REGULAR = (Sequence, Grid, NoneType)
"""Coordinates that are plain values."""


class TableBias(OffsetBias):
    """Subclasses say which table is read, which row each offset reads, and which of their settings decide that."""

    @abstractmethod
    def _table(self) -> Float[Tensor, "R H"]:
        """The learned numbers, one column per head."""

    @abstractmethod
    def _row_of(self, offsets: Offsets) -> Int[Tensor, " L"]:
        """The row of the table that each entry of the line reads."""

    @abstractmethod
    def _settings(self) -> Hashable:
        """The settings that, with the offsets, decide which rows are read."""

    def _in_order(self, offsets: Offsets) -> bool:
        """Whether the line reads all rows in order, each once."""
        return False

    def _rows(self, offsets: Offsets) -> Rows:
        count = self._table().shape[0]
        if self._in_order(offsets):
            return Rows(torch.arange(count, device=offsets.kind.device), count, in_order=True)
        return Rows(self._row_of(offsets), count)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        table = at_least_float32(self._table())
        return read(table, cached(offsets, self._settings(), table.device, lambda: self._rows(offsets)))

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        if self._decoding_terms is not None or type(queries) not in _REGULAR or type(keys) not in _REGULAR:
            return super().terms(queries, keys)
        device = self.device
        line, rows = cached(  # line and rows by one lookup, which shows in the time of small calls
            self, (queries, keys, device, "rows"), device, lambda: self._line_and_rows(queries, keys, device),
            lambda: bytes_of_lines(queries, keys),
        )  # fmt: skip
        return self._terms_on(line) if rows is None else self._read(line, rows)

    def _line_and_rows(
        self, queries: Coordinates, keys: Coordinates | None, device: torch.device
    ) -> tuple[Lines, Rows | None]:
        line = lines(*self._accepted(queries, keys), device=device)
        return line, self._rows_on(line)

    def _terms_on(self, line: Lines) -> Terms:
        rows = self._rows_on(line)
        return super()._terms_on(line) if rows is None else self._read(line, rows)

    def _rows_on(self, line: Lines) -> Rows | None:
        """The rows that a line reads; None where the bias is more than a lookup of them."""
        prefix_apart = line.length != line.layout.tokens and not self._covers_prefix
        if prefix_apart or getattr(self.bias, "__func__", None) is not TableBias.bias:  # it is overridden
            return None
        return cached(line, self._settings(), line.query.device, lambda: self._rows(line.offsets()))

    def _read(self, line: Lines, rows: Rows) -> Terms:
        values = read(at_least_float32(self._table()), rows)
        if values.dim() != 2 or values.shape[1] != line.length:  # the table was replaced
            return super()._terms_on(line)  # which raises
        return unchecked(Terms, items=(unchecked(LineBias, values=values, lines=line), *self._extra_terms()))
