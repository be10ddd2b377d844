"""Writes a safetensors file tensor by tensor, so that no more than a slice of one is in memory.

The format: an 8-byte little-endian length, a JSON header with dtype, shape and byte range of each tensor, the bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


class Entry(Struct, frozen=True):
    """A tensor to be written, under its final name."""

    name: str
    shape: tuple[int, ...]


def header_of(entries: Sequence[Entry], dtype: str) -> tuple[bytes, int]:
    """The file's bytes before the first tensor, and the number of bytes of all tensors."""
    code, item_bytes = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + int(np.prod(entry.shape)) * item_bytes
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # tensors start aligned, so that readers may map them
    return len(text).to_bytes(8, "little") + text, offset


def write(path: Path, entries: Sequence[Entry], pieces: Iterable[NDArray[np.float32]], dtype: str) -> Iterator[int]:
    """Writes the tensors in order, from float32 pieces that follow each other; yields the bytes written after each."""
    header, num_bytes = header_of(entries, dtype)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for piece in pieces:
            written += file.write(encoded(piece, dtype).data)
            yield written
    assert written == num_bytes, f"{path}: {written} bytes of tensors were written, {num_bytes} announced"


def encoded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The values in a dtype's bytes, rounded to nearest even as torch does."""
    values = np.ascontiguousarray(values)
    match dtype:
        case "float32":
            return values
        case "float16":
            return values.astype(np.float16)
        case _:
            return _bfloat16(values)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    result = (rounded >> np.uint32(16)).astype(np.uint16)
    not_numbers = np.isnan(values)
    if not_numbers.any():  # rounding could carry a NaN over into infinity or zero
        result[not_numbers] = 0x7FC0
    return result
