"""`python -m trimaran.device_workers.weights.from_gguf FILE CACHE`: converts, telling its progress in lines.

Lines on stdout, each a word and its text: `progress FRACTION WHAT`, `warning TEXT`, and last `done FOLDER` (exit 0) or
`refused TEXT` (exit 2). A process of its own, since the supervisor's loop must not do this work.
"""

import argparse
import sys
from pathlib import Path

from ....ipc.process import die_with_parent
from .conversion import Told, converted
from .source import Refused


class Lines:
    """Progress as lines, one per hundredth."""

    def __init__(self) -> None:
        self._last = ""

    def progress(self, fraction: float, what: str) -> None:
        line = f"progress {fraction:.2f} {what}"
        if line != self._last:
            self._last = line
            print(line, flush=True)

    def warning(self, text: str) -> None:
        print(f"warning {_one_line(text)}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Converts a GGUF model into a Hugging Face folder in a cache.")
    parser.add_argument("file", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--fallback", type=Path, help="where to convert to if the cache cannot be written")
    parser.add_argument("--without-tokenizer", action="store_true")
    parser.add_argument("--death-pipe", type=int)
    parser.add_argument("--parent", type=int)
    asked = parser.parse_args(arguments)
    if asked.parent is not None:
        die_with_parent(asked.death_pipe, asked.parent)
    lines = Lines()
    told = Told(lines.progress, lines.warning)
    fallback = asked.fallback.absolute() if asked.fallback is not None else None
    try:
        folder = converted(
            asked.file.absolute(),
            asked.cache.absolute(),
            told,
            fallback=fallback,
            with_tokenizer=not asked.without_tokenizer,
        )
    except Refused as refusal:
        print(f"refused {_one_line(str(refusal))}", flush=True)
        return 2
    print(f"done {folder}", flush=True)
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
