"""Brings a model source into a folder that workers and frontends can read: fetches from a hub, converts GGUF.

The work is done by processes of their own, which tell their progress in lines; this module runs them and reads those.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from ...ipc.conditions import Refusal, TrimaranError
from .children import module_command, run_tool
from .model_source import GgufFile, HubModel, LocalFolder, ModelSource

# Of a folder given by --tokenizer; the rest of the model's folder stays in force.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class FetchFailed(TrimaranError):
    """A fetch or conversion broke, through no fault of the user's that is known."""


class Model(Struct, frozen=True):
    """Where a model is. `text_folder` has the tokenizer: another folder where `--tokenizer` is given."""

    folder: Path
    text_folder: Path
    root: str


class Fetching(Struct, frozen=True, kw_only=True):
    """What a fetch needs to know, and whom it tells."""

    cache: Path
    run_directory: Path
    tokenizer: Path | None
    with_weights: bool
    environment: Mapping[str, str]
    death_pipe: int
    progress: Callable[[float, str], None]
    warning: Callable[[str], None]


async def bring(source: ModelSource, fetching: Fetching) -> Model:
    """The model, ready to be read.

    Raises:
        Refusal: it cannot be had or served, as the process that tried says.
        FetchFailed: that process broke.
    """
    match source:
        case LocalFolder():
            folder, root = source.path, source.name
        case GgufFile():
            command = [*module_command("device_workers.weights.from_gguf"), str(source.path)]
            command += [str(fetching.cache / "converted"), "--fallback", str(fetching.run_directory / "converted")]
            if fetching.tokenizer is not None:
                command.append("--without-tokenizer")
            folder = await _run(command, f"converting {source.path.name}", fetching)
            root = str(folder)
        case HubModel():
            command = [*module_command("frontend.launch.hub_download"), source.name]
            command += [source.revision] if source.revision is not None else []
            command += [] if fetching.with_weights else ["--without-weights"]
            folder = await _run(command, f"fetching {source.name}", fetching)
            root = source.name
    sampling = source.sampling if isinstance(source, GgufFile) else {}
    if fetching.tokenizer is None and not sampling:
        return Model(folder, folder, root)
    text_folder = _copied_text(folder, fetching.run_directory / "text")
    if fetching.tokenizer is not None:
        _give_tokenizer(fetching.tokenizer, text_folder)
    if sampling:
        _give_sampling(sampling, text_folder / "generation_config.json")
    return Model(folder, text_folder, root)


async def _run(command: list[str], what: str, fetching: Fetching) -> Path:
    done: list[Path] = []
    refused: list[str] = []
    strange: list[str] = []

    def told(line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "progress":
                fraction, _, detail = rest.partition(" ")
                fetching.progress(float(fraction), detail)
            case "warning":
                fetching.warning(rest)
            case "refused":
                refused.append(rest)
            case "done":
                done.append(Path(rest))
            case _:
                strange.append(line)

    code = await run_tool(command, environment=fetching.environment, death_pipe=fetching.death_pipe, told=told)
    if refused:
        raise Refusal(refused[0])
    if code != 0 or not done:
        raise FetchFailed(f"{what} ended with exit code {code}: {strange[-1] if strange else 'without a word'}")
    return done[0]


def _copied_text(folder: Path, target: Path) -> Path:
    """The model's files but its weights, to be changed."""
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copyfile(file, target / file.name)  # without its mode, which may be read-only
    return target


def _give_tokenizer(tokenizer: Path, target: Path) -> None:
    """The given tokenizer's files in the place of the model's own."""
    given = [tokenizer] if tokenizer.is_file() else [tokenizer / name for name in TOKENIZER_FILES]
    found = [file for file in given if file.is_file()]
    if not any(file.name.endswith(".json") for file in found):
        raise Refusal(f"--tokenizer {tokenizer} holds no tokenizer.json. Name that file or its folder.")
    (target / "tokenizer.json").unlink(missing_ok=True)
    for file in found:
        shutil.copyfile(file, target / ("tokenizer.json" if tokenizer.is_file() else file.name))


def _give_sampling(sampling: dict[str, float], file: Path) -> None:
    told = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**sampling, **told}))
