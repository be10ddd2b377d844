"""Packs named numpy columns into one buffer and reads them back without copying.

A packed set is: `num_columns` int64 lengths, then each column at the next multiple of 8 bytes. The schema (names
and dtypes, in order) is fixed in code on both sides and never travels, so a foreign buffer can at worst give wrong
lengths, which `unpack` refuses.
"""

from collections.abc import Mapping
from struct import Struct
from typing import Any, Self

import numpy as np

from .conditions import Oversized, TrimaranError

Column = np.ndarray[Any, np.dtype[Any]]


class MalformedColumns(TrimaranError):
    """The lengths in a packed buffer point outside it."""


def _aligned(num_bytes: int) -> int:
    return (num_bytes + 7) & ~7


class ColumnSchema:
    """The fixed list of columns of one message kind."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.names = tuple(columns)
        self.dtypes = tuple(np.dtype(dtype) for dtype in columns.values())
        self.empty = {name: np.empty(0, dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)}
        self._places = {name: index for index, name in enumerate(self.names)}
        self._head = Struct(f"={len(self.names)}q")
        self._layout = tuple((name, dtype, dtype.itemsize) for name, dtype in zip(self.names, self.dtypes, strict=True))

    def pack_into(self, buffer: memoryview, values: Mapping[str, Column]) -> int:
        """Write `values` (as for `pack`) and return the bytes written. Raises Oversized, having written nothing, when
        they do not fit.
        """
        packed = self.pack(values)
        if len(packed) > len(buffer):
            raise Oversized(len(packed), len(buffer))
        buffer[: len(packed)] = packed
        return len(packed)

    def pack(self, values: Mapping[str, Column]) -> bytes:
        """The packed form of columns by name, of the schema's dtypes; a missing one is empty."""
        lengths = [0] * len(self.names)
        parts = [b""]  # the first is for the lengths
        for index, value in sorted([(self._places[name], value) for name, value in values.items()]):
            lengths[index] = len(value)
            packed = value.astype(self.dtypes[index], copy=False).tobytes()
            parts.append(packed)
            if rest := len(packed) % 8:
                parts.append(bytes(8 - rest))
        parts[0] = self._head.pack(*lengths)
        return b"".join(parts)

    def unpack(self, buffer: memoryview | bytes) -> dict[str, Column]:
        """Views into `buffer`, by name, of the columns that are not empty; copy what must outlive it. Raises
        MalformedColumns.
        """
        available = len(buffer)
        if available < self._head.size:
            raise MalformedColumns(f"{available} bytes cannot hold {len(self.names)} columns")
        lengths = self._head.unpack_from(buffer)
        offset = self._head.size
        columns: dict[str, Column] = {}
        for (name, dtype, itemsize), length in zip(self._layout, lengths, strict=True):
            if length == 0:
                continue
            if length < 0 or offset + length * itemsize > available:
                raise MalformedColumns(f"column {name} claims {length} items at {offset} of {available} bytes")
            columns[name] = np.frombuffer(buffer, dtype, length, offset)
            offset += _aligned(length * itemsize)
        return columns


class Columns:
    """A set of columns as attributes. A set holds those it was given; the others are the class's, which are empty."""

    SCHEMA: ColumnSchema

    def __init_subclass__(cls) -> None:
        for name, empty in cls.SCHEMA.empty.items():
            setattr(cls, name, empty)

    def __init__(self, **columns: Column) -> None:
        assert columns.keys() <= self.SCHEMA.empty.keys(), f"no such columns: {columns.keys() - self.SCHEMA.empty}"
        self.__dict__ = columns

    def values(self) -> Mapping[str, Column]:
        """The columns that were given, ready to pack."""
        return self.__dict__

    @classmethod
    def unpack(cls, buffer: memoryview | bytes) -> Self:
        """Views into `buffer`; the caller copies what outlives the slot."""
        return cls(**cls.SCHEMA.unpack(buffer))

    def copy(self) -> Self:
        """Columns of its own, which outlive the ring slot they came from."""
        return type(self)(**{name: column.copy() for name, column in self.values().items()})
