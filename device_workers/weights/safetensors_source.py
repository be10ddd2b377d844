"""Weights from safetensors files, memory-mapped: one file, or several with an index. Only asked slices are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...ipc.conditions import Refusal
from ..models.parameters import HEAD, IGNORED_SUFFIXES, Parameter
from .source import OnBytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 6


class SafetensorsSource:
    """An open checkpoint. Reads convert nothing: tensors have the dtype of the file."""

    def __init__(self, directory: Path, on_bytes: OnBytes = lambda done, total: None) -> None:
        """Raises Refusal when files are missing, cut off or not safetensors."""
        self._directory = directory
        self._on_bytes = on_bytes
        self._files = {path.name: _opened(path) for path in _weight_files(directory)}
        self._total_bytes = sum((directory / name).stat().st_size for name in self._files)
        self._read_bytes = 0
        self._file_of = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    def check(self, needed: Mapping[str, Parameter]) -> None:
        missing = [name for name in needed if name not in self._file_of]
        if missing:
            raise Refusal(f"{self._directory} lacks {_shown(missing)}: download the model again")
        unexpected = [name for name in self._file_of if name not in needed and not _ignored(name)]
        if unexpected:
            raise Refusal(
                f"{self._directory} holds {_shown(unexpected)}, which this architecture does not have: "
                "config.json and weights do not belong together; download the model again"
            )
        for name, parameter in needed.items():
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != parameter.shape:
                raise Refusal(
                    f"{name} in {self._directory} has shape {shape}, config.json says {parameter.shape}: "
                    "download the model again"
                )

    def read(
        self, parameter: Parameter, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        view = self._file_of[parameter.name].get_slice(parameter.name)
        tensor: torch.Tensor
        if columns is not None:
            tensor = view[:, columns[0] : columns[1]]
        elif rows is not None:
            tensor = view[rows[0] : rows[1]]
        else:
            tensor = view[:]
        self._read_bytes += tensor.nbytes
        self._on_bytes(self._read_bytes, self._total_bytes)
        return tensor


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
