"""Weights from safetensors files: one file, or several with an index. Only asked slices are read.

For the processor files are memory-mapped; for another device whole rows go there by an upload, other slices as mapped.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.conditions import Refusal
from ..models.parameters import EMBEDDING, HEAD, IGNORED_SUFFIXES, Parameter
from .source import OnBytes
from .upload import Upload

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 6
_BARE_EMBEDDING = EMBEDDING.removeprefix("model.")
_UPLOADED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsSource:
    """An open checkpoint. Reads convert nothing: tensors have the dtype of the file."""

    def __init__(
        self, directory: Path, on_bytes: OnBytes = lambda done, total: None, upload: Upload | None = None
    ) -> None:
        """Raises Refusal when files are missing, cut off or not safetensors."""
        self._directory = directory
        self._on_bytes = on_bytes
        self._files = {path.name: _opened(path) for path in _weight_files(directory)}
        self._total_bytes = sum((directory / name).stat().st_size for name in self._files)
        self._read_bytes = 0
        stored = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        prefix = "model." if _BARE_EMBEDDING in stored else ""  # it was saved without the head's class around it
        self._file_of = {prefix + name: file for name, file in stored.items()}
        self._prefix = prefix
        self._upload = upload
        self._stored = {} if upload is None else _stored(directory / name for name in self._files)

    def check(self, needed: Mapping[str, Parameter], ignored_prefixes: tuple[str, ...] = ()) -> None:
        missing = [name for name in needed if name not in self._file_of]
        if missing:
            raise Refusal(f"{self._directory} lacks {_shown(missing)}: download the model again")
        others = [name for name in self._file_of if name not in needed and not _ignored(name)]
        unexpected = [name for name in others if not name.startswith(ignored_prefixes)]
        if unexpected:
            raise Refusal(
                f"{self._directory} holds {_shown(unexpected)}, which this architecture does not have: "
                "config.json and weights do not belong together; download the model again"
            )
        for name, parameter in needed.items():
            shape = tuple(self._slice(name).get_shape())
            if shape != parameter.shape:
                raise Refusal(
                    f"{name} in {self._directory} has shape {shape}, config.json says {parameter.shape}: "
                    "download the model again"
                )

    def read(
        self, parameter: Parameter, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        tensor = self._uploaded(parameter, rows) if columns is None else None
        if tensor is None:
            tensor = self._mapped(parameter, rows, columns)
        self._read_bytes += tensor.nbytes
        self._on_bytes(self._read_bytes, self._total_bytes)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._file_of[name].get_slice(name.removeprefix(self._prefix))

    def _uploaded(self, parameter: Parameter, rows: tuple[int, int] | None) -> torch.Tensor | None:
        """None where it is not to be uploaded."""
        stored = self._stored.get(parameter.name.removeprefix(self._prefix))
        if stored is None or self._upload is None:
            return None
        first, last = rows or (0, parameter.shape[0])
        row_bytes = stored.num_bytes // parameter.shape[0]
        read = self._upload.read(
            stored.file.path, stored.file.descriptor, stored.begin + first * row_bytes, (last - first) * row_bytes
        )
        return read.view(stored.dtype).view(last - first, *parameter.shape[1:])

    def _mapped(
        self, parameter: Parameter, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> torch.Tensor:
        view = self._slice(parameter.name)
        tensor: torch.Tensor
        if columns is not None:
            tensor = view[:, columns[0] : columns[1]]
        elif rows is not None:
            tensor = view[rows[0] : rows[1]]
        else:
            tensor = view[:]
        return tensor


class _File:
    """Open for reads of its bytes, until it is dropped: a file put in its place is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def header(self) -> tuple[dict[str, Any], int]:
        """What it says of its tensors, and where their bytes begin."""
        num_bytes = int.from_bytes(os.pread(self.descriptor, 8, 0), "little")
        return json.loads(os.pread(self.descriptor, num_bytes, 8)), 8 + num_bytes


class _Stored(NamedTuple):
    """Where a tensor's bytes lie, one row after the other."""

    file: _File
    begin: int
    num_bytes: int
    dtype: torch.dtype


def _stored(paths: Iterable[Path]) -> dict[str, _Stored]:
    """By name; of files that were opened, so that their headers are sound."""
    found = {}
    for path in paths:
        file = _File(path)
        tensors, data = file.header()
        for name, facts in tensors.items():
            begin, end = facts.get("data_offsets", (0, 0))
            if facts.get("dtype") in _UPLOADED and facts["shape"] and begin < end:
                found[name] = _Stored(file, data + begin, end - begin, _UPLOADED[facts["dtype"]])
    return found


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise Refusal(f"{index} cannot be read ({error!r}): download the model again") from None
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise Refusal(f"{directory} lacks {_shown(absent)}, which its index names: download the model again")
        return [directory / name for name in names]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    raise Refusal(f"{directory} holds neither {SINGLE} nor {INDEX}: name a directory with safetensors weights")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise Refusal(f"{path} ({size} bytes) is cut off or damaged ({error}): download the model again") from None
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error}): check its permissions") from None


def _ignored(name: str) -> bool:
    """Derived buffers, and the head that a tied model may repeat."""
    return name.endswith(IGNORED_SUFFIXES) or name == HEAD


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
