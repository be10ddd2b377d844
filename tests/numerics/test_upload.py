"""Weights that go to a device by pinned buffers are those of the file, and a file that shrinks meanwhile is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimaran.device_workers.models.parameters import Parameter
from trimaran.device_workers.platforms.contract import Backend
from trimaran.device_workers.weights.safetensors_source import SafetensorsSource
from trimaran.device_workers.weights.upload import Upload
from trimaran.ipc.conditions import Refusal

from ..surfaces.machines import Machine

PIECE_BYTES = 1024


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    platform = Machine("cuda", tmp_path).install(monkeypatch)
    yield platform.open(0, num_threads=2, cache_dir=None, warn=lambda text: None)


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of less than a piece, of many more than there are buffers, and of a dtype that is not uploaded."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        "small": torch.randn(5, generator=generator),
        "large": torch.randn(100, 77, generator=generator).to(torch.bfloat16),
        "half": torch.randn(16, 512, generator=generator).to(torch.float16),
        "whole": torch.arange(12).view(3, 4),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def parameter(name: str, tensor: torch.Tensor) -> Parameter:
    return Parameter(name=name, shape=tuple(tensor.shape))


def test_uploaded_are_the_files_tensors(backend: Backend, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    seen: list[int] = []
    upload = Upload(backend, PIECE_BYTES)
    source = SafetensorsSource(tmp_path, lambda done, total: seen.append(done), upload)
    read = {name: source.read(parameter(name, tensor)) for name, tensor in weights.items() if tensor.dim()}
    large = source.read(parameter("large", weights["large"]), rows=(13, 90))
    columns = source.read(parameter("large", weights["large"]), columns=(5, 20))
    backend.synchronize()
    assert all(
        torch.equal(tensor, weights[name]) and tensor.dtype == weights[name].dtype for name, tensor in read.items()
    )
    assert torch.equal(large, weights["large"][13:90]) and torch.equal(columns, weights["large"][:, 5:20])
    assert seen == sorted(seen) and seen[0] == 20 and len(seen) == 7


def test_a_file_that_shrinks_meanwhile_is_refused(backend: Backend, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    source = SafetensorsSource(tmp_path, upload=Upload(backend, PIECE_BYTES))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10_000)
    with pytest.raises(Refusal, match="was cut off while it was read"):
        for name in ("half", "large"):
            source.read(parameter(name, weights[name]))


def test_a_file_put_in_its_place_is_another_one(backend: Backend, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    source = SafetensorsSource(tmp_path, upload=Upload(backend, PIECE_BYTES))
    save_file({"large": torch.zeros(2, 2)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "model.safetensors")
    assert torch.equal(source.read(parameter("large", weights["large"])), weights["large"])
    assert list(load_file(tmp_path / "model.safetensors")) == ["large"]
