"""A bias whose value at each offset is a row of a learned table. The rows depend on the line, and are cached on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from types import NoneType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Parameter

from relpos.core import (
    Coordinates,
    Grid,
    LineBias,
    Lines,
    Offsets,
    Rows,
    Scale,
    Sequence,
    Terms,
    at_least_float32,
    cached,
    lines,
    read,
)
from relpos.core.cache import FEW_BYTES, cache_of, keep
from relpos.core.terms.table_lookup import TableLookup
from relpos.core.tree import unchecked
from relpos.position.base.mechanism import bytes_of_lines
from relpos.position.base.offset_bias import OffsetBias

_REGULAR = (Sequence, Grid, NoneType)
"""Coordinates that are plain values."""

_MAKERS = ("_read", "_terms_on", "_rows_on", "_line_and_rows")
"""What makes the terms besides `terms` and `bias`."""
_NOTHING: dict[Hashable, Any] = {}


class _Unread(NamedTuple):
    """Terms with a table that is not read, and what of the table they are made for: `.data` may change all of that."""

    table: Tensor
    shape: torch.Size
    device: torch.device
    terms: Terms


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
        line, rows = self._line_and_rows_of(queries, keys, self.device)
        return self._terms_on(line) if rows is None else self._read(line, rows)

    def _unread_terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        """`terms` with a `TableLookup` in place of values, for an engine that reads tables by itself.

        They are `terms` where these are more than a lookup, and where something has replaced what makes them. Kept for
        the next call: they hold the table and not its numbers. Only to be called where `may_cache` is true.
        """
        own = self.__dict__
        if (
            type(self).terms is not TableBias.terms or type(self).bias is not TableBias.bias
            or "terms" in own or "bias" in own or "_decoding_terms" in own
            or type(queries) not in _REGULAR or type(keys) not in _REGULAR
        ):  # fmt: skip
            return self.terms(queries, keys)
        table, key = self._table(), (queries, keys, "unread")
        known: _Unread | None = own.get("_shape_cache", _NOTHING).get(key)
        if known is None or known.table is not table or known.shape != table.shape or known.device != table.device:
            known = self._unread(queries, keys, table)
            if known is None:
                return self.terms(queries, keys)
            plain = type(table) is Parameter and all(type(term) is Scale for term in known.terms.items[1:])
            if plain and bytes_of_lines(queries, keys) <= FEW_BYTES:  # others may hold a graph
                cache_of(self).pop((queries, keys, known.device, "rows"), None)  # they hold the line and its rows
                keep(self, key, known)
        return known.terms

    def _unread(self, queries: Coordinates, keys: Coordinates | None, table: Tensor) -> _Unread | None:
        """Terms that hold this table; None where `terms` are more than a lookup in it, or raise."""
        device = self.device
        if table.dim() != 2 or table.device != device or any(_is_replaced(self, name) for name in _MAKERS):
            return None
        line, rows = self._line_and_rows_of(queries, keys, device)
        if rows is None or rows.rows != table.shape[0] or rows.index.shape[0] != line.length:
            return None
        lookup = unchecked(TableLookup, table=table, rows=rows, lines=line)
        terms = unchecked(Terms, items=(lookup, *self._extra_terms()))
        return _Unread(table, table.shape, device, terms)

    def _line_and_rows_of(
        self, queries: Coordinates, keys: Coordinates | None, device: torch.device
    ) -> tuple[Lines, Rows | None]:
        """Line and rows by one lookup, which shows in the time of small calls."""
        return cached(
            self, (queries, keys, device, "rows"), device, lambda: self._line_and_rows(queries, keys, device),
            lambda: bytes_of_lines(queries, keys),
        )  # fmt: skip

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


def _is_replaced(mechanism: TableBias, name: str) -> bool:
    """Whether a method is not that of `TableBias`."""
    return getattr(getattr(mechanism, name), "__func__", None) is not getattr(TableBias, name)
