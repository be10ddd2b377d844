"""A model in one GGUF file or several parts: its metadata and its tensors, read through memory maps.

Owns opening, joining of parts and the refusal of what cannot be read. Does not know architectures.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from msgspec import Struct
from numpy.typing import NDArray

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SUPPORTED_TYPES = tuple(TensorType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))


class Refused(ValueError):
    """This file cannot be served; the text says why and ends with the cure."""


class Tensor(Struct, frozen=True):
    """One tensor of the file. `data` holds raw rows: [rows, bytes of a row] where quantised."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: NDArray[Any]

    def float32(self, first_row: int, end_row: int) -> NDArray[np.float32]:
        """Rows `first_row` to `end_row` of `data` in float32; of a tensor of one dimension, all of it at once."""
        if self.type in (TensorType.F32, TensorType.F16):
            return self.data[first_row:end_row].astype(np.float32)
        values: NDArray[np.float32] = gguf.dequantize(np.ascontiguousarray(self.data[first_row:end_row]), self.type)
        return values


class Source:
    """All parts of one model. The first part's metadata is the model's."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._readers = [_reader(path) for path in paths]
        self._check_parts()

    def has(self, key: str) -> bool:
        return key in self._readers[0].fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, text, or list; `default` where the file has none."""
        field = self._readers[0].fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """As `get`, for a key without which the model cannot be served."""
        if not self.has(key):
            raise Refused(
                f"{self.paths[0].name} lacks the metadata {key!r}. Convert the model again with a newer llama.cpp."
            )
        return self.get(key)

    def tensors(self) -> Iterator[Tensor]:
        for reader in self._readers:
            for tensor in reader.tensors:
                shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
                yield Tensor(tensor.name, tensor.tensor_type, shape, tensor.data)

    def check_types(self) -> None:
        """Refuses a file with a tensor in an encoding that is not supported."""
        strange = {tensor.type.name: tensor.name for tensor in self.tensors() if tensor.type not in SUPPORTED_TYPES}
        if strange:
            found = ", ".join(f"{kind} ({name})" for kind, name in sorted(strange.items()))
            supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
            raise Refused(
                f"{self.paths[0].name} has tensors in encodings that are not supported: {found}. "
                f"Use a file whose tensors are all among {supported}; a Q8_0 or F16 file of the same model usually is."
            )

    def _check_parts(self) -> None:
        count = self.get("split.count", 1)
        if count != len(self.paths):
            raise Refused(
                f"{self.paths[0].name} says it is one of {count} parts, and {len(self.paths)} are named so. "
                "Put all parts, with their original names, into one folder and name the first."
            )
        total = self.get("split.tensors.count")
        held = sum(len(reader.tensors) for reader in self._readers)
        if total is not None and total != held:
            raise Refused(f"The parts of {self.paths[0].name} hold {held} of {total} tensors. Fetch the parts again.")


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` names: itself, or all parts when it is one of them, in order."""
    if not path.is_file():
        raise Refused(f"{path} is not a file. Name a .gguf file that exists.")
    named = PART_NAME.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    parts = [path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise Refused(
            f"{path.name} is a part of {count}, and {', '.join(missing)} is missing beside it. Fetch that too."
        )
    return parts


def _reader(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {error.strerror or error}. Check the file and its permissions."
        ) from None
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        # The library finds a cut or foreign file by tripping over it, in one of these ways.
        raise Refused(f"{path} is not a whole GGUF file that can be read here ({error}). Fetch it again.") from None
