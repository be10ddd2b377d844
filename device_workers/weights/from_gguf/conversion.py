"""Converts a GGUF model once into a Hugging Face folder in the cache.

A conversion is atomic: it happens in a partial folder, under a lock that other starts wait for, and ends by a rename.
A folder whose files have not the sizes that its manifest states is made anew.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from msgspec import Struct
from numpy.typing import NDArray

from . import safetensors_file
from .architecture import Architecture, architecture_of, config_of, end_token_ids, heads_to_reorder, hugging_face_name
from .architecture import special_ids as special_ids_of
from .source import Refused, Source, Tensor, parts_of
from .tokenizer import other_chat_templates_of, tokenizer_config_of, tokenizer_of, warning_of

FORMAT = 1  # raised whenever a conversion would come out otherwise
MANIFEST = "conversion.json"
SLICE_BYTES = 32 * 1024 * 1024  # float32 values in flight
FREE_MARGIN_BYTES = 16 * 1024 * 1024


class Manifest(Struct, frozen=True):
    """What was converted and how large each file came out; the last file written."""

    format: int
    source: list[str]
    sizes: dict[str, int]


class Told(Struct, frozen=True):
    """Where progress and warnings go."""

    progress: Callable[[float, str], None]
    warning: Callable[[str], None]


def converted(
    path: Path, cache: Path, told: Told, *, fallback: Path | None = None, with_tokenizer: bool = True
) -> Path:
    """The Hugging Face folder of the model that `path` names, made if it is not whole in the cache.

    A cache that may not be written (read-only, no permission) is passed over for `fallback`, with a warning.

    Raises:
        Refused: the file cannot be served, or the cache cannot take it.
    """
    parts = parts_of(path)
    folder = cache / _folder_name(parts, with_tokenizer)
    if is_whole(folder):
        told.progress(1.0, "found in the cache")
        return folder
    source = Source(parts)
    architecture = architecture_of(source)
    source.check_types()
    if fallback is not None and not _may_write(cache):
        told.warning(f"{cache} cannot be written; the model is converted to {fallback} for this run.")
        folder, cache = fallback / folder.name, fallback
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{folder.name}.lock", told):
            if not is_whole(folder):
                _replace(folder, source, architecture, told, with_tokenizer=with_tokenizer)
    except OSError as error:
        raise Refused(
            f"The converted model cannot be written to {cache}: {error.strerror or error}. "
            "Free space there, or name another folder with --cache-dir."
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file that the folder's manifest lists is there in its full size."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.sizes}
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.format == FORMAT and sizes == manifest.sizes


def _may_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _folder_name(parts: list[Path], with_tokenizer: bool) -> str:
    """The model's name, and a hash of what would make another conversion necessary."""
    stats = [(str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    digest = hashlib.sha256(repr((FORMAT, stats, with_tokenizer)).encode()).hexdigest()
    return f"{parts[0].stem[:80]}-{digest[:16]}"


@contextmanager
def _locked(path: Path, told: Told) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told.progress(0.0, "waiting for another start that converts the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(folder: Path, source: Source, architecture: Architecture, told: Told, *, with_tokenizer: bool) -> None:
    if folder.exists():
        told.warning(f"{folder} is not whole and is made anew.")
        shutil.rmtree(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a start that was killed; the lock says nobody uses it
    partial.mkdir()
    try:
        _fill(partial, source, architecture, told, with_tokenizer=with_tokenizer)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fill(folder: Path, source: Source, architecture: Architecture, told: Told, *, with_tokenizer: bool) -> None:
    dtype = _dtype_of(source)
    config = config_of(source, architecture, dtype)
    if with_tokenizer:  # before the weights: what is refused should be refused early
        told.progress(0.0, "reading the tokenizer")
        tokenizer = tokenizer_of(source)
        _save_text(folder, "tokenizer.json", tokenizer.to_str(pretty=False))
        _save(folder, "tokenizer_config.json", tokenizer_config_of(source, config["max_position_embeddings"]))
        for name, text in other_chat_templates_of(source).items():
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            _save_text(folder, f"additional_chat_templates/{Path(name).name}.jinja", text)
        warning = warning_of(source)
        if warning is not None:
            told.warning(warning)
    _save(folder, "config.json", config)
    ends = end_token_ids(source)
    generation = {**special_ids_of(source), **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})}
    _save(folder, "generation_config.json", generation)
    _write_weights(folder / "model.safetensors", source, architecture, dtype, told)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    _save(folder, MANIFEST, msgspec.to_builtins(Manifest(FORMAT, [str(part) for part in source.paths], sizes)))


def _write_weights(path: Path, source: Source, architecture: Architecture, dtype: str, told: Told) -> None:
    wanted = [tensor for tensor in source.tensors() if hugging_face_name(tensor.name) is not None]
    entries = [safetensors_file.Entry(str(hugging_face_name(tensor.name)), tensor.shape) for tensor in wanted]
    header, num_bytes = safetensors_file.header_of(entries, dtype)
    free = shutil.disk_usage(path.parent).free
    if free < len(header) + num_bytes + FREE_MARGIN_BYTES:
        raise Refused(
            f"The converted model takes {num_bytes / 1e6:.0f} MB, {path.parent.parent} has {free / 1e6:.0f} MB. "
            "Free some there, or name another folder with --cache-dir."
        )
    slices = (
        piece for tensor in wanted for piece in _slices(tensor, heads_to_reorder(architecture, tensor.name, source))
    )
    for written in safetensors_file.write(path, entries, slices, dtype):
        told.progress(written / num_bytes, "converting weights")


def _slices(tensor: Tensor, num_heads: int) -> Iterator[NDArray[np.float32]]:
    """The tensor's values in order, a bounded number at a time; rows of reordered heads put right."""
    num_rows = tensor.data.shape[0]
    if num_heads:
        yield _in_rotary_order(tensor.float32(0, num_rows), num_heads)
        return
    row_bytes = int(np.prod(tensor.shape)) * 4 // num_rows
    step = max(1, SLICE_BYTES // row_bytes) if len(tensor.shape) > 1 else num_rows
    for first in range(0, num_rows, step):
        yield tensor.float32(first, min(first + step, num_rows))


def _in_rotary_order(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undoes llama.cpp's interleaving of the two halves of each head's rows."""
    rows = values.shape[0]
    halves = values.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _dtype_of(source: Source) -> str:
    """The dtype that loses least: that of plain matrices, bfloat16 for quantised ones."""
    kinds = {tensor.type for tensor in source.tensors() if len(tensor.shape) > 1}
    if TensorType.F32 in kinds:
        return "float32"
    return "float16" if kinds == {TensorType.F16} else "bfloat16"


def _save(folder: Path, name: str, content: Any) -> None:
    _save_text(folder, name, msgspec.json.format(msgspec.json.encode(content), indent=1).decode())


def _save_text(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
