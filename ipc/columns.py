"""Packs named numpy columns into one buffer and reads them back without copying.

A packed set is: `num_columns` int64 lengths, then each column at the next multiple of 8 bytes. The schema (names
and dtypes, in order) is fixed in code on both sides and never travels, so a foreign buffer can at worst give wrong
lengths, which `unpack` refuses.
"""

from collections.abc import Mapping, Sequence
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
        self._head_bytes = 8 * len(self.names)
        self._layout = tuple((name, dtype, dtype.itemsize) for name, dtype in zip(self.names, self.dtypes, strict=True))

    def packed_bytes(self, values: Sequence[Column]) -> int:
        """Bytes that `values`, in schema order, take when packed."""
        return self._head_bytes + sum(_aligned(value.nbytes) for value in values)

    def pack_into(self, buffer: memoryview, values: Sequence[Column]) -> int:
        """Write `values` (in schema order, C-contiguous, of the schema's dtypes) and return the bytes written.

        Raises Oversized, having written nothing that a reader will see, when they do not fit.
        """
        total = self.packed_bytes(values)
        if total > len(buffer):
            raise Oversized(total, len(buffer))
        lengths = [len(value) for value in values]
        np.frombuffer(buffer, np.int64, len(lengths))[:] = lengths
        offset = self._head_bytes
        for value, length, (_, dtype, itemsize) in zip(values, lengths, self._layout, strict=True):
            if length:
                np.frombuffer(buffer, dtype, length, offset)[:] = value
                offset += _aligned(length * itemsize)
        return offset

    def pack(self, values: Sequence[Column]) -> bytearray:
        """The packed form as bytes of its own, for a socket."""
        packed = bytearray(self.packed_bytes(values))
        self.pack_into(memoryview(packed), values)
        return packed

    def unpack(self, buffer: memoryview | bytes) -> dict[str, Column]:
        """Views into `buffer`, by name; copy what must outlive it. Raises MalformedColumns."""
        available = len(buffer)
        if available < self._head_bytes:
            raise MalformedColumns(f"{available} bytes cannot hold {len(self.names)} columns")
        lengths = np.frombuffer(buffer, np.int64, len(self.names)).tolist()
        offset = self._head_bytes
        columns: dict[str, Column] = {}
        for (name, dtype, itemsize), length in zip(self._layout, lengths, strict=True):
            if length == 0:
                columns[name] = self.empty[name]
                continue
            if length < 0 or offset + length * itemsize > available:
                raise MalformedColumns(f"column {name} claims {length} items at {offset} of {available} bytes")
            columns[name] = np.frombuffer(buffer, dtype, length, offset)
            offset += _aligned(length * itemsize)
        return columns


class Columns:
    """A set of columns as attributes; a missing one is empty."""

    SCHEMA: ColumnSchema
    __slots__ = ()

    def __init__(self, **columns: Column) -> None:
        for name, empty in self.SCHEMA.empty.items():
            setattr(self, name, columns.pop(name, empty))
        assert not columns, f"no such columns: {sorted(columns)}"

    def values(self) -> list[Column]:
        """The columns in schema order, ready to pack."""
        return [getattr(self, name) for name in self.SCHEMA.names]

    @classmethod
    def unpack(cls, buffer: memoryview | bytes) -> Self:
        """Views into `buffer`; the caller copies what outlives the slot."""
        return cls(**cls.SCHEMA.unpack(buffer))

    def copy(self) -> Self:
        """Columns of its own, which outlive the ring slot they came from."""
        return type(self)(**{name: getattr(self, name).copy() for name in self.SCHEMA.names})
