"""`python -m trimaran.frontend.launch.hub_download NAME [REVISION] [--without-weights]`: fills the hub's cache.

Lines on stdout, as the GGUF converter's: `progress FRACTION WHAT`, `warning TEXT`, and last `done FOLDER` (exit 0) or
`refused TEXT` (exit 2). A process of its own: the library blocks, and its import is only paid where a hub is named.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...ipc.conditions import Refusal
from ...ipc.process import die_with_parent
from .model_source import LocalFolder, find_model

# What a model needs to be served; weights in other formats stay where they are.
WANTED = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
WEIGHTS = ["*.safetensors"]
UNWANTED = ["original/*", "onnx/*", "consolidated*"]


class ProgressLines(tqdm):  # type: ignore[misc]
    """The library's progress bars as lines of this process, told when bytes go forward by a hundredth."""

    _told = -1.0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.pop("name", None)
        keywords["file"] = open(os.devnull, "w")  # noqa: SIM115 - tqdm writes its own bar somewhere; lives as long as it
        super().__init__(*arguments, **keywords)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.unit != "B" or not self.total:
            return
        fraction = min(self.n / self.total, 1.0)
        if fraction >= ProgressLines._told + 0.01:
            ProgressLines._told = fraction
            _say(f"progress {fraction:.2f} fetching {self.total / 1e6:.0f} MB")


def download(name: str, revision: str | None, *, with_weights: bool = True) -> Path:
    """The model's folder in the hub's cache; from the cache alone where the hub cannot be reached.

    Raises:
        Refusal: the hub doesn't have it, doesn't give it, or cannot be reached and the cache lacks it.
    """
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{name} at revision {revision}" if revision else name
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=WANTED + (WEIGHTS if with_weights else []),
            ignore_patterns=UNWANTED,
            tqdm_class=ProgressLines,
        )
    except errors.GatedRepoError:
        raise Refusal(
            f"{name} is given to those who accept its terms. Accept them on the hub and set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise Refusal(
            f"The hub has no model {name!r}, or not for you. Check the spelling, set HF_TOKEN if it is private, "
            "or name a folder of this machine."
        ) from None
    except errors.RevisionNotFoundError:
        raise Refusal(f"{name} has no revision {revision!r}. Name a branch, tag or commit that it has.") from None
    except errors.LocalEntryNotFoundError as error:
        raise Refusal(
            f"{at} is not in the hub's cache, and the hub cannot be reached ({_reason(error)}). Connect it, "
            "or bring the model here by other means and name its folder; without a model, the demo is served."
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise Refusal(f"{at} cannot be fetched ({_reason(error)}). Try again, or name a folder.") from None
    found = find_model(folder, weights_needed=with_weights)  # refuses what holds no config or no weights
    assert isinstance(found, LocalFolder), f"{folder} led to {found}"
    return Path(folder)


def _reason(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Fetches a hub model into the hub's cache.")
    parser.add_argument("name")
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--without-weights", action="store_true")
    parser.add_argument("--death-pipe", type=int)
    parser.add_argument("--parent", type=int)
    asked = parser.parse_args(arguments)
    if asked.parent is not None:
        die_with_parent(asked.death_pipe, asked.parent)
    try:
        folder = download(asked.name, asked.revision, with_weights=not asked.without_weights)
    except Refusal as refusal:
        _say(f"refused {' '.join(str(refusal).split())}")
        return 2
    _say(f"done {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
